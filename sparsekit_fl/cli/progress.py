"""Live progress of the trials of a comparison on stderr, drawn with rich. Silent where nobody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from sparsekit_fl.callbacks import Callback, RunView, progress_bar
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.cli.config_file import written
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.results import RoundRecord, primary_metric
from sparsekit_fl.stored import number_text, score_text

if TYPE_CHECKING:
    from sparsekit_fl.trials import Trial


class Events(Callback):
    """Sends what a display needs, as plain JSON values, so that it may cross a pipe."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send

    def on_run_start(self, run: RunView) -> None:
        self._send({"round": run.round, "rounds": run.config.rounds, "accuracy": None})

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        scores = {} if record.evaluation is None else record.evaluation.personal
        self._send({"round": record.round, "rounds": run.config.rounds, "accuracy": scores.get("accuracy")})


class Written(Callback):
    """Write the options of a run into its folder, as `run.toml`, once that is known to be free.

    Args:
        method: As the user wrote it.
        options: What the user gave.
    """

    def __init__(self, method: str, options: RunOptions) -> None:
        self._method, self._options = method, options

    def on_run_start(self, run: RunView) -> None:
        if run.out is not None:
            given = {name: value for name, value in self._options.given.items() if name in RunOptions.table}
            text = written(self._method, {**given, "seed": run.config.seed})
            write_atomically(run.out / "run.toml", text.encode())


class EvaluationLines(Callback):
    """Print a line per evaluation on stderr, for runs whose stderr is a file, as under nohup or Slurm.

    Args:
        quiet: Print nothing.
        console: Console to print on; None takes stderr. On a terminal it prints nothing, since a bar is drawn there.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._shown = not (quiet or self._console.is_terminal)
        self._began = time.monotonic()

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """Print round, scores, FLOPs so far and the time since the start."""
        if not self._shown or record.evaluation is None or not record.evaluation.personal:
            return
        name, scores = primary_metric(list(record.evaluation.personal)), record.evaluation
        parts = [score_text(name, scores.personal[name])]
        if name in scores.validation:
            parts.append(f"validation {score_text(name, scores.validation[name])}")
        parts += [f"{number_text('flops', record.cost.flops)} FLOPs", number_text("seconds", time.monotonic() - self._began)]
        text = f"{run.method} round {record.round}/{run.config.rounds}: {', '.join(parts)}"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class TrialsProgress(AbstractContextManager["TrialsProgress"]):
    """A bar over all trials with the time left, a bar for each that runs, and a line for each that ended.

    It has no thread of its own: a process that forks while another thread holds a lock would hang.
    """

    def __init__(self, trials: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet, self._trials, self._ended, self._shown = quiet, trials, 0, 0.0
        self._running: dict[str, tuple[TaskID, float]] = {}
        self._progress = progress_bar(console, shown=not quiet, auto_refresh=False, speed_estimate_period=3600)
        self._all = self._progress.add_task(f"0/{trials} trials", total=trials, facts="")

    def __enter__(self) -> TrialsProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, label: str) -> None:
        """Add a bar for a trial that starts."""
        task = self._progress.add_task(escape(f"{label}, preparing"), total=None, facts="")
        self._running[label] = task, time.monotonic()
        self.tick()

    def event(self, label: str, event: Mapping[str, Any]) -> None:
        """Show an event of a trial: one of `Events`, or a message of the trial under "said"."""
        if "said" in event:
            self._say(f"{label}: {event['said']}")
            return
        done, rounds, accuracy = event["round"], event["rounds"], event["accuracy"]
        text = f"{label}, round {min(done + 1, rounds)}/{rounds}"
        facts: dict[str, Any] = {} if accuracy is None else {"facts": f"accuracy {number_text('share', accuracy)}"}
        self._progress.update(self._running[label][0], description=escape(text), total=rounds, completed=done, **facts)
        if facts and not self._progress.console.is_terminal:
            self._say(f"{label}, round {done}/{rounds}: {facts['facts']}")
        self.tick()

    def end(self, label: str, trial: Trial, *, ran: bool) -> None:
        """Replace the bar of a trial by a line; `ran` is False where it was finished before."""
        self._ended += 1
        running = self._running.pop(label, None)
        if running is not None:
            self._progress.remove_task(running[0])
        if trial.result is None:
            text = f"failed: {trial.error}"
        else:
            accuracy = (trial.result["final"].get("personal") or {}).get("accuracy")
            text = "finished" if ran else "finished before"
            text += "" if accuracy is None else f", accuracy {number_text('share', accuracy)}"
            text += "" if running is None else f", {number_text('seconds', time.monotonic() - running[1])}"
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
            parts = [task.percentage / 100 for task in self._progress.tasks if task.id != self._all]
            self._progress.update(self._all, completed=self._ended + sum(parts))
            self._progress.refresh()
