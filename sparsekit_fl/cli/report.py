"""`sparsekit report DIR`: tables, figures and a page of finished runs, drawn anew without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sparsekit_fl.cli.options import command_app

__all__ = ["report"]


def _report(
    *,
    folder: Annotated[Path, typer.Argument(help="The --out folder of compare or run, or any folder of results.")],
    out: Annotated[Path | None, typer.Option(help="Where the files go. Default: into the folder itself.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Accuracy whose simulated time is a column. Default: that of the last report there.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON on stdout and nothing else.")] = False,
) -> None:
    """Draw the tables, figures and report.html of finished runs; nothing is trained.

    Runs of different data, models or settings stand in sections of their own. A file reasons.json in the folder says, in
    your words, why a number differs from the published one.
    """
    from sparsekit_fl.paper.published import beside_published, show_published
    from sparsekit_fl.report.write import read_comparisons, write_report

    errors = Console(stderr=True)
    with errors.status("reading") as status:
        if quiet or as_json or not errors.is_terminal:
            status.stop()
        written = write_report(folder, out=out, target=target, progress=lambda name: status.update(f"writing {escape(name)}"))
    comparisons = read_comparisons(folder, target=target)
    if as_json:
        typer.echo(json.dumps([comparison.to_dict() for comparison in comparisons], indent=1, allow_nan=False))
        return
    console = Console()
    for comparison in comparisons:
        console.print(f"[bold]{escape(comparison.section.title)}[/bold]", soft_wrap=True)
        comparison.show(console)
        beside = beside_published(comparison, folder=folder)
        if beside:
            show_published(beside, console)
    home = out or folder
    console.print(f"{len(written)} files in {escape(str(home))}; open {escape(str(home / 'report.html'))}", soft_wrap=True)


report = command_app(
    _report,
    examples=(
        "sparsekit report runs/mnist",
        "sparsekit report runs/mnist --target 0.95",
        "sparsekit report results --out pages --quiet",
    ),
    defaults=False,
)
