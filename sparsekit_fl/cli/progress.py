"""Live progress of the trials of a comparison on stderr, drawn with rich. Silent where nobody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.callbacks.progress import bar
from sparsekit_fl.client.messages import Evaluation
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.results.text import seconds_text, share_text

if TYPE_CHECKING:
    from sparsekit_fl.client.messages import Update
    from sparsekit_fl.results.report.trials import Trial


class Events(Callback):
    """Sends what a display needs, as plain JSON values, so that it may cross a pipe."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send

    def on_run_start(self, run: RunView) -> None:
        self._send({"rounds": run.config.rounds, "cohort": run.config.cohort, "done": run.round})

    def on_client_end(self, run: RunView, client_id: int, work: Update | Evaluation | None) -> None:
        if not isinstance(work, Evaluation):
            self._send({"client": run.round + 1})

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        scores = {} if record.evaluation is None else record.evaluation.personal
        self._send({"round": record.round, "accuracy": scores.get("accuracy")})


@dataclass
class _Running:
    """Progress of a trial that runs."""

    task: TaskID
    began: float
    rounds: int = 1
    cohort: int = 1
    round: int = 0
    clients: int = 0
    facts: str = ""

    @property
    def share(self) -> float:
        """Finished part, in [0, 1]."""
        return min(1.0, (self.round + min(1.0, self.clients / self.cohort)) / self.rounds)


class TrialsProgress(AbstractContextManager["TrialsProgress"]):
    """A bar over all trials with the time left, a bar for each that runs, and a line for each that ended.

    It has no thread of its own: a process that forks while another thread holds a lock would hang.
    """

    def __init__(self, trials: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet = quiet
        self._trials = trials
        self._ended = 0
        self._shown = 0.0
        self._running: dict[str, _Running] = {}
        self._progress = bar(console or Console(stderr=True), shown=not quiet, auto_refresh=False, speed_estimate_period=3600)
        self._all = self._progress.add_task(f"0/{trials} trials", total=trials, facts="")

    def __enter__(self) -> TrialsProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, label: str) -> None:
        """Add a bar for a trial that starts."""
        task = self._progress.add_task(escape(f"{label}, preparing"), total=None, facts="")
        self._running[label] = _Running(task, time.monotonic())
        self.tick()

    def event(self, label: str, event: Mapping[str, Any]) -> None:
        """Show an event of a trial: one of `Events`, or a message of the trial under "said"."""
        running = self._running[label]
        if "said" in event:
            self._say(f"{label}: {event['said']}")
            return
        if "rounds" in event:
            running.rounds, running.cohort, running.round = event["rounds"], event["cohort"], event["done"]
        elif "client" in event:
            running.clients += 1
        elif "round" in event:
            running.round, running.clients = event["round"], 0
            if event["accuracy"] is not None:
                running.facts = f"accuracy {share_text(event['accuracy'])}"
        text = f"{label}, round {min(running.round + 1, running.rounds)}/{running.rounds}"
        self._progress.update(running.task, description=escape(text), total=1.0, completed=running.share, facts=running.facts)
        self.tick()

    def end(self, label: str, trial: Trial, *, ran: bool) -> None:
        """Replace the bar of a trial by a line; `ran` is False where it was finished before."""
        self._ended += 1
        running = self._running.pop(label, None)
        if running is not None:
            self._progress.remove_task(running.task)
        if trial.result is None:
            text = f"failed: {trial.error}"
        else:
            accuracy = (trial.result["final"].get("personal") or {}).get("accuracy")
            text = "finished" if ran else "finished before"
            text += "" if accuracy is None else f", accuracy {share_text(accuracy)}"
            text += "" if running is None else f", {seconds_text(time.monotonic() - running.began)}"
        self._say(f"{self._ended}/{self._trials} {label}: {text}")
        self._progress.update(self._all, description=f"{self._ended}/{self._trials} trials")
        self._shown = 0.0
        self.tick()

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Draw anew, at most four times a second."""
        moment = time.monotonic()
        if moment - self._shown > 0.25:
            self._shown = moment
            done = self._ended + sum(running.share for running in self._running.values())
            self._progress.update(self._all, completed=done)
            self._progress.refresh()
