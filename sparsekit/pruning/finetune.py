"""finetune(): train a pruned model with any optimizer, keep the best epoch, and resume exactly."""

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit._torch import set_mode
from sparsekit.criteria.batches import Batch, Loss, loss_of, read_batches, run_model, split_batch
from sparsekit.errors import InvalidValueError
from sparsekit.measure.timing import evaluated, measured
from sparsekit.pruning.distillation import Distillation
from sparsekit.registry import calling
from sparsekit.rng import torch_scope
from sparsekit.tracing.inputs import refuse_inference

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
Metric = Callable[[nn.Module], float]
"""Scores a model in eval mode, without gradients; larger is better."""
_Best: TypeAlias = tuple[dict[str, Tensor] | None, float | None, int]
"""State, score and number of the best epoch so far."""


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of fine-tuning.

    Args:
        epoch: From 1.
        loss: Mean training loss over its batches, distillation included.
        score: On validation; None without validation.
        learning_rate: Rate of the first group of parameters, at the end of the epoch.
        seconds: Wall-clock time, validation included.
    """

    epoch: int
    loss: float
    score: float | None
    learning_rate: float
    seconds: float


@dataclass(frozen=True, eq=False)
class FineTuned:
    """A fine-tuned model.

    Args:
        model: The given model, with its best weights, or the last ones without validation.
        history: One record for each epoch, including those before a resumption.
        best_epoch: The epoch whose weights the model has.
    """

    model: nn.Module
    history: tuple[EpochRecord, ...]
    best_epoch: int


def finetune(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    *,
    epochs: int,
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
    scheduler: MakeScheduler | None = None,
    scheduler_step: str = "epoch",
    validation: Metric | Iterable[Batch] | None = None,
    distillation: Distillation | None = None,
    clip_norm: float | None = None,
    amp: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = True,
    seed: int = 0,
    progress: bool | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
) -> FineTuned:
    """Train a model for some epochs.

    Each submodule trains in its given mode, so that frozen batch norms stay frozen. If the model itself is in eval mode, all of
    it trains. If anything fails, or you press Ctrl-C, the model gets the weights of the best epoch so far; without validation,
    of the last complete epoch, and before that its own. A loss that is not finite is detected before its step.

    Args:
        model: Changed in place; on the device of the batches.
        batches: A loader or a list, read once an epoch; batches as for data-driven criteria. A torch loader that shuffles draws
            from its own generator, or from torch's global one, which is seeded here.
        loss: `loss(outputs, target)`; None takes `outputs.loss`.
        epochs: Number of all epochs, at least 1; a resumed call trains the remaining ones.
        optimizer: Makes one from the trainable parameters, or is one, with parameters of the model (and of the loss, if that is
            a module) alone; None is SGD with Nesterov momentum 0.9, rate 0.01 and weight decay 5e-4.
        scheduler: Makes a scheduler of learning rates from the optimizer.
        scheduler_step: When it steps: after each "epoch", or after each "batch". A scheduler that follows a metric
            (`ReduceLROnPlateau`) gets minus the score, or the training loss without validation, and steps by epoch.
        validation: `metric(model)`, larger is better, or batches, on which minus the mean loss is the score. The weights of the
            best epoch are kept; without it, the last weights.
        distillation: The dense model as a teacher.
        clip_norm: Largest norm of all gradients together, above 0; None does not clip.
        amp: Computes in this type, torch.bfloat16 or torch.float16 (whose gradients are scaled), with weights as they are.
        checkpoint: File that is written after each epoch; no code can hide in it.
        resume: Whether to continue from the checkpoint if the file exists. The result is bit-identical to an uninterrupted call
            on the same machine, if batches depend only on torch's generators.
        seed: Seed of torch's global generator in the call, for dropout and loaders without one; it is put back afterwards.
        progress: Whether to draw a progress bar for each epoch on stderr; None draws if that is a terminal.
        on_epoch: Called after each epoch.

    Returns:
        The model, the history and the best epoch.

    Raises:
        InvalidValueError: a number out of range, no trainable parameter, an optimizer of another model, a loss that is not
            finite, a score that is not a number, or a checkpoint of another model.
        DataError: an empty loader, or a batch on another device than the model.
        UnsupportedModelError: the model was made inside `torch.inference_mode`.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InvalidValueError(f"epochs must be a whole number of at least 1, got {epochs!r}")
    if scheduler_step not in ("epoch", "batch"):
        raise InvalidValueError(f"scheduler_step must be 'epoch' or 'batch', got {scheduler_step!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise InvalidValueError(f"clip_norm must be above 0, got {clip_norm}; None does not clip")
    if amp not in (None, torch.bfloat16, torch.float16):
        raise InvalidValueError(f"amp must be torch.bfloat16, torch.float16 or None, got {amp}")
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise InvalidValueError(f"checkpoint must be a file in a folder that exists, got {str(path)!r}")
    refuse_inference(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InvalidValueError(f"no parameter of {type(model).__name__} requires gradients; call model.requires_grad_(True)")
    optimizer = _optimizer(optimizer, model, parameters, loss)
    kind = parameters[0].device.type
    schedule = _schedule(scheduler, optimizer)
    follows_metric = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
    by_batch = scheduler_step == "batch" and not follows_metric
    scaler = torch.amp.GradScaler(kind, enabled=amp is torch.float16)
    every = {"model": model, "optimizer": optimizer, "scheduler": schedule, "scaler": scaler}
    parts = {name: part for name, part in every.items() if part is not None}
    history: list[EpochRecord] = []
    best: _Best = None, None, 0
    frozen = [module for module in model.modules() if model.training and not module.training]

    def compute(batch: Batch, teacher: Distillation | None = None) -> Tensor:
        args, kwargs, _ = split_batch(batch, keep_target=loss is None)
        with torch.autocast(kind, dtype=amp) if amp is not None else contextlib.nullcontext():
            taught = None if teacher is None else teacher.teach(args, kwargs)
            outputs, target = run_model(model, batch, keep_target=loss is None)
            value = loss_of(outputs, target, loss)
            return value if teacher is None or taught is None else teacher.combine(value, outputs, taught)

    def train(epoch: int) -> float:
        """Train one epoch, and return the mean loss over its batches."""
        set_mode(model, True)
        for module in frozen:
            module.training = False
        losses: list[float] = []
        for batch in read_batches(batches, model, f"Epoch {epoch}/{epochs}", progress=progress):
            value = compute(batch, distillation)
            losses.append(float(value.detach()))
            if not math.isfinite(losses[-1]) and not scaler.is_enabled():  # a scaler leaves such a step out
                raise InvalidValueError(
                    f"the loss is {losses[-1]} in batch {len(losses) - 1} of epoch {epoch}; lower the learning rate, clip"
                    " gradients with clip_norm=1.0, or look for NaN in the data"
                )
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(value).backward()
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            if schedule is not None and by_batch:
                schedule.step()
        return sum(losses) / len(losses)

    def validate() -> float | None:
        if validation is None:
            return None
        with measured(model):  # what validation draws must not move the draws of training
            if callable(validation):
                with calling("validation"):
                    found: Any = validation(model)
            else:
                losses = [float(compute(batch)) for batch in read_batches(validation, model, "Validation")]
                found = -sum(losses) / len(losses)
        try:
            score = float(found)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidValueError(f"validation must return a number, larger is better, got {found!r}") from None
        if math.isnan(score):
            raise InvalidValueError("the score on validation is NaN; look at the metric and at the learning rate")
        return score

    teachers = [] if distillation is None else [distillation.teacher]
    kept = copy.deepcopy(model.state_dict())
    with (
        evaluated(model, *teachers, leaves=True),
        torch_scope(np.random.default_rng(seed)),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
    ):
        try:
            if path is not None and resume and path.exists():
                history, best = _load(path, parts, batches)
                kept = best[0] or copy.deepcopy(model.state_dict())
            for epoch in range(len(history) + 1, epochs + 1):
                begun = time.perf_counter()
                if getattr(model, "narrows", False):  # epochs of a wider model do not compete
                    best = None, None, 0
                mean, score = train(epoch), validate()
                if schedule is not None and follows_metric:
                    schedule.step(mean if score is None else -score)
                elif schedule is not None and not by_batch:
                    schedule.step()
                rate = float(optimizer.param_groups[0]["lr"])
                history.append(EpochRecord(epoch, mean, score, rate, time.perf_counter() - begun))
                if score is None or best[1] is None or score > best[1]:
                    kept = copy.deepcopy(model.state_dict())
                    best = best if score is None else (kept, score, epoch)
                if path is not None:
                    _save(path, parts, history, best, batches)
                if on_epoch is not None:
                    on_epoch(history[-1])
        except BaseException:
            model.load_state_dict(kept)
            raise
        if best[0] is not None:
            model.load_state_dict(best[0])
    return FineTuned(model, tuple(history), best[2] or len(history))


def _optimizer(
    given: MakeOptimizer | torch.optim.Optimizer | None, model: nn.Module, parameters: list[nn.Parameter], loss: Loss | None
) -> torch.optim.Optimizer:
    if given is None:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    made = given if isinstance(given, torch.optim.Optimizer) or not callable(given) else given(parameters)
    advice = "pass a function that makes one, such as optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)"
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidValueError(f"optimizer must be a torch.optim.Optimizer or make one, got {made!r}; {advice}")
    own = {id(entry) for module in (model, loss) if isinstance(module, nn.Module) for entry in module.parameters()}
    its = [entry for group in made.param_groups for entry in group["params"]]
    foreign = sum(id(entry) not in own for entry in its)
    if foreign:
        raise InvalidValueError(
            f"{foreign} of the {len(its)} parameters of the optimizer are not those of this {type(model).__name__}, such as"
            f" those of the dense model; {advice}"
        )
    return made


def _schedule(make: MakeScheduler | None, optimizer: torch.optim.Optimizer) -> Any:
    if make is None:
        return None
    made = make(optimizer) if callable(make) else None
    if not hasattr(made, "step"):
        raise InvalidValueError(
            f"scheduler must be a function that makes one from the optimizer, got {make!r}; pass"
            " scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
        )
    return made


def _save(path: Path, parts: Mapping[str, Any], history: list[EpochRecord], best: _Best, batches: Any) -> None:
    found = {
        "state": {name: part.state_dict() for name, part in parts.items()},
        "history": [asdict(record) for record in history],
        "best": best,
        "rng": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "loader": [generator.get_state() for generator in _loader_generators(batches)],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(found, temporary)
        if not path.exists():  # what could not be read again is refused after the first epoch, not after the last
            _read(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """Read tensors, bit for bit and on the CPU, numbers and strings; no code can hide in the file."""
    with path.open("rb") as file:  # torch reads a path by its ending
        try:
            return dict(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # damaged files fail in many ways
            raise InvalidValueError(
                f"{path} is damaged, or holds more than the state of a training made of numbers, strings and tensors:"
                f" {type(error).__name__}"
            ) from error


def _load(path: Path, parts: Mapping[str, Any], batches: Any) -> tuple[list[EpochRecord], _Best]:
    found = _read(path)
    if parts.keys() != found["state"].keys():
        raise InvalidValueError(
            f"the checkpoint {path} is of a training with {', '.join(found['state'])}, this one has {', '.join(parts)}; pass"
            " what it had, another file, or resume=False"
        )
    own = {name: entry.shape for name, entry in parts["model"].state_dict().items()}
    theirs = {name: entry.shape for name, entry in found["state"]["model"].items()}
    try:
        for name, part in parts.items():
            part.load_state_dict(found["state"][name])
    except (RuntimeError, ValueError, KeyError) as error:
        differing = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        raise InvalidValueError(
            f"the checkpoint {path} is of another model: {', '.join(differing[:5]) or error} differ; pass another file, or"
            " resume=False"
        ) from error
    torch.default_generator.set_state(found["rng"])
    if found["cuda"]:
        torch.cuda.set_rng_state_all(found["cuda"])
    for generator, state in zip(_loader_generators(batches), found["loader"]):
        generator.set_state(state)
    return [EpochRecord(**record) for record in found["history"]], found["best"]


def _loader_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader, its sampler and its batch sampler draw from, each once; none for a list."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
