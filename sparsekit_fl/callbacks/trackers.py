"""Trackers: options, the numbers of every round and the result, in MLflow or as event files of TensorBoard."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from sparsekit.errors import InvalidValueError
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.errors import need
from sparsekit_fl.results.frames import numbers_of
from sparsekit_fl.results.read import flat
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.scores import RoundRecord, values_over

_LONGEST = 500  # MLflow's own limit of a parameter
_ID = "mlflow.run"


class MLflow(Callback):
    """Log to MLflow, where its environment says (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`). A resumed run goes on.

    Args:
        experiment: Name of the experiment; None takes MLflow's.
        tracking_uri: Where to log; None takes MLflow's.
        name: Name of the run; None takes the method and the seed, behind the name of the run's folder.
        artifacts: Log `result.json` and the models of the run's folder too.

    Raises:
        MissingDependencyError: mlflow is not installed.
    """

    def __init__(
        self, experiment: str | None = None, *, tracking_uri: str | None = None, name: str | None = None, artifacts: bool = True
    ) -> None:
        self._mlflow = need("mlflow", "MLflow logging", extra="log")
        self._experiment = experiment
        self._uri = tracking_uri
        self._name = name
        self._artifacts = artifacts
        self._client: Any = None
        self._run_id = ""

    def on_run_start(self, run: RunView) -> None:
        """Begin a run of MLflow, or go on with the one that the run's folder names."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        kept = None if run.out is None else run.out / _ID
        if run.round and kept is not None and kept.exists():
            self._run_id = kept.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        # Runs of one method and seed differ in their folders.
        folder = "" if run.out is None else f"{run.out.name}: "
        name = self._name or f"{folder}{run.method}, seed {run.config.seed}"
        self._run_id = self._client.create_run(self._experiment_id(), run_name=name).info.run_id
        if kept is not None:
            kept.write_text(self._run_id, encoding="utf-8")
        for option, value in {"method": run.method, "clients": run.clients, **flat(run.config.to_dict())}.items():
            self._client.log_param(self._run_id, option, str(value)[:_LONGEST])

    def _experiment_id(self) -> str:
        if self._experiment is None:
            return str(importlib.import_module("mlflow.tracking.fluent")._get_experiment_id())
        found = self._client.get_experiment_by_name(self._experiment)
        return str(self._client.create_experiment(self._experiment) if found is None else found.experiment_id)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        for name, value in numbers_of(record).items():
            self._client.log_metric(self._run_id, name, value, step=record.round)

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        if not self._run_id:
            return
        if result is not None and run.out is not None and self._artifacts:
            for name in ("result.json", "models"):
                path = run.out / name
                if path.is_dir():
                    self._client.log_artifacts(self._run_id, str(path), name)
                elif path.exists():
                    self._client.log_artifact(self._run_id, str(path))
        if result is not None and result.stopped:
            self._client.set_tag(self._run_id, "stopped", result.stopped)
        self._client.set_terminated(self._run_id, "KILLED" if result is None else "FINISHED")


class TensorBoard(Callback):
    """Write event files. A resumed run goes on in the same curves.

    Args:
        folder: Where the files go; None takes `tensorboard` in the run's folder.

    Raises:
        MissingDependencyError: tensorboard is not installed.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        # Before the run, so that a missing package is no error after hours.
        need("tensorboard", "TensorBoard", extra="log")
        self._module: Any = importlib.import_module("torch.utils.tensorboard")
        self._folder = None if folder is None else Path(folder)
        self._writer: Any = None

    def on_run_start(self, run: RunView) -> None:
        """Open the files.

        Raises:
            InvalidValueError: neither this nor the run has a folder.
        """
        folder = self._folder or (None if run.out is None else run.out / "tensorboard")
        if folder is None:
            raise InvalidValueError(
                "TensorBoard needs a folder; give the run one (out=, --out DIR), or pass TensorBoard('DIR')"
            )
        # What a killed run wrote of rounds that are run again is dropped.
        self._writer = self._module.SummaryWriter(str(folder), purge_step=run.round + 1 if run.round else None)
        self._writer.add_text("config", f"```\n{json.dumps(run.config.to_dict(), indent=1)}\n```", run.round)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        for name, value in numbers_of(record).items():
            self._writer.add_scalar(name, value, record.round)
        if record.ratios:
            self._writer.add_scalar("round/mean_ratio", sum(record.ratios.values()) / len(record.ratios), record.round)
        self._writer.flush()

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        """Write how clients differ at the end, and close the files."""
        if self._writer is None:
            return
        if result is not None:
            for name, values in values_over([evaluation.personal for evaluation in result.final.per_client]).items():
                if values:
                    self._writer.add_histogram(f"clients/personal_{name}", np.asarray(values), run.round)
        self._writer.close()
        self._writer = None
