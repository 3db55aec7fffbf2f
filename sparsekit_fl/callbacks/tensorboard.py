"""TensorBoard: every number of every round as event files, for `tensorboard --logdir`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from sparsekit.errors import InvalidValueError
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.errors import need
from sparsekit_fl.results.frames import numbers_of
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.results.scores import values_over


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
