"""What `sparsekit prune` does, step by step: load, decide, cut, repair, train on, measure, write."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsekit.cli.data_source import Data, find_loss, find_metric, load_data
from sparsekit.cli.model_options import CutOptions, PruneOptions, check_same, read_runtimes
from sparsekit.cli.model_source import find_object, load_with_inputs
from sparsekit.errors import InvalidValueError, MissingDependencyError, install_hint

if TYPE_CHECKING:
    from torch import nn

    from sparsekit.pruning.result import Pruned

_logger = logging.getLogger(__name__)

_REPAIRS: Mapping[str, Any] = {"both": True, "compensate": "compensate", "recalibrate": "recalibrate", "none": False}
_REPORT, _PAGE, _SMALL, _ONNX, _OPTIONS = "report.json", "report.html", "model.safetensors", "model.onnx", "options.json"


def read_limits_option(texts: Sequence[str]) -> dict[Any, tuple[float, float]]:
    """Read `layer1=0.5:1` and the like.

    Raises:
        InvalidValueError: the text is no pair of shares.
    """
    found: dict[Any, tuple[float, float]] = {}
    for text in texts:
        name, equals, pair = text.rpartition("=")
        least, colon, largest = pair.partition(":")
        try:
            found[name] = float(least), float(largest) if colon else 1.0
        except ValueError:
            equals = ""
        if not equals or not name:
            raise InvalidValueError(
                f"--limit must be LAYER=LEAST:LARGEST, shares of the units that stay, as in layer1=0.5:1.0, got {text!r}"
            )
    return found


def read_multiples(texts: Sequence[str]) -> int | dict[str, int] | Literal["auto"]:
    """Read `8`, or `auto`, or `channel=8` and `head=2`.

    Raises:
        InvalidValueError: no number, or several without a kind.
    """
    found: dict[str, int] = {}
    if list(texts) == ["auto"]:
        return "auto"
    for text in texts:
        kind, _, number = text.rpartition("=")
        if not number.isdigit():
            raise InvalidValueError(f"--multiple-of must be a number, auto, or KIND=number as in channel=8, got {text!r}")
        if not kind and len(texts) == 1:
            return int(number)
        if not kind:
            raise InvalidValueError(f"--multiple-of {text} needs a kind where there are several, as in channel={text}")
        found[kind] = int(number)
    return found or 1


class Job:
    """What a command is about: a model with its inputs, and data, loss and metric for it."""

    def __init__(self, options: CutOptions, *, progress: bool) -> None:
        """Build everything that the options name; one that cannot be meant is a SparsekitError."""
        import torch

        self.progress = progress
        self._dataset, self._scoring_batches = options.dataset, options.scoring_batches
        self.model, self.args, self.kwargs = load_with_inputs(options)
        self.loss = find_loss(options.loss)
        self.data = Data((), None)
        if options.dataset is not None:
            self.data = load_data(
                options.dataset,
                data_dir=options.data_dir,
                batch_size=options.batch_size,
                seed=options.seed,
                device=torch.device(options.device),
            )
        self.metric = find_metric(options.metric, self.data, self.loss)

    def criterion(self, name: str | None) -> Any:
        """The criterion of a name, with the data if it reads any; None: fisher where there are data, else magnitude."""
        from sparsekit.criteria import registry
        from sparsekit.criteria.by_name import reads_data, with_data

        named = name or ("magnitude" if self._dataset is None else "fisher")
        found = find_object(named, registry)
        if self._dataset is None:
            if reads_data(found):
                raise InvalidValueError(f"criterion {named!r} needs data; pass --dataset")
            return found
        return with_data(found, self.data.train, self.loss, limit=self._scoring_batches, progress=self.progress)


class PruneJob(Job):
    """One run of `sparsekit prune`."""

    def __init__(self, options: PruneOptions, *, progress: bool) -> None:
        """Build everything that the options name; one that cannot be meant is a SparsekitError."""
        self.schedule = _read_schedule(options.schedule)
        self.runtimes = read_runtimes(options.time)
        for name in ("epochs", "distill", "repair"):
            if getattr(options, name) not in (None, 0, "none") and options.dataset is None:
                raise InvalidValueError(f"--{name} needs data; pass --dataset, a name or package.module:loader")
        if options.distill and not options.epochs:
            raise InvalidValueError("--distill is how fine-tuning is taught; pass --epochs too")
        super().__init__(options, progress=progress)
        self.options = options
        self.epochs: dict[str, int] = {}

    def decide(self, *, cut: bool = True) -> Pruned:
        """Prune, with repair and fine-tuning after every step."""
        import numpy as np

        from sparsekit.measure.budget import Budget
        from sparsekit.pruning.prune import prune
        from sparsekit.rng import torch_generator
        from sparsekit.tracing.inputs import ModelInputs

        options = self.options
        budget: Budget | None = Budget.parse(options.budget)
        plan: Any = options.allocation
        name, _, table = options.allocation.partition("=")
        if name == "sensitivity":
            plan, budget = _sensitivity(budget, table), None
        with_data = options.dataset is not None
        return prune(
            self.model,
            ModelInputs(self.args, self.kwargs),
            budget=budget,
            batches=self.data.train if with_data else None,
            loss=self.loss if with_data else None,
            repair=_REPAIRS[options.repair or "both"] if with_data else False,
            metric=self.metric,
            criterion=self.criterion(options.criterion),
            allocation=plan,
            keep=options.keep or (),
            limits=read_limits_option(options.limit or ()),
            multiple_of=read_multiples(options.multiple_of or ()),
            schedule=self.schedule,
            finetune=self._train if options.epochs and cut else None,
            norm=options.norm,
            generator=torch_generator(np.random.default_rng(options.seed)),
            cut=cut,
            progress=self.progress,
        )

    def finish(self, pruned: Pruned) -> Pruned:
        """Measure the small model beside the dense one; the report has its times."""
        report = replace(pruned.report, measured={**pruned.report.measured, **self.epochs})
        pruned = replace(pruned, report=report)
        if not self.runtimes:
            return pruned
        if self.progress:
            _logger.info("timing both models; --time none leaves it out")
        return pruned.measure_times(self.model, *self.args, runtimes=self.runtimes, **self.kwargs)

    def _train(self, small: nn.Module, step: int) -> None:
        """Train on after a step."""
        import torch

        from sparsekit.finetuning import Distillation, finetune

        options = self.options
        folder = options.out
        done = finetune(
            small.train(),
            self.data.train,
            self.loss,
            epochs=options.epochs,
            optimizer=lambda entries: torch.optim.SGD(entries, lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs),
            validation=self.metric,
            distillation=Distillation(self.model, share=options.distill) if options.distill else None,
            checkpoint=None if folder is None else folder / f"finetuning-{step}.checkpoint",
            resume=options.resume,
            seed=options.seed,
            progress=self.progress,
            on_epoch=lambda record: _logger.info("epoch %d: loss %.4f%s", record.epoch, record.loss, _told(record.score)),
        )
        self.epochs[f"best epoch of fine-tuning{f' after step {step}' if self.schedule.steps > 1 else ''}"] = done.best_epoch
        small.eval()

    def write(self, pruned: Pruned) -> dict[str, str]:
        """Write all files of the run; what → path."""
        folder = self.options.out
        if folder is None:
            return {}
        files = {"model": folder / _SMALL, "page": folder / _PAGE}
        pruned.model.eval()
        pruned.save(files["model"])
        pruned.to_html(files["page"])
        if self.options.onnx:
            files["onnx"] = folder / _ONNX
            export_onnx(pruned.model, self.args, self.kwargs, files["onnx"])
        files["report"] = folder / _REPORT
        found = {what: str(path) for what, path in files.items()}
        text = json.dumps({**pruned.report.to_dict(), "files": found}, indent=1)
        files["report"].write_text(text, encoding="utf-8")  # last: where it is, the run is finished
        return found


def _read_schedule(text: str) -> Any:
    """`cubic=3` as a schedule of three steps."""
    from sparsekit.allocation.schedule import Schedule

    name, _, steps = text.partition("=")
    if steps and not steps.isdecimal():
        raise InvalidValueError(f"--schedule must be a name or NAME=steps, as in cubic=3, got {text!r}")
    return Schedule(name, int(steps or 1))


def _sensitivity(budget: Any, table: str) -> Any:
    from sparsekit.allocation.sensitivity import Sensitivity

    if not table:
        raise InvalidValueError(
            "--allocation sensitivity needs its table: pass sensitivity=FILE, which `sparsekit sensitivity MODEL --out FILE`"
            " writes"
        )
    path = Path(table)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["table"]
    except FileNotFoundError as error:
        raise InvalidValueError(f"there is no table {table!r}; `sparsekit sensitivity MODEL --out {path}` writes it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(f"{path} is no table of `sparsekit sensitivity`: {error}") from error
    return Sensitivity(budget, {name: tuple(map(tuple, pairs)) for name, pairs in found.items()})


def _told(score: float | None) -> str:
    return "" if score is None else f", score {score:.4f}"


def export_onnx(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], path: Path) -> None:
    """Write a model as ONNX, for any number of examples where all inputs go by position and the model allows it.

    Raises:
        MissingDependencyError: the packages for it are not installed.
    """
    import torch

    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"--onnx needs onnx and onnxscript; install them with {install_hint('export')}") from error
    from sparsekit.tracing.inputs import ModelInputs

    def export(call: ModelInputs, shapes: Any) -> None:
        torch.onnx.export(
            model.eval(), call.args, str(path), kwargs=dict(call.kwargs), dynamic_shapes=shapes,
            dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip

    call = ModelInputs(args, kwargs)
    several = call.doubled()  # a single example is taken for a constant
    try:
        if kwargs or not all(isinstance(value, torch.Tensor) and value.dim() for value in args):
            raise TypeError("the axis of examples is known of tensors by position alone")
        batch = torch.export.Dim("batch")
        export(several, tuple({0: batch} for _ in args))
    except Exception as error:  # noqa: BLE001 - whatever the exporter raises; a fixed number of examples may still do
        _logger.warning("%s takes as many examples as the example inputs and no other number: %s", path, error)
        export(call, None)


def open_folder(options: PruneOptions) -> dict[str, Any] | None:
    """Prepare `--out`; the report of a finished run with the same options is returned on `--resume`.

    Raises:
        InvalidValueError: a run is there already, or one with other options.
        OSError: the folder cannot be made or written.
    """
    folder = options.out
    if folder is None:
        if options.resume or options.onnx:
            raise InvalidValueError("--resume and --onnx need --out, the folder of the run")
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"no permission to write into {str(folder)!r}; pass another --out")
    saved = folder / _OPTIONS
    if options.resume and saved.exists():
        check_same(json.loads(saved.read_text(encoding="utf-8")), options.to_json(), folder)
        if (folder / _REPORT).exists():
            return dict(json.loads((folder / _REPORT).read_text(encoding="utf-8")))
    elif (folder / _REPORT).exists() or saved.exists():
        raise InvalidValueError(f"{folder} holds a run already; pass --resume to go on with it, or another --out")
    saved.write_text(json.dumps(options.to_json(), indent=1), encoding="utf-8")
    return None
