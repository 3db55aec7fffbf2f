"""`sparsekit report DIR…`: tables and figures of finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sparsekit.cli import command_app
from sparsekit_fl.cli.options import AsJson


def _report(
    *,
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="The --out folders of compare or run, or any folders of results.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the files. Default: the folder itself, where it is one.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Accuracy whose simulated time is a column. Default: that of the last report there.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw the tables, figures and report.html of finished runs; nothing is trained.

    Figures 3 to 9 of the FedLPS paper are drawn where the runs hold what they need; for the paper's data, the page names the
    others with the command that makes their runs. Published numbers stand beside runs of their own protocol.

    Runs of different data, models or settings stand in sections of their own.
    """
    from sparsekit_fl.paper.published import published_beside
    from sparsekit_fl.paper.report import write_report
    from sparsekit_fl.results.report.tables import show, show_published

    errors = Console(stderr=True)
    with errors.status("reading") as status:
        if quiet or as_json or not errors.is_terminal:
            status.stop()
        comparisons, written = write_report(
            *folders, out=out, target=target, progress=lambda name: status.update(f"writing {escape(name)}")
        )
    if as_json:
        typer.echo(json.dumps([comparison.to_dict() for comparison in comparisons], indent=1, allow_nan=False))
        return
    console = Console()
    for comparison in comparisons:
        console.print(f"[bold]{escape(comparison.title)}[/bold]", soft_wrap=True)
        show(comparison, console)
        published = published_beside(comparison)
        if published is not None:
            show_published(published, console)
    home = out or folders[0]
    console.print(f"{len(written)} files in {escape(str(home))}; open {escape(str(home / 'report.html'))}", soft_wrap=True)


report = command_app(
    _report,
    examples=(
        "sparsekit report runs/mnist",
        "sparsekit report runs/mnist --target 0.95",
        "sparsekit report runs/mnist runs/classes runs/ratios --out pages --quiet",
    ),
)
