"""BestCheckpoint: keep the global model of the best evaluation."""

from __future__ import annotations

import json

from sparsekit.errors import InvalidValueError
from sparsekit_fl.callbacks.base import RunView
from sparsekit_fl.callbacks.monitor import Monitoring
from sparsekit_fl.results.state.models import best_file, save_whole
from sparsekit_fl.results.state.storage import write_atomically


class BestCheckpoint(Monitoring):
    """Write the global model to `models/best.safetensors` whenever a number is the best so far.

    `load_model(out, "best")` reads it. `models/best.json` says of which round it is, and how good; a resumed run
    goes on from there.

    Args:
        monitor: `PART.METRIC[.KIND]`, as in `global.accuracy` (score the global model along the way with `eval_global_every`);
            see `Monitor`. Empty takes the first metric on validation data.
        min_delta: A number counts as better if it is so by more than this.
    """

    def __init__(self, monitor: str = "", *, min_delta: float = 0.0) -> None:
        super().__init__(monitor, min_delta=min_delta)

    def on_run_start(self, run: RunView) -> None:
        """Begin.

        Raises:
            InvalidValueError: the run has no folder.
        """
        if run.out is None:
            raise InvalidValueError("BestCheckpoint needs the folder of the run; give it one (out=, --out DIR)")
        super().on_run_start(run)

    def _followed(self, run: RunView, better: bool) -> None:
        if run.out is None or not better:
            return
        path = best_file(run.out)
        path.parent.mkdir(exist_ok=True)
        save_whole(path, run.model())
        note = {"round": run.round, "monitor": self._monitor.text, "value": self._best}
        write_atomically(path.with_suffix(".json"), (json.dumps(note) + "\n").encode())
