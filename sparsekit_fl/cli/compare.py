"""`sparsekit compare METHOD METHOD …`: methods under one protocol, over seeds."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.options import Experiment, RunOptions, command_app, make_method, takes_options

if TYPE_CHECKING:
    from sparsekit_fl.method import Method

__all__ = ["compare"]

INTERRUPTED = 130


def _compare(
    *,
    methods: Annotated[list[str], typer.Argument(help="Methods by name, or package.module:function.")],
    seeds: Annotated[int, typer.Option(help="How many seeds: --seed, --seed + 1, …")] = 3,
    options: RunOptions,
) -> None:
    """Run several methods over several seeds, and print mean ± deviation.

    With --out DIR every run has its folder DIR/METHOD-seedK, finished ones are not run again, and DIR/compare.json and
    DIR/compare.csv hold the numbers.
    """
    from sparsekit_fl.errors import RunInterrupted
    from sparsekit_fl.report.table import comparison_table

    made = _distinct(methods)
    if seeds < 1:
        raise InvalidValueError(f"--seeds must be an integer >= 1, got {seeds}")
    first = options.seed or 0
    cells: list[dict[str, Any]] = []
    try:
        for seed in range(first, first + seeds):
            experiment = Experiment.of(replace(options, seed=seed))
            for name, method in made.items():
                label = f"{name} seed {seed} ({len(cells) + 1}/{seeds * len(made)})"
                cells.append(_cell(name, method, experiment, options, label))
    except RunInterrupted as error:
        typer.echo(str(error).replace("(--resume)", "(the same command line goes on by itself)"), err=True)
        raise typer.Exit(INTERRUPTED) from None
    summary = _summary(cells, list(made))
    report = {
        "methods": list(made),
        "seeds": list(range(first, first + seeds)),
        "cells": cells,
        "summary": {name: {column: asdict(found) for column, found in row.items()} for name, row in summary.items()},
    }
    if options.out is not None:
        _write(options.out, report)
    if options.json:
        typer.echo(json.dumps(report, indent=1, allow_nan=False))
        return
    console = Console()
    console.print(comparison_table(summary, seeds=seeds))
    if options.out is None:
        console.print("Nothing was kept. With --out DIR you get every result, compare.json and compare.csv.")
    else:
        console.print(f"compare.json, compare.csv and a folder per run are in {escape(str(options.out))}", soft_wrap=True)


def _distinct(methods: Sequence[str]) -> dict[str, Method]:
    made: dict[str, Method] = {}
    for text in methods:
        method = make_method(text)
        if method.name in made:
            raise InvalidValueError(f"method {method.name!r} was given twice; name each method once")
        made[method.name] = method
    return made


def _cell(name: str, method: Method, experiment: Experiment, options: RunOptions, label: str) -> dict[str, Any]:
    from sparsekit_fl.cli.progress import LiveProgress
    from sparsekit_fl.report.table import COLUMNS, value_of
    from sparsekit_fl.runner import run

    seed = experiment.config.seed
    folder = None if options.out is None else options.out / f"{name}-seed{seed}"
    result = _finished(folder, method, experiment)
    if result is None:
        with LiveProgress(quiet=options.quiet or options.json, label=label) as progress:
            result = run(
                method,
                experiment.problem,
                experiment.clients,
                experiment.config,
                engine=experiment.engine,
                observers=[progress],
                out=folder,
                # A half-finished cell goes on; one with other options is refused, with the difference.
                resume=folder is not None,
                experiment=experiment.described,
            ).to_dict()
    return {"method": name, "seed": seed, **{column.name: value_of(result, column) for column in COLUMNS}}


def _finished(folder: Path | None, method: Method, experiment: Experiment) -> dict[str, Any] | None:
    """The result in `folder`, if it is that of exactly this run."""
    from sparsekit_fl.report.table import read_result

    if folder is None or not (folder / "result.json").exists():
        return None
    result = read_result(folder)
    config = {**experiment.config.to_dict(), "experiment": dict(experiment.described)}
    expected = json.loads(json.dumps([config, method.describe()]))
    return result if [result["config"], result["policies"]] == expected else None


def _summary(cells: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    from sparsekit_fl.report.table import COLUMNS, spread

    return {
        name: {column.name: spread([cell[column.name] for cell in cells if cell["method"] == name]) for column in COLUMNS}
        for name in methods
    }


def _write(folder: Path, report: Mapping[str, Any]) -> None:
    from sparsekit_fl.storage import write_atomically

    write_atomically(folder / "compare.json", (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
    text = io.StringIO()
    cells = report["cells"]
    writer = csv.DictWriter(text, fieldnames=list(cells[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    write_atomically(folder / "compare.csv", text.getvalue().encode())


compare = command_app(
    takes_options(_compare, without=("resume",)),  # finished and half-finished runs are found by themselves
    examples=(
        "sparsekit compare fedlps fedavg local --seeds 3",
        "sparsekit compare fedlps fedlps-paper --preset mnist --data-dir data --out runs/mnist",
    ),
)
