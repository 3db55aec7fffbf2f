"""What a run prints at its end: its table, who could not take part, and where its files are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from sparsekit_fl.cli.options import RunOptions

if TYPE_CHECKING:
    from sparsekit_fl.results.records import RunResult

_MOST_REASONS = 5


def show_outcome(result: RunResult, options: RunOptions) -> None:
    """Print a result: JSON alone where that was asked for, else a table and what a reader should know.

    Args:
        result: Result of the run.
        options: Options of the command.
    """
    # What trains is imported only now, so that --help is quick.
    from sparsekit_fl.results.report.columns import result_table
    from sparsekit_fl.server.privacy import privacy_line

    if options.json:
        typer.echo(json.dumps(result.to_dict(), indent=1, allow_nan=False))
        return
    console = Console()
    console.print(result_table(result.to_dict()))
    if result.privacy:
        console.print(privacy_line(result.privacy))
    if result.stopped:
        console.print(f"stopped after round {result.rounds[-1].round}: {escape(result.stopped)}", soft_wrap=True)
    _show_failures(result, console)
    if options.out is None:
        console.print("Nothing was kept. With --out DIR you get result.json, rounds.jsonl, the models, and runs that resume.")
    else:
        console.print(f"result.json, rounds.jsonl, checkpoint and models are in {escape(str(options.out))}", soft_wrap=True)


def _show_failures(result: RunResult, console: Console) -> None:
    failures = list(result.failures.items())
    if failures:
        asked = {client_id for record in result.rounds for client_id in record.cohort}
        console.print(
            f"[bold]{len(failures)} of {len(asked)} clients that were asked could never train:[/bold]", soft_wrap=True
        )
        for client_id, reason in failures[:_MOST_REASONS]:
            console.print(f"  client {client_id}: {escape(reason)}", soft_wrap=True)
        if len(failures) > _MOST_REASONS:
            console.print(f"  and {len(failures) - _MOST_REASONS} more; result.json names them all", soft_wrap=True)
    unscored = [note for note in result.rounds[-1].notes if " was not scored: " in note]
    for note in unscored[:_MOST_REASONS]:
        console.print(escape(note), soft_wrap=True)
    if len(unscored) > _MOST_REASONS:
        console.print(f"and {len(unscored) - _MOST_REASONS} clients more were not scored; rounds.jsonl names them all")
