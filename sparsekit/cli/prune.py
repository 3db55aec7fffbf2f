"""`sparsekit prune`: load, decide, cut, reconstruct, fine-tune, measure and write, from the command line."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from sparsekit.cli.data_source import find_loss, load_data, metric_of
from sparsekit.cli.model_options import PruneOptions, read_runtimes, takes
from sparsekit.cli.model_source import load_with_inputs
from sparsekit.cli.output import command_app, command_line, in_flags, print_json, print_table, print_wrapped
from sparsekit.errors import InvalidValueError

if TYPE_CHECKING:
    from torch import nn

    from sparsekit.pruning.finetune import EpochRecord
    from sparsekit.pruning.report import PruneReport
    from sparsekit.pruning.result import Pruned

_logger = logging.getLogger(__name__)

_RECONSTRUCT: Mapping[str, Any] = {"both": True, "layers": "layers", "batchnorm": "batchnorm", "none": False}
_REPORT, _SMALL = "report.json", "model.safetensors"


@takes(PruneOptions)
def _prune(options: PruneOptions) -> None:
    """Prune a model to a budget, and report what was pruned.

    A factory is called without arguments and returns the module, or the module and its example inputs. A loader may take
    data_dir, batch_size and seed.
    """
    from sparsekit.pruning.prune import prune
    from sparsekit.tracing.trace import UnprunableWarning

    shown = not options.quiet and not options.as_json and sys.stderr.isatty()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprunableWarning)  # the report has the same facts
        job = PruneJob(options, progress=shown)
        files: dict[str, str] = {}
        if options.dry_run:
            report = prune(dry_run=True, **job.arguments()).report
        else:
            _open_folder(options)
            done = job.timed(prune(**job.arguments()))
            report, files = done.report, job.write(done)
    if options.as_json:
        print_json({**report.to_dict(), **({} if options.dry_run else {"files": files})})
        return
    _print(report, ", dry run: nothing was pruned" if options.dry_run else "")
    for what, path in files.items():
        typer.echo(f"{what}: {path}")
    if options.out is None and not options.dry_run:
        typer.echo("nothing was written; pass --out FOLDER to save the pruned model")


def _print(report: PruneReport, how: str) -> None:
    typer.echo(f"{report.model}: criterion {report.criterion}, allocation {report.allocation}{how}")
    tables = report.tables()
    for title in ("Costs", "Candidates", "Groups", "Time", "Measured"):
        head, rows = tables.get(title, ((), ()))
        if rows:
            print_table(head, rows)
    if report.unprunable:
        number = len(report.unprunable)
        typer.echo(f"{number} group{'' if number == 1 else 's'} of units cannot be pruned; `sparsekit units` says why")
    for note in report.notes:
        print_wrapped(in_flags(note))


class PruneJob:
    """One run of `sparsekit prune`."""

    def __init__(self, options: PruneOptions, *, progress: bool) -> None:
        from sparsekit.allocation.schedule import Schedule

        shape, _, steps = options.schedule.partition("=")
        if steps and not steps.isdecimal():
            raise InvalidValueError(f"--schedule must be a name or NAME=steps, as in cubic=3, got {options.schedule!r}")
        self.schedule = Schedule(shape, int(steps or 1))
        self.runtimes = read_runtimes(options.time)
        for name in ("epochs", "distill", "reconstruct"):
            if getattr(options, name) not in (None, 0, "none") and options.dataset is None:
                raise InvalidValueError(f"--{name} needs data; pass --dataset, a name or package.module:loader")
        if not 0.0 <= options.lr < math.inf:
            raise InvalidValueError(f"--lr must be a finite number >= 0, got {options.lr}")
        if options.distill and not options.epochs:
            raise InvalidValueError("--distill sets the loss of fine-tuning; pass --epochs too")
        if options.seed < 0:
            raise InvalidValueError(f"--seed must be an integer >= 0, got {options.seed}")
        self.options, self.progress, self.has_data = options, progress, options.dataset is not None
        self.model, self.inputs = load_with_inputs(options)
        self.loss = find_loss(options.loss)
        self.train, validation = load_data(options)
        self.metric = metric_of(validation, self.loss)
        self.epochs: dict[str, int] = {}

    def arguments(self) -> dict[str, Any]:
        import numpy as np

        from sparsekit.measure.budget import Budget
        from sparsekit.rng import torch_generator

        options = self.options
        return {
            "model": self.model,
            "example_inputs": self.inputs,
            "budget": Budget.of(options.budget),
            "batches": itertools.islice(self.train, options.calibration_batches) if self.has_data else None,
            "loss": self.loss if self.has_data else None,
            "reconstruct": _RECONSTRUCT[options.reconstruct or "both"],
            "metric": self.metric,
            "criterion": self._criterion(),
            "allocation": options.allocation,
            "exclude": options.exclude or (),
            "multiple_of": options.multiple_of,
            "schedule": self.schedule,
            "finetune": self._train if options.epochs else None,
            "prune_hidden_size": options.prune_hidden_size,
            "generator": torch_generator(np.random.default_rng(options.seed)),
            "progress": self.progress,
        }

    def _criterion(self) -> Any:
        from sparsekit.criteria.batches import DataDriven
        from sparsekit.criteria.by_name import as_criterion

        named = self.options.criterion
        if named is None or self.has_data:
            return named
        found = as_criterion(named)
        if isinstance(found, DataDriven) and found.batches is None:
            raise InvalidValueError(f"criterion {named!r} needs data; pass --dataset")
        return found

    def timed(self, pruned: Pruned) -> Pruned:
        """Time the small and the dense model in turns; the report gets the times."""
        pruned = replace(pruned, report=replace(pruned.report, measured={**pruned.report.measured, **self.epochs}))
        if not self.runtimes:
            return pruned
        if self.progress:
            _logger.info("timing both models; --time none leaves it out")
        return pruned.measure_times(self.model, self.inputs, runtimes=self.runtimes)

    def _train(self, small: nn.Module, step: int) -> None:
        import torch

        from sparsekit.finetuning import Distillation, finetune

        options = self.options
        done = finetune(
            small,
            self.train,
            self.loss,
            epochs=options.epochs,
            optimizer=lambda entries: torch.optim.SGD(entries, lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs),
            validation=self.metric,
            distillation=Distillation(self.model, share=options.distill) if options.distill else None,
            seed=options.seed,
            progress=self.progress,
            on_epoch=_log_epoch,
        )
        self.epochs[f"best_epoch{f'_step{step}' if self.schedule.steps > 1 else ''}"] = done.best_epoch
        small.eval()

    def write(self, pruned: Pruned) -> dict[str, str]:
        """Write all files of the run, if it has a folder; what → path."""
        from sparsekit.pruning.report import PAGE, prune_page
        from sparsekit.surgery.onnx import export_onnx

        folder = self.options.out
        if folder is None:
            return {}
        files = {"model": folder / _SMALL}
        pruned.model.eval()
        pruned.save(files["model"], page=None)
        if self.options.onnx:
            files["onnx"] = folder / "model.onnx"
            export_onnx(pruned.model, self.inputs.args, files["onnx"], self.inputs.kwargs)
        sizes = {path.name: path.stat().st_size for path in files.values()}
        factory = f'"{self.options.model}"' if ":" in self.options.model else ""
        files["page"] = folder / PAGE
        text = prune_page(pruned.report, file=_SMALL, sizes=sizes, factory=factory, command=command_line())
        files["page"].write_text(text, encoding="utf-8")
        found = {what: str(path) for what, path in (files | {"report": folder / _REPORT}).items()}
        text = json.dumps({**pruned.report.to_dict(), "files": found}, indent=1)
        (folder / _REPORT).write_text(text, encoding="utf-8")  # last: where it is, the run is finished
        return found


def _log_epoch(record: EpochRecord) -> None:
    score = "" if record.score is None else f", score {record.score:.4f}"
    _logger.info("epoch %d: loss %.4f%s", record.epoch, record.loss, score)


def _open_folder(options: PruneOptions) -> None:
    """Make the folder of the run, if there is one, before anything that takes long."""
    folder = options.out
    if folder is None:
        if options.onnx:
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
        "sparsekit prune nets.py:make --init dense.pt --dataset nets.py:load --budget latency_ms=4 --out fast --onnx",
        "sparsekit prune cnn --dataset mnist --data-dir data --criterion taylor --budget flops=25% --schedule cubic=3"
        " --epochs 2 --distill 0.5 --out small",
    ),
)
