"""RunResult: what a run reports, to and from `result.json`; and the environment that results may depend on."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

import sparsekit
from sparsekit.errors import DataError, SparsekitError
from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.config import RunConfig
from sparsekit_fl.devices import devices
from sparsekit_fl.results.frames import clients_frame, plot_rounds, rounds_frame
from sparsekit_fl.results.part import Count, Failures, Part, SavedCost, about, plain
from sparsekit_fl.results.read import SCHEMA_NUMBER, read_result
from sparsekit_fl.results.scores import FinalScores, RoundRecord
from sparsekit_fl.storage import write_atomically

_SAME = ("rounds", "final", "cost", "environment", "note", "fingerprint", "stopped", "extended")


class ResultFile(Part):
    """The content of `result.json`."""

    schema_: Literal[4] = Field(validation_alias="schema", serialization_alias="schema")
    method: str
    policies: Mapping[str, str] = about("kind of policy → text")
    note: str = about("of the method, for tables", default="")
    config: Mapping[str, Any] = about("every option of the run; `experiment` names data and model")
    seed: Count
    final: FinalScores
    cost: SavedCost
    rounds: tuple[RoundRecord, ...]
    environment: Mapping[str, Any] = about("versions, threads, workers, device", default_factory=dict)
    fingerprint: Mapping[str, Any] = about(
        "`sparsekit` (version) and `data` (a cheap hash of the clients' examples)",
        default_factory=dict,
    )
    failed_clients: Failures = about("clients that never could train though they were asked", default=())
    stopped: str = about("reason why a callback ended the run", default="")
    extended: tuple[Count, ...] = about("numbers of rounds that the run had before it was extended", default=())


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult:
    """Everything that a run reports; tables and figures are drawn from it.

    Args:
        method: Policy kind → text; `name` and `source` among them.
        config: The options.
        rounds: One record each.
        final: Scores of the end.
        cost: Cost of the whole run.
        environment: Versions, threads, workers, device.
        experiment: What the caller said about the run, such as data set and model.
        state: The final global state; not part of the file.
        note: What the method's line in tables says.
        fingerprint: Version of the code, and a cheap hash of the data.
        stopped: The reason why a callback ended the run before its last round; empty for none.
        extended: Numbers of rounds that the run had before it was extended, ascending.
    """

    method: Mapping[str, str]
    config: RunConfig
    rounds: tuple[RoundRecord, ...]
    final: FinalScores
    cost: WorkCost
    environment: Mapping[str, Any]
    experiment: Mapping[str, Any] = field(default_factory=dict)
    state: StateDict = field(default_factory=dict, repr=False)
    note: str = ""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""
    extended: tuple[int, ...] = ()

    @property
    def failures(self) -> dict[int, str]:
        """Clients that never could train though they were asked, and the last reason of each, by id."""
        trained = {client_id for record in self.rounds for client_id in record.ratios}
        reasons = {client_id: reason for record in self.rounds for client_id, reason in record.dropped}
        return {client_id: reasons[client_id] for client_id in sorted(set(reasons) - trained)}

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row per round; its columns are those of `results.frames.rounds_frame`.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        return rounds_frame(self.rounds)

    def clients_frame(self) -> Any:
        """Return a pandas DataFrame with a row per client; its columns are those of `results.frames.clients_frame`.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        return clients_frame(self.rounds, self.final)

    def plot(self, metric: str | None = None, *, axes: Any = None) -> Any:
        """Draw a metric over the rounds: personal models and, where it was scored, the global one.

        Args:
            metric: Its name; None takes accuracy, or the first one.
            axes: Axes of matplotlib to draw on; None makes a figure.

        Returns:
            The figure; `figure.savefig("curve.png")` writes it, and a notebook shows it.

        Raises:
            InvalidValueError: no round was scored by this metric.
            MissingDependencyError: matplotlib is not installed.
        """
        return plot_rounds(self.rounds, metric, axes=axes, title=f"{self.method['name']}, seed {self.config.seed}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the content of `result.json`."""
        found = ResultFile(
            schema_=SCHEMA_NUMBER,
            method=self.method["name"],
            policies=self.method,
            config={**self.config.to_dict(), "experiment": self.experiment},
            seed=self.config.seed,
            failed_clients=tuple(self.failures.items()),
            **{name: getattr(self, name) for name in _SAME},
        )
        result = plain(found.to_dict())
        assert isinstance(result, dict)
        return result

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RunResult:
        """The inverse of `to_dict`, but for the state, which is no part of it.

        Raises:
            KeyError, TypeError, ValueError: it is no result.
        """
        found = ResultFile.from_dict(raw)
        return RunResult(
            method={**found.policies, "name": found.method},
            config=RunConfig.from_dict({name: value for name, value in found.config.items() if name != "experiment"}),
            experiment=found.config.get("experiment", {}),
            **{name: getattr(found, name) for name in _SAME},
        )

    def save(self, path: Path | str) -> None:
        """Write `to_dict()` as JSON, atomically."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        write_atomically(Path(path), text.encode())


def load_result(path: Path | str) -> RunResult:
    """Read the result of a finished run.

    Args:
        path: The run's folder, or its `result.json`.

    Returns:
        What `run` returned, without the global state, which `load_model` gives.

    Raises:
        DataError: there is no result, it is damaged, or another version wrote it.
    """
    raw = read_result(path)
    try:
        return RunResult.from_dict(raw)
    except SparsekitError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the result at {path} is damaged: {error!r}; run again, or restore the file") from error


def describe_environment(*, workers: int, device: str) -> dict[str, Any]:
    """Return versions and settings that results may depend on, and when the run ended, as plain values.

    `gpu` and `cuda` are None for a run on the CPU, `flwr` and `ray` where they are not installed.
    """
    cuda = device.startswith("cuda")
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sparsekit": sparsekit.__version__,
        "flwr": _version("flwr"),
        "ray": _version("ray"),
        "threads": torch.get_num_threads(),
        "workers": workers,
        "device": device,
        "platform": platform.platform(),
        "gpu": [torch.cuda.get_device_name(name) for name in devices(device)] if cuda and torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
