"""How a search over trials is run and shown by a command: a line per trial and a bar, Ctrl-C, and the outcome."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparsekit.bandit.trials import Workers
from sparsekit.cli.output import print_table
from sparsekit.errors import MissingDependencyError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from sparsekit.bandit.study import Study

INTERRUPTED, FAILED = 130, 2
_MOST_ROWS = 15


class _Board:
    """Trials as they end, the best so far, and the time left."""

    def __init__(self, study: Study, trials: int, console: Console, *, quiet: bool) -> None:
        self._study, self._console, self._quiet = study, console, quiet
        self._running: dict[int, str] = {}
        self.bar = Progress(
            MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False), console=console, disable=quiet or not console.is_terminal,
            transient=True,
        )  # fmt: skip
        self._task = self.bar.add_task("", total=trials, completed=len(study.ended))
        if study.ended:
            self._say(f"going on after {len(study.ended)} trials")

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, soft_wrap=True)

    def show(self, trial: FrozenTrial) -> None:
        """Show that a trial has begun or ended."""
        values, best = self._running.pop(trial.number, None), self._study.best()
        if values is None:
            self._running[trial.number] = _line(self._study.texts(trial))
        else:
            self._say(f"{escape(f'trial {trial.number}: {values}')} → {_outcome(trial, best)}")
        parts = [] if best is None else [f"best {best.value:g}"]
        parts += [f"running {', '.join(self._running.values())}"] if self._running else []
        self.bar.update(self._task, completed=len(self._study.ended), description="; ".join(parts))


def _outcome(trial: FrozenTrial, best: FrozenTrial | None) -> str:
    if trial.state.name == "COMPLETE":
        new = best is not None and best.number == trial.number
        return f"{trial.value:g}{'  [green]best[/green]' if new else ''}"
    if "error" in trial.user_attrs:
        return f"[red]failed[/red] ({escape(trial.user_attrs['error'])})"
    return f"{trial.state.name.lower()} after step {max(trial.intermediate_values)}"


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set by Ctrl-C, also where the shell ignores it for us, and by SIGTERM; the second one is a KeyboardInterrupt."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(*_: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_search(
    study: Study,
    workers: Workers,
    trials: int,
    *,
    metric: str,
    out: Path | None,
    quiet: bool,
    as_json: bool,
    how: Callable[[str, FrozenTrial], str],
) -> None:
    """Run a study and show how it goes on stderr; print what came of it, and write it to `trials.json` and `trials.png`.

    Args:
        study: Open.
        workers: Run its trials.
        trials: Those of earlier calls included.
        metric: What the score is called.
        out: Folder; None keeps nothing.
        quiet: Write nothing to stderr but what stopped it.
        as_json: Print JSON alone.
        how: How to run the values of the "best" or the "recommended" trial once more, as a command line.

    Raises:
        Exit: the user stopped it, or no trial has a score.
    """
    board = _Board(study, trials, Console(stderr=True, highlight=False), quiet=quiet or as_json)
    try:
        with _signals() as stop, board.bar:
            study.run(workers, trials, board.show, stop=stop)
    except KeyboardInterrupt:
        best = study.best()
        so_far = "" if best is None else f"; best so far {best.value:g} with {_line(study.texts(best))}"
        go_on = "nothing was kept, since there was no --out DIR" if out is None else "the same command line goes on"
        typer.echo(f"stopped after {len(study.ended)} of {trials} trials{so_far}\n{go_on}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    report, best = study.report() | {"out": None if out is None else str(out)}, study.best()
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    if out is not None:
        (out / "trials.json").write_text(text + "\n", encoding="utf-8")
        if best is not None:
            try:
                study.save_plot(out / "trials.png")
            except MissingDependencyError as error:
                # The answer of all trials must not be lost for want of a picture.
                typer.echo(f"warning: no picture: {error}", err=True)
    if as_json:
        typer.echo(text)
    else:
        _show(study, report, metric)
    if best is None:
        last = next((row["error"] for row in reversed(report["trials"]) if "error" in row), "all were pruned")
        number = len(report["trials"])
        failed = "the only trial has failed" if number == 1 else f"all {number} trials have failed; the last"
        typer.echo(f"error: {failed}: {last}{'' if out is None else f'; see {out}'}", err=True)
        raise typer.Exit(FAILED)
    lines = [f"best: {how('best', best)}"]
    recommended = study.recommended()
    if recommended is not None and recommended.number != best.number:
        lines += [f"recommended: {how('recommended', recommended)}"]
        lines.insert(0, "Recommended is what the bandit would bet on: the mean there and nearby counts, not one lucky trial.")
    lines += [] if out is None else [f"Every trial is in {out}"]
    if not as_json:
        typer.echo("\n".join(lines))


def _line(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _show(study: Study, report: Mapping[str, Any], metric: str) -> None:
    rows = report["trials"]
    best, recommended = ((report[name] or {}).get("trial") for name in ("best", "recommended"))
    lost = f", {report['failed']} failed" if report["failed"] else ""
    way = "more" if study.maximize else "less"
    typer.echo(f"{len(rows)} trials{lost}; {report['sampler']}, {way} is better")
    scored = [row for row in rows if row["score"] is not None]
    scored.sort(key=lambda row: row["score"] * (-1 if study.maximize else 1))
    shown = []
    for row in [*scored, *(row for row in rows if row["score"] is None)][:_MOST_ROWS]:
        notes = [row["state"]] if row["score"] is None else []
        notes += ["best"] if row["trial"] == best else []
        notes += ["recommended"] if row["trial"] == recommended != best else []
        score = "" if row["score"] is None else f"{row['score']:.6g}"
        values = [value if isinstance(value, str) else f"{value:.6g}" for value in row["values"].values()]
        shown.append((str(row["trial"]), score, *values, ", ".join(notes)))
    print_table(("trial", metric, *study.space, ""), shown)
