"""Finished runs, put to use: `sparsekit predict`, `sparsekit export` and `sparsekit report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit.cli import command_app
from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.options import AsJson

if TYPE_CHECKING:
    from torch import Tensor


_MOST_ROWS = 50

Out = Annotated[Path, typer.Argument(help="The --out folder of a finished run.")]
ClientId = Annotated[
    int | None, typer.Option("--client", help="Id of the client whose model is taken. Default: the global model.")
]
Best = Annotated[bool, typer.Option("--best", help="Take the model of the best round, which a run with --callback best keeps.")]
Model = Annotated[
    str | None, typer.Option("--model", help="package.module:factory of the dense model. Default: what the run wrote down.")
]


def _which(client: int | None, best: bool) -> str | int:
    if client is not None and best:
        raise InvalidValueError("--client and --best are two models; leave one out")
    return "best" if best else "global" if client is None else client


def _check_folder(option: str, path: Path | None) -> None:
    """Raise where a file cannot be written, before the work for it is done."""
    if path is not None and not path.parent.is_dir():
        raise InvalidValueError(f"{option} {path}: there is no folder {path.parent}; make it first, or choose another one")
    if path is not None and path.is_dir():
        raise InvalidValueError(f"{option} {path} is a folder; name a file in it")


def _predict(
    *,
    out: Out,
    inputs: Annotated[
        list[Path], typer.Option("--input", "-i", help="A picture, .npy, .npz, .csv or .json; once per file, in one batch.")
    ],
    client: ClientId = None,
    best: Best = False,
    model: Model = None,
    output: Annotated[Path | None, typer.Option(help="Write the raw outputs to this .npy file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict with the global model of a run, or with that of a client.

    For a classifier (a problem with the metric accuracy) it prints the class and its probability, for any other model the
    outputs. Pictures and bytes are scaled and normalised as the data of the run were.
    """
    from sparsekit_fl.models import read_recipe
    from sparsekit_fl.results.saved import load_model, read_inputs
    from sparsekit_fl.results.saved import predict as outputs_of

    which = _which(client, best)
    _check_folder("--output", output)
    recipe = read_recipe(out)
    module = load_model(out, which, model=model)
    found = outputs_of(module, read_inputs(inputs, recipe))
    if output is not None:
        import numpy as np

        np.save(output, found.numpy())
    rows = _rows(found, classifies=bool(recipe.get("classifies")))
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    console = Console()
    title = {"global": "global model", "best": "best"}.get(str(which), f"client {client}")
    table = Table("example", *rows[0], title=title)
    for place, row in enumerate(rows[:_MOST_ROWS]):
        table.add_row(str(place), *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"{len(rows) - _MOST_ROWS} examples more; --json or --output FILE.npy has all")


def _rows(outputs: Tensor, *, classifies: bool) -> list[dict[str, Any]]:
    """Return a row per example: class and probability of a classifier's logits, the outputs of anything else."""
    if classifies and outputs.ndim == 2 and outputs.shape[1] > 1:
        chances = outputs.softmax(-1)
        best, classes = chances.max(-1)
        return [{"class": int(label), "probability": float(chance)} for label, chance in zip(classes, best, strict=True)]
    if classifies and outputs.ndim == 3:
        return [{"classes": row.tolist()} for row in outputs.argmax(-1)]
    return [{"output": row.tolist()} for row in outputs]


def _export(
    *,
    out: Out,
    client: ClientId = None,
    best: Best = False,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write an ONNX file, and compare it with torch by ONNX Runtime.")
    ] = False,
    pt2: Annotated[bool, typer.Option("--pt2", help="Write a program of torch.export.")] = False,
    to: Annotated[Path | None, typer.Option(help="The file. Default: beside the model, in OUT/models.")] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Export the global model of a run, or that of a client, for devices without Python."""
    from sparsekit_fl.models import read_recipe
    from sparsekit_fl.results.saved import example_inputs_of, export_model, load_model, model_file

    if onnx == pt2:
        raise InvalidValueError(
            "--onnx and --pt2 are two files; leave one out" if onnx else "say what to write: --onnx or --pt2"
        )
    _check_folder("--to", to)
    which = _which(client, best)
    recipe = read_recipe(out)
    module, examples = load_model(out, which, model=model), example_inputs_of(recipe)
    if to is None:
        # A client that deploys the global model has no file of its own, but gets one here.
        stem = model_file(out, which, recipe).stem if client is None else f"client-{client}"
        to = out / "models" / f"{stem}.{'onnx' if onnx else 'pt2'}"
    difference = export_model(module, examples, to, onnx=onnx)
    size = to.stat().st_size
    if as_json:
        typer.echo(json.dumps({"file": str(to), "bytes": size, "difference": difference}))
        return
    checked = "" if difference is None else f"; outputs differ from torch's by {difference:.1g} at most"
    typer.echo(f"{to}: {size:,} bytes{checked}")


predict = command_app(
    _predict,
    examples=(
        "sparsekit predict runs/mnist --client 3 --input digit.png",
        "sparsekit predict runs/mnist --input images.npy --output logits.npy",
        "sparsekit predict runs/mine --model mypackage.nets:net --input rows.csv --json",
    ),
)

export = command_app(
    _export,
    examples=(
        "sparsekit export runs/mnist --client 3 --onnx",
        "sparsekit export runs/mnist --pt2 --to global.pt2",
    ),
)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON on stdout and nothing else.")] = False,
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
