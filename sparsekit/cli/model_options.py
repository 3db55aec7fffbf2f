"""Options of commands that prune a model, each declared once for Typer and for the command.

`model_source` and `data_source` load the models and data that they name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import typer

from sparsekit.cli.output import AsJson, with_options
from sparsekit.errors import InvalidValueError

_data, _run, _what, _where, _after = (
    functools.partial(typer.Option, rich_help_panel=panel)
    for panel in ("Data", "Run", "Budget", "What to prune", "After pruning")
)


def takes(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn each field of a dataclass into an option of a command, which gets the dataclass as `options`.

    Help texts list the model first, then the fields that the class itself declares.
    """
    hints = get_type_hints(kind, include_extras=True)
    own = inspect.get_annotations(kind)
    fields = sorted(dataclasses.fields(kind), key=lambda field: (field.name != "model", field.name not in own))
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields
    ]

    return lambda command: with_options(command, parameters, lambda typed: {"options": kind(**typed)})


def read_runtimes(text: str) -> tuple[str, ...]:
    """Read `eager,compile`, or `none`."""
    from sparsekit.measure.budget import RUNTIMES

    found = tuple(name.strip() for name in text.split(","))
    if found == ("none",):
        return ()
    for name in found:
        if name not in RUNTIMES:
            raise InvalidValueError(f"--time must be none, or a comma-separated list of {', '.join(RUNTIMES)}; got {text!r}")
    return found


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its weights and example inputs, and its device."""

    model: Annotated[
        str,
        typer.Argument(
            help="A built-in model, package.module:factory, path/to/file.py:factory, or a name in torchvision, timm"
            " or transformers (untrained)."
        ),
    ]
    init: Annotated[Path | None, typer.Option(help="Trained weights: a state dict as safetensors, or as torch saves it.")] = (
        None
    )
    example_shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of an example input, e.g. 1,3,32,32. Append :int64 for token ids; prefix NAME= for a keyword input."
            " Repeat for several inputs. Default: the example inputs that the factory returns."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, …")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class PruneOptions(ModelOptions):
    """The options of `sparsekit prune`."""

    prune_hidden_size: Annotated[
        bool,
        _where(
            "--prune-hidden-size",
            help="Also prune units that layer norms average over; norms then average over the kept units.",
        ),
    ] = False
    dataset: Annotated[
        str | None,
        _data(help="Data set, package.module:loader or path/to/file.py:loader: returns batches or (training, validation)."),
    ] = None
    data_dir: Annotated[Path | None, _data(help="Folder with the data sets. Default: download once to the cache.")] = None
    batch_size: Annotated[int, _data(metavar="N", min=1, help="Batch size of a data set given by name.")] = 64
    loss: Annotated[
        str, _data(help="cross_entropy, mse_loss, …, package.module:loss, or outputs if the model computes its own loss.")
    ] = "cross_entropy"
    calibration_batches: Annotated[
        int,
        _data(
            metavar="N",
            min=1,
            help="Number of batches for scoring and reconstruction; the last fifth of the examples selects among candidates.",
        ),
    ] = 20
    seed: Annotated[int, _run(help="Random seed.")] = 0
    quiet: Annotated[bool, _run("--quiet", "-q", help="Do not show progress on stderr.")] = False
    as_json: AsJson = False

    budget: Annotated[
        list[str],
        _what(
            help="METRIC=VALUE with flops, params, bytes or latency_ms, e.g. flops=50% (of the dense model) or"
            " bytes=2e6. Separate several by commas, or repeat the option."
        ),
    ]
    criterion: Annotated[
        str | None,
        _where(
            help="How to score units: a name (sparsekit list criteria), or package.module:criterion. Default: with data, the"
            " best of several; without, magnitude."
        ),
    ] = None
    allocation: Annotated[
        str | None,
        _where(
            help="How to distribute the budget over layers: by_cost, by_loss, global, uniform, or package.module:allocation."
            " Default: with data, the best of several; without, by_cost."
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        _where(help="Do not prune this layer (name or regular expression) or kind of unit, such as channel. Repeatable."),
    ] = None
    multiple_of: Annotated[
        int | None,
        _where(
            metavar="N",
            min=1,
            help="Round widths to multiples of this number. Default: 16; 8, 4 or 1 if the budget would be missed.",
        ),
    ] = None
    schedule: Annotated[
        str,
        _after(
            help="Pruning schedule: one_shot, linear, cubic or cosine; append =N for N steps, each followed by fine-tuning,"
            " e.g. cubic=3."
        ),
    ] = "one_shot"
    reconstruct: Annotated[
        Literal["layers", "batchnorm", "both", "none"] | None,
        _after(
            metavar="HOW",
            help="After every step, refit the layers that follow pruned units (layers), recalibrate batch norms (batchnorm),"
            " do both, or none. Default: both with data.",
        ),
    ] = None
    epochs: Annotated[int, _after(metavar="N", min=0, help="Epochs of fine-tuning after every step.")] = 0
    lr: Annotated[float, _after(help="Initial learning rate of fine-tuning.")] = 0.01
    distill: Annotated[float, _after(help="Weight of the distillation loss (dense model as teacher), between 0 and 1.")] = 0.0
    out: Annotated[Path | None, _run(help="Folder for the pruned model and report.json. Default: write nothing.")] = None
    time: Annotated[
        str, _run(help="Runtimes to time before and after pruning: eager, compile, export, onnx, several by commas; or none.")
    ] = "eager"
    onnx: Annotated[bool, _run("--onnx", help="Also write model.onnx.")] = False
    dry_run: Annotated[bool, _run("--dry-run", help="Print what would be pruned, and stop.")] = False
