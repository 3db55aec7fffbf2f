"""Callback: what happens beside a run. One small interface for displays, loggers, early stopping and what users write."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import Evaluation, Update, WorkCost
from sparsekit_fl.config import RunConfig
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.scores import RoundRecord, RoundScores


def _no_model() -> nn.Module:
    raise InvalidValueError("this view belongs to no run, so it has no model")


@dataclass(eq=False, kw_only=True)
class RunView:
    """What a callback sees of a run, and how it stops it.

    Args:
        method: Name of the method.
        config: The options.
        clients: Number of clients.
        round: The last finished round; 0 before the first.
        cost: Cost of the rounds already finished.
        out: Folder of the run; None where it keeps nothing.
        metrics: Names of the problem's metrics, and "loss".
        lower: Those of which small values are good.
        state: Returns the global state; read it, and change nothing.
        model: Makes a fresh module that holds the global state.
        stopped: The reason why the run stops after this round; empty as long as it goes on.
    """

    method: str
    config: RunConfig
    clients: int
    round: int = 0
    cost: WorkCost = field(default_factory=WorkCost)
    out: Path | None = None
    metrics: tuple[str, ...] = ("accuracy", "loss")
    lower: frozenset[str] = frozenset({"loss"})
    state: Callable[[], StateDict] = dict
    model: Callable[[], nn.Module] = _no_model
    stopped: str = ""

    def stop(self, reason: str) -> None:
        """End the run after this round: every client is scored, and the result is written, as after the last round.

        Args:
            reason: One sentence, for the result; the first one counts.
        """
        self.stopped = self.stopped or reason


class Callback:
    """Inherit, and override what is of interest. A callback reads; the only thing it may change is that the run goes on.

    An error in a callback ends the run; everything up to the round before is saved. A callback begins afresh in each run:
    set in `on_run_start` what it counts. What a resumed run must not lose it returns by `state` and takes up by `load`.
    """

    def on_run_start(self, run: RunView) -> None:
        """Before the first round; worker processes already run."""

    def on_client_end(self, run: RunView, client_id: int, work: Update | Evaluation | None) -> None:
        """A client was trained (Update), or scored (Evaluation); None where it failed."""

    def on_evaluation(self, run: RunView, scores: RoundScores) -> None:
        """All clients of an evaluation were scored, and perhaps the global model; before the round ends."""

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """A round ended and is saved."""

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        """The run ended and is saved; None where an error or Ctrl-C ended it."""

    def state(self) -> dict[str, Any]:
        """Return plain JSON values for the checkpoint of each round; nothing by default."""
        return {}

    def load(self, run: RunView, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned, in a run that is resumed, after `on_run_start`; stop it again where it was stopped."""


class Callbacks:
    """Several callbacks, told in their order.

    Args:
        callbacks: The callbacks.

    Raises:
        InvalidValueError: one is no Callback.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for one in callbacks:
            if not isinstance(one, Callback):
                hint = "; make an object of it" if isinstance(one, type) else "; inherit from sparsekit_fl.Callback"
                raise InvalidValueError(f"callbacks must be Callback objects, got {one!r}{hint}")
        self._all = tuple(callbacks)

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all by its name, the end of a run also where one of them fails: each may have something to close."""
        with ExitStack() as stack:
            for one in reversed(self._all) if hook == "on_run_end" else ():
                stack.callback(getattr(one, hook), *arguments)
            for one in self._all if hook != "on_run_end" else ():
                getattr(one, hook)(*arguments)

    def start(self, run: RunView, saved: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> None:
        """Begin a run; of a resumed one each callback takes up the state of the same class at the same place among its kind."""
        left = list(saved)
        self.tell("on_run_start", run)
        for one in self._all:
            mine = next((pair for pair in left if pair[0] == type(one).__qualname__), None)
            if mine is not None:
                left.remove(mine)
                one.load(run, mine[1])

    def states(self) -> list[tuple[str, dict[str, Any]]]:
        """Return class and state of each, as plain JSON values."""
        return [(type(one).__qualname__, one.state()) for one in self._all]
