"""The options of commands that cut a model, each declared once: what Typer reads, and what the command gets.

`model_source` and `data_source` read what they say.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from sparsekit.errors import InvalidValueError

_data, _run, _what, _where, _after = (
    functools.partial(typer.Option, rich_help_panel=panel)
    for panel in ("Data", "The run", "The budget", "Where it is cut", "After the cut")
)
# Those that do not say what comes out.
_MOMENTARY = ("resume", "out", "dry_run", "time", "quiet", "as_json")


def takes(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a dataclass; its parameter `options` receives them.

    Args:
        kind: The dataclass. The model comes first in help texts, then the fields of its own.
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

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def spread(**given: Any) -> None:
            command(kind(**given))

        spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        spread.__doc__, spread.__name__ = command.__doc__, command.__name__
        return spread

    return decorate


def read_runtimes(text: str) -> tuple[str, ...]:
    """Read `eager,compile`, or `none`."""
    from sparsekit.measure.budget import RUNTIMES

    found = tuple(name.strip() for name in text.split(","))
    if found == ("none",):
        return ()
    for name in found:
        if name not in RUNTIMES:
            raise InvalidValueError(f"--time takes {', '.join(RUNTIMES)} with commas between, or none; got {text!r}")
    return found


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, with which weights and inputs, and where."""

    model: Annotated[str, typer.Argument(help="A built-in model, package.module:factory or path/to/file.py:factory.")]
    init: Annotated[Path | None, typer.Option(help="Trained weights: a state dict as safetensors, or as torch saves it.")] = (
        None
    )
    example_shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of an example input, as in 1,3,32,32; with :int64 behind it for token ids, with NAME= before it for a"
            " keyword input. Once per input. Default: what the model brings along."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, …")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class PruneOptions(ModelOptions):
    """The options of `sparsekit prune`."""

    prune_norms: Annotated[
        bool,
        typer.Option(help="Also prune units under layer norms, which are then taken over the kept units."),
    ] = False
    dataset: Annotated[
        str | None,
        _data(help="A data set by name, package.module:loader or path/to/file.py:loader: batches, or (training, validation)."),
    ] = None
    data_dir: Annotated[Path | None, _data(help="Folder of the data sets; without it they are fetched once.")] = None
    batch_size: Annotated[int, _data(min=1, help="Examples in a batch of a data set by name.")] = 64
    loss: Annotated[
        str,
        _data(help="cross_entropy, mse_loss, …, package.module:loss, or outputs for that of the model."),
    ] = "cross_entropy"
    metric: Annotated[
        str | None,
        _data(help="accuracy, loss, or package.module:metric of a model; larger is better."),
    ] = None
    calibration_batches: Annotated[
        int, _data(min=1, help="Batches that score units, refit layers and, the last fifth, judge candidate cuts.")
    ] = 20
    seed: Annotated[int, _run(help="Random seed.")] = 0
    quiet: Annotated[bool, _run("--quiet", "-q", help="No progress on stderr.")] = False
    as_json: Annotated[bool, _run("--json", help="Print JSON on stdout and nothing else.")] = False

    budget: Annotated[
        list[str],
        _what(
            help="METRIC=VALUE: flops, params, bytes, memory or latency_ms; 50% is a share, a number is absolute. Several with"
            " commas between, or the option several times."
        ),
    ]
    criterion: Annotated[
        str | None,
        _where(
            help="Importance of a unit: a name, or package.module:criterion. Default: the best of a few with data, magnitude"
            " without."
        ),
    ] = None
    allocation: Annotated[
        str | None,
        _where(
            help="How many units stay in each layer: by_cost, global, uniform, or package.module:allocation. Default: the best"
            " of a few with data, by_cost without."
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        _where(help="Layer that keeps all its units: a name or a regular expression; or a kind of unit, such as channel."),
    ] = None
    limit: Annotated[
        list[str] | None,
        _where(help="LAYER=LEAST:LARGEST share of its units that stays, as in layer1=0.5:1."),
    ] = None
    multiple_of: Annotated[
        list[str] | None,
        _where(
            help="Widths are multiples of this number, or KIND=number, as in head=2. Default: 8, or less where the budget or a"
            " narrow layer asks for it."
        ),
    ] = None
    schedule: Annotated[
        str,
        _after(
            help="Way to the budget, one_shot, linear, cubic or cosine, and its steps, with fine-tuning after each: cubic=3."
        ),
    ] = "one_shot"
    reconstruct: Annotated[
        Literal["layers", "batchnorm", "both", "none"] | None,
        _after(
            help="After every step: refit layers that read dropped units, renew the statistics of batch norms, or both."
            " Default: both, if there are data.",
        ),
    ] = None
    epochs: Annotated[int, _after(min=0, help="Epochs of fine-tuning after every step.")] = 0
    lr: Annotated[float, _after(help="Learning rate of fine-tuning at its start.")] = 0.01
    distill: Annotated[float, _after(help="Share of the dense model's outputs in the loss, in [0, 1].")] = 0.0
    out: Annotated[
        Path | None,
        _run(help="Folder for the compact model, report.html and report.json. Default: nothing is written."),
    ] = None
    time: Annotated[
        str,
        _run(
            metavar="[eager|compile|export|onnx|none]",
            help="What is timed before and after the cut: eager, and others after commas; none: nothing.",
        ),
    ] = "eager"
    onnx: Annotated[bool, _run("--onnx", help="Also write model.onnx.")] = False
    dry_run: Annotated[bool, _run("--dry-run", help="Print what would be cut, and do nothing.")] = False
    resume: Annotated[bool, _run("--resume", help="Go on with the run in --out, from the last epoch.")] = False

    def to_json(self) -> dict[str, Any]:
        """The options that say what comes out, as JSON data."""
        found = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return {name: value for name, value in found.items() if name not in _MOMENTARY}


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], place: Path) -> None:
    """Refuse to go on with what was made with other options, and say which."""
    other = sorted(name.replace("_", "-") for name in {*before, *now} if before.get(name) != now.get(name))
    if other:
        raise InvalidValueError(
            f"{place} was made with other options (--{', --'.join(other)}); give the same ones, or another --out"
        )
