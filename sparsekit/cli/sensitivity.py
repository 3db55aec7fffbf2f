"""`sparsekit sensitivity`: what narrowing each group alone does to a model."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekit.cli.data_source import Job
from sparsekit.cli.model_options import CutOptions, check_same, takes
from sparsekit.cli.output import command_app, print_table
from sparsekit.errors import InvalidValueError


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(CutOptions):
    """The options of `sparsekit sensitivity`."""

    criterion: Annotated[str, typer.Option(help="Criterion by whose order units are removed.")] = "magnitude"
    share: Annotated[list[float] | None, typer.Option(help="Share of the units that stays. Default: 0.75, 0.5 and 0.25.")] = (
        None
    )
    out: Annotated[Path | None, typer.Option(help="File for the table, written after each group.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the table in --out.")] = False


@takes(SensitivityOptions)
def _sensitivity(options: SensitivityOptions) -> None:
    """Narrow each group alone and measure by how much the model gets worse: which layers a budget should spare.

    Degradation is the loss in score on validation data. Without data it is the relative change of the outputs on the example
    inputs.
    """
    import numpy as np

    from sparsekit.criteria.base import View, score_units
    from sparsekit.pruning.sensitivity import SHARES, measure_sensitivity, output_error
    from sparsekit.rng import torch_generator
    from sparsekit.tracing.trace import FixedUnitsWarning, trace_units

    out, resume = options.out, options.resume
    if resume and out is None:
        raise InvalidValueError("--resume needs --out, the file of the table to go on with")
    if out is not None and out.exists() and not resume:
        raise InvalidValueError(f"{out} exists already; pass --resume to go on with it, or another --out")
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise InvalidValueError(f"--out must be a file in a folder that exists, got {out}")
    shares = tuple(options.share or SHARES)
    job = Job(options, progress=not options.quiet and not options.as_json and sys.stderr.isatty())
    settings = {**options.to_json(), "shares": list(shares)}
    del settings["share"]  # none there means all shares here
    known = _known(out, settings) if resume and out is not None and out.exists() else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedUnitsWarning)
        graph = trace_units(job.model, *job.args, norm=options.norm, example_kwargs=job.kwargs)
    view = View(weights=job.model.state_dict(), model=job.model, generator=torch_generator(np.random.default_rng(options.seed)))
    scores = score_units(job.criterion(options.criterion), graph, view)
    what = "change of the outputs" if job.metric is None else job.metric.__name__
    evaluate = job.metric or output_error(job.model, job.args, job.kwargs)
    table: dict[str, Sequence[tuple[float, float]]] = dict(known)
    for name, pairs in measure_sensitivity(
        job.model, graph, scores, evaluate, shares=shares, known=known, progress=job.progress
    ):
        table[name] = pairs
        if out is not None:
            _write(out, {"settings": settings, "metric": what, "table": table})
    report = {
        "model": options.model,
        "metric": what,
        "table": {name: [list(pair) for pair in pairs] for name, pairs in table.items()},
    }
    if options.as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    worse = what if job.metric is None else f"loss in {what}"
    typer.echo(f"{options.model}: {worse} when one group keeps this share of its units, worst first")
    worst_first = sorted(table.items(), key=lambda item: -max(value for _, value in item[1]))
    print_table(
        ("group", *(f"{share:.0%}" for share in sorted(set(shares), reverse=True))),
        [(name, *(f"{value:.4f}" for _, value in pairs)) for name, pairs in worst_first],
    )


def _known(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        saved = json.loads(out.read_text(encoding="utf-8"))
        before, table = saved["settings"], saved["table"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(f"{out} is no table of this command: {error}; pass another --out") from error
    check_same(before, settings, out)
    return dict(table)


def _write(out: Path, saved: dict[str, Any]) -> None:
    temporary = out.with_name(f".{out.name}.new")
    temporary.write_text(json.dumps(saved, indent=1), encoding="utf-8")
    temporary.replace(out)


sensitivity = command_app(
    _sensitivity,
    examples=(
        "sparsekit sensitivity cnn",
        "sparsekit sensitivity nets.py:make --init dense.pt --dataset nets.py:loaders --out sensitivity.json",
        "sparsekit prune nets.py:make --init dense.pt --budget flops=50% --allocation sensitivity=sensitivity.json --out small",
    ),
)
