"""`sparsekit prune`: prune a model to a budget from the command line, and save it with a report."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekit._torch import set_mode
from sparsekit.cli import AsJson, command_app, command_line, in_flags, print_json, print_table, print_wrapped
from sparsekit.cli.data_source import find_loss, load_data, metric_of
from sparsekit.cli.model_source import Device, ExampleShape, Init, Model, load_with_inputs
from sparsekit.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    from torch import nn

    from sparsekit.criteria.base import Criterion
    from sparsekit.pruning.finetune import EpochRecord
    from sparsekit.pruning.report import PruneReport
    from sparsekit.pruning.result import Pruned
    from sparsekit.tracing.inputs import ModelInputs

_logger = logging.getLogger(__name__)

_RECONSTRUCT: Mapping[str, Any] = {"both": True, "layers": "layers", "batchnorm": "batchnorm", "none": False}
_REPORT, _SMALL = "report.json", "model.safetensors"


_data, _run, _what, _where, _after = (
    functools.partial(typer.Option, rich_help_panel=panel)
    for panel in ("Data", "Run", "Budget", "What to prune", "After pruning")
)


def _prune(
    *,
    model: Model,
    prune_hidden_size: Annotated[
        bool,
        _where(
            "--prune-hidden-size",
            help="Also prune units that layer norms average over; norms then average over the kept units.",
        ),
    ] = False,
    dataset: Annotated[
        str | None,
        _data(
            help="Data set, or package.module:loader or path/to/file.py:loader, for batches, a data set, or a pair (training, "
            "validation). Loaders of federated commands work too."
        ),
    ] = None,
    data_dir: Annotated[Path | None, _data(help="Folder with the data sets. Default: download once to the cache.")] = None,
    batch_size: Annotated[int, _data(metavar="N", min=1, help="Batch size of a data set given by name.")] = 64,
    loss: Annotated[
        str, _data(help="cross_entropy, mse_loss, …, package.module:loss, or outputs if the model computes its own loss.")
    ] = "cross_entropy",
    calibration_batches: Annotated[
        int,
        _data(
            metavar="N",
            min=1,
            help="Number of batches for scoring and reconstruction; a fifth of the examples selects among candidates.",
        ),
    ] = 20,
    seed: Annotated[int, _run(help="Random seed.")] = 0,
    quiet: Annotated[bool, _run("--quiet", "-q", help="Do not show progress on stderr.")] = False,
    as_json: AsJson = False,
    budget: Annotated[
        list[str],
        _what(
            help="METRIC=VALUE with flops, params, bytes or latency_ms, e.g. flops=50% (of the dense model) or"
            " bytes=2e6. Separate several by commas, or repeat the option. latency_ms is eager unless runtime=onnx, compile or"
            " export follows it."
        ),
    ],
    criterion: Annotated[
        str | None,
        _where(
            help="How to score units: a name (sparsekit list criteria), or package.module:criterion. Default: with data, the"
            " best of several; without, magnitude."
        ),
    ] = None,
    allocation: Annotated[
        str | None,
        _where(
            help="How to distribute the budget over layers: by_cost, by_loss, global, uniform, or package.module:allocation."
            " Default: with data, the best of several; without, by_cost."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        _where(help="Do not prune this layer (name or regular expression) or kind of unit, such as channel. Repeatable."),
    ] = None,
    depth: Annotated[
        str | None,
        _where(
            metavar="N",
            help="Remove this number of residual blocks whole before units; or try a range, as in 0-6, and take the best with"
            " data. `sparsekit units` lists the blocks. Default: 0.",
        ),
    ] = None,
    multiple_of: Annotated[
        int | None,
        _where(
            metavar="N",
            min=1,
            help="Round widths to multiples of this number. Default: 16; 8, 4 or 1 if the budget would be missed.",
        ),
    ] = None,
    schedule: Annotated[
        str,
        _after(
            help="Pruning schedule: one_shot, linear, cubic or cosine; append =N for N steps, each followed by fine-tuning,"
            " e.g. cubic=3."
        ),
    ] = "one_shot",
    reconstruct: Annotated[
        Literal["layers", "batchnorm", "both", "none"] | None,
        _after(
            metavar="HOW",
            help="After every step, refit the layers that follow pruned units (layers), recalibrate batch norms (batchnorm),"
            " do both, or none. Default: both with data.",
        ),
    ] = None,
    epochs: Annotated[int, _after(metavar="N", min=0, help="Epochs of fine-tuning after every step.")] = 0,
    lr: Annotated[float, _after(help="Initial learning rate of fine-tuning.")] = 0.01,
    distill: Annotated[float, _after(help="Weight of the distillation loss (dense model as teacher), between 0 and 1.")] = 0.0,
    out: Annotated[Path | None, _run(help="Folder for the pruned model and report.json. Default: write nothing.")] = None,
    time: Annotated[
        str, _run(help="Runtimes to time before and after pruning: eager, compile, export, onnx, several by commas; or none.")
    ] = "eager",
    onnx: Annotated[bool, _run("--onnx", help="Also write model.onnx.")] = False,
    dry_run: Annotated[bool, _run("--dry-run", help="Print what would be pruned, and stop.")] = False,
    init: Init = None,
    example_shape: ExampleShape = None,
    device: Device = "cpu",
) -> None:
    """Prune a model to a budget, and report what was pruned.

    A factory is called without arguments and returns the module, or the module and its example inputs. A loader may take
    data_dir, batch_size and seed. If MODEL is a folder of transformers, its weights are read and written one at a time, or with
    --dataset block by block, so that the model need not fit into memory; --out is then a folder of transformers too.
    """
    import numpy as np
    import torch

    from sparsekit.allocation import Schedule
    from sparsekit.finetuning import Distillation, finetune
    from sparsekit.measure.budget import Budget
    from sparsekit.pruning.calibration import drawn
    from sparsekit.pruning.prune import plan, prune
    from sparsekit.rng import torch_generator
    from sparsekit.tracing.trace import UnprunableWarning

    if (Path(model) / "config.json").is_file():
        other = [init, example_shape, onnx, dry_run, epochs, distill, depth, device != "cpu", schedule != "one_shot"]
        if out is None or any(other):
            raise InvalidValueError(
                "a folder is pruned to --out by --budget, --criterion, --allocation, --exclude, --multiple-of,"
                " --prune-hidden-size, --reconstruct and the options of data alone; for more, load the model and call"
                " sparsekit.prune"
            )
        train, _, _ = load_data(dataset, device, data_dir=data_dir, batch_size=batch_size, seed=seed)
        data: dict[str, Any] = {
            "batches": itertools.islice(drawn(train, calibration_batches), calibration_batches),
            "loss": None if loss == "cross_entropy" else find_loss(loss),  # decoders compute their own from labels
            "reconstruct": reconstruct in (None, "layers", "both"),
        }
        _prune_folder(
            model, out, as_json=as_json, budget=Budget.of(budget), allocation=allocation, exclude=exclude or (),
            criterion=criterion if criterion is None or dataset is not None else _without_data(criterion),
            multiple_of=multiple_of, prune_hidden_size=prune_hidden_size,
            progress=not quiet and not as_json and sys.stderr.isatty(), **(data if dataset is not None else {}),
        )  # fmt: skip
        return
    shape, _, steps = schedule.partition("=")
    if steps and not steps.isdecimal():
        raise InvalidValueError(f"--schedule must be a name or NAME=steps, as in cubic=3, got {schedule!r}")
    cuts, runtimes = Schedule(shape, int(steps or 1)), _read_runtimes(time)
    for name, given in (("epochs", epochs), ("distill", distill), ("reconstruct", reconstruct)):
        if given not in (None, 0, "none") and dataset is None:
            raise InvalidValueError(f"--{name} needs data; pass --dataset, a name or package.module:loader")
    if not 0.0 <= lr < math.inf:
        raise InvalidValueError(f"--lr must be a finite number >= 0, got {lr}")
    if distill and not epochs:
        raise InvalidValueError("--distill sets the loss of fine-tuning; pass --epochs too")
    if seed < 0:
        raise InvalidValueError(f"--seed must be an integer >= 0, got {seed}")
    progress = not quiet and not as_json and sys.stderr.isatty()
    best_epochs: dict[str, int] = {}
    files: dict[str, str] = {}

    def train_small(small: nn.Module, step: int) -> None:
        done = finetune(
            small, train, loss_of, epochs=epochs,
            optimizer=lambda entries: torch.optim.SGD(entries, lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs), validation=metric,
            distillation=Distillation(dense, share=distill) if distill else None, seed=seed, progress=progress,
            on_epoch=_log_epoch,
        )  # fmt: skip
        best_epochs[f"best_epoch{f'_step{step}' if cuts.steps > 1 else ''}"] = done.best_epoch
        set_mode(small, False)

    with warnings.catch_warnings(), _stoppable(out):
        warnings.simplefilter("ignore", UnprunableWarning)  # the report has the same facts
        dense, inputs = load_with_inputs(model, init=init, shapes=example_shape or (), device=device)
        loss_of = find_loss(loss)
        train, validation, data_note = load_data(dataset, device, data_dir=data_dir, batch_size=batch_size, seed=seed)
        metric = metric_of(validation, loss_of)
        if metric is not None and data_note:
            try:
                metric(dense)
            except DataError as error:  # the score was not requested, so it is optional
                train, metric, data_note = [*train, *(validation or ())], None, f"No scores: {error}."
        options: dict[str, Any] = {
            "budget": Budget.of(budget),
            "batches": None if dataset is None else itertools.islice(drawn(train, calibration_batches), calibration_batches),
            "loss": None if dataset is None else loss_of,
            "reconstruct": _RECONSTRUCT[reconstruct or "both"],
            "criterion": criterion if criterion is None or dataset is not None else _without_data(criterion),
            "allocation": allocation,
            "exclude": exclude or (),
            "depth": None if depth is None else _read_depth(depth),
            "multiple_of": multiple_of,
            "prune_hidden_size": prune_hidden_size,
            "generator": torch_generator(np.random.default_rng(seed)),
            "progress": progress,
        }
        if dry_run:
            report = plan(dense, inputs, **options).report
        else:
            _open_folder(out, onnx=onnx)
            done = prune(dense, inputs, metric=metric, schedule=cuts, finetune=train_small if epochs else None, **options)
            notes = [*done.report.notes, *filter(None, [data_note])]
            done = replace(done, report=replace(done.report, measured={**done.report.measured, **best_epochs}, notes=notes))
            if runtimes:
                if progress:
                    _logger.info("timing both models; --time none leaves it out")
                done = done.measure_times(dense, inputs, runtimes=runtimes)
            report = done.report
            if out is not None:
                files = _write(done, out, inputs if onnx else None, model)
    if as_json:
        print_json({**report.to_dict(), **({} if dry_run else {"files": files})})
        return
    _print(report, ", dry run: nothing was pruned" if dry_run else "")
    for what, path in files.items():
        typer.echo(f"{what}: {path}")
    if out is None and not dry_run:
        typer.echo("nothing was written; pass --out FOLDER to save the pruned model")


def _prune_folder(source: str, out: Path, *, as_json: bool, **options: Any) -> None:
    from sparsekit.pruning.folder import prune_folder
    from sparsekit.tracing.trace import UnprunableWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprunableWarning)  # the report has the same facts
        report = prune_folder(source, out, **options).report
    if as_json:
        print_json({**report.to_dict(), "files": {"model": str(out)}})
        return
    _print(report, "")
    typer.echo(f"model: {out}")


def _read_runtimes(text: str) -> tuple[str, ...]:
    """Read `eager,compile`, or `none`."""
    from sparsekit.measure.budget import RUNTIMES

    found = tuple(name.strip() for name in text.split(","))
    if found == ("none",):
        return ()
    for name in found:
        if name not in RUNTIMES:
            raise InvalidValueError(f"--time must be none, or a comma-separated list of {', '.join(RUNTIMES)}; got {text!r}")
    return found


def _read_depth(text: str) -> int | tuple[int, int]:
    """Read `4`, or `0-6`."""
    numbers = [part.strip() for part in text.split("-")]
    if not 1 <= len(numbers) <= 2 or not all(part.isdecimal() for part in numbers):
        raise InvalidValueError(f"--depth must be a number of blocks or a range, as in 4 or 0-6, got {text!r}")
    return int(numbers[0]) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))


def _without_data(criterion: str) -> Criterion:
    from sparsekit.criteria import as_criterion
    from sparsekit.criteria.batches import DataDriven

    found = as_criterion(criterion)
    if isinstance(found, DataDriven) and found.batches is None:
        raise InvalidValueError(f"criterion {criterion!r} needs data; pass --dataset")
    return found


def _print(report: PruneReport, how: str) -> None:
    typer.echo(f"{report.model}: criterion {report.criterion}, allocation {report.allocation}, {report.widths}{how}")
    tables = report.tables()
    for title in ("Costs", "Candidates", "Blocks", "Groups", "Time", "Measured"):
        head, rows = tables.get(title, ((), ()))
        if rows:
            print_table(head, rows)
    if report.unprunable:
        number = len(report.unprunable)
        typer.echo(f"{number} group{'' if number == 1 else 's'} of units cannot be pruned; `sparsekit units` says why")
    for note in report.notes:
        print_wrapped(in_flags(note))


def _write(pruned: Pruned, folder: Path, exported: ModelInputs | None, model: str) -> dict[str, str]:
    """Write all files of the run, also ONNX if `exported` has example inputs. Returns kind of file → path."""
    from sparsekit.pruning.report import PAGE, prune_page
    from sparsekit.surgery.onnx import export_onnx

    files = {"model": folder / _SMALL}
    set_mode(pruned.model, False)
    pruned.save(files["model"], page=None)
    if exported is not None:
        files["onnx"] = folder / "model.onnx"
        export_onnx(pruned.model, exported.args, files["onnx"], exported.kwargs)
    sizes = {path.name: path.stat().st_size for path in files.values()}
    files["page"] = folder / PAGE
    place, _, maker = model.rpartition(":")
    found = os.path.relpath(place, folder) if place.endswith(".py") else place  # relative to the folder of the page
    factory = f'"{found}:{maker}"' if place else ""
    text = prune_page(pruned.report, file=_SMALL, sizes=sizes, factory=factory, command=command_line())
    files["page"].write_text(text, encoding="utf-8")
    paths = {what: str(path) for what, path in (files | {"report": folder / _REPORT}).items()}
    text = json.dumps({**pruned.report.to_dict(), "files": paths}, indent=1)
    (folder / _REPORT).write_text(text, encoding="utf-8")  # written last, so that it marks a finished run
    return paths


def _log_epoch(record: EpochRecord) -> None:
    score = "" if record.score is None else f", score {record.score:.4f}"
    _logger.info("epoch %d: loss %.4f%s", record.epoch, record.loss, score)


@contextlib.contextmanager
def _stoppable(folder: Path | None) -> Iterator[None]:
    """If the run fails, remove the empty folders that it created. After Ctrl-C, the error lists the files that are left."""
    places = [] if folder is None else [place for place in (folder, *folder.parents) if not place.exists()]
    before = set(os.listdir(folder)) if folder is not None and folder.is_dir() else set[str]()
    try:
        yield
    except BaseException as error:
        left = sorted({*os.listdir(folder)} - before) if folder is not None and folder.is_dir() else []
        for place in places:
            with contextlib.suppress(OSError):  # the folder does not exist, or has files
                place.rmdir()
        if isinstance(error, KeyboardInterrupt):
            kept = f"{folder} has {', '.join(left)}, and no report.json" if left else "nothing was written"
            raise KeyboardInterrupt(f"{kept}; the same command starts from the dense model") from None
        raise


def _open_folder(folder: Path | None, *, onnx: bool) -> None:
    """Create and check the output folder, if there is one, before the slow steps."""
    if folder is None:
        if onnx:
            raise InvalidValueError("--onnx needs --out, the folder of the run")
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"no permission to write into {str(folder)!r}; pass another --out")
    if (folder / _REPORT).exists():
        raise InvalidValueError(f"{folder} holds a run already; pass another --out")


prune = command_app(
    _prune,
    examples=(
        "sparsekit prune vgg11 --budget flops=50% --dry-run",
        "sparsekit prune nets.py:make --init dense.pt --dataset nets.py:load --budget flops=50%,bytes=2e6 --out small",
        "sparsekit prune nets.py:make --init dense.pt --dataset nets.py:load --budget latency_ms=4,runtime=onnx --out fast"
        " --onnx",
        "sparsekit prune ./Llama-3-8B --budget params=80% --out ./Llama-3-8B-pruned",
        "sparsekit prune cnn --dataset mnist --data-dir data --criterion taylor --budget flops=25% --schedule cubic=3"
        " --epochs 2 --distill 0.5 --out small",
    ),
)
