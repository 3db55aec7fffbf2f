"""finetune(): train a pruned model with any optimizer, keep the best epoch, and resume exactly."""

import contextlib
import copy
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsekit._torch import set_mode
from sparsekit.criteria.batches import Batch, Batches, Loss, batch_count, loss_of, read_batches
from sparsekit.errors import InvalidValueError
from sparsekit.pruning.distillation import Distillation, Teaching
from sparsekit.pruning.resume import CheckpointFile
from sparsekit.registry import calling
from sparsekit.rng import torch_scope
from sparsekit.tracing.inputs import refuse_inference
from sparsekit.tracing.modes import evaluated, measured

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
        epoch: Number of the epoch, from 1.
        loss: Mean training loss over its batches, distillation included.
        score: Score on validation data; None without validation.
        learning_rate: Learning rate of the first parameter group, at the end of the epoch.
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


def score_of(found: Any, what: str) -> float:
    """Convert the result of a metric to float: a number, or a tensor or array with one element."""
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidValueError(f"{what} must return a number, larger is better, got {found!r}") from None


def finetune(
    model: nn.Module,
    batches: Batches,
    loss: Loss | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
    scheduler: MakeScheduler | None = None,
    scheduler_step: str = "epoch",
    validation: Metric | Batches | None = None,
    distillation: Distillation | None = None,
    accumulate: int = 1,
    average: float | None = None,
    clip_norm: float | None = None,
    amp: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = True,
    seed: int = 0,
    progress: bool | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
) -> FineTuned:
    """Train a model for some epochs or steps.

    Each submodule trains in its given mode, so that frozen batch norms stay frozen. If the model itself is in eval mode, all of
    it trains. If anything fails, or you press Ctrl-C, the model gets the weights of the best epoch so far; without validation,
    of the last complete epoch. Before the first epoch is complete, it gets its initial weights. A loss that is not finite is
    detected before its step.

    Args:
        model: The model to train in place, on the device of the batches.
        batches: A loader or a list, read once an epoch; batches as for data-driven criteria. A torch loader that shuffles draws
            from its own generator, or from torch's global one, which is seeded here.
        loss: `loss(outputs, target)`; None takes `outputs.loss`. If it is a module, its parameters are trained too.
        epochs: Number of all epochs, at least 1; a resumed call trains the remaining ones.
        steps: Number of all steps of the optimizer, in place of `epochs`. The batches are read again as often as needed, and
            the last epoch ends early.
        optimizer: A function that makes an optimizer from the trainable parameters, or an optimizer with only parameters of the
            model (and of the loss, if that is a module). None is SGD with Nesterov momentum 0.9, learning rate 0.01 and weight
            decay 5e-4.
        scheduler: A function that makes a learning-rate scheduler from the optimizer.
        scheduler_step: When it steps: after each "epoch", or after each step of the optimizer, "batch". A scheduler that
            follows a metric (`ReduceLROnPlateau`) gets minus the score, or the training loss without validation, and steps by
            epoch.
        validation: `metric(model)`, larger is better, or batches, on which minus the mean loss over the examples is the score.
            The weights of the best epoch are kept; without it, the last weights.
        distillation: The dense model as a teacher.
        accumulate: Batches for each step of the optimizer, at least 1, for more examples than fit into memory at once. The
            gradient is the mean over their examples.
        average: Decay of an exponential moving average of weights and buffers, in (0, 1), such as 0.999. The averaged weights
            are validated and kept.
        clip_norm: Largest norm of all gradients together, above 0; None does not clip.
        amp: Autocast dtype, torch.bfloat16 or torch.float16 (with gradient scaling). Weights keep their dtype.
        checkpoint: File that is written after each epoch; loading it runs no code.
        resume: Whether to continue from the checkpoint if the file exists; False overwrites it. The result is bit-identical to
            an uninterrupted call on the same machine, if batches depend only on torch's generators. A file of another training,
            from other weights or with other settings, is refused.
        seed: Seed of torch's global generator in the call, for dropout and loaders without a generator. Its state is restored
            afterwards.
        progress: Whether to draw a progress bar for each epoch on stderr; None draws if that is a terminal.
        on_epoch: Called after each epoch.

    Returns:
        The model, the history and the best epoch.

    Raises:
        InvalidValueError: a number out of range, no trainable parameter, an optimizer of another model, a loss that is not
            finite, a score that is not a number, or a checkpoint of another training.
        DataError: an empty loader, or a batch on another device than the model.
        UnsupportedModelError: the model was made inside `torch.inference_mode`, or `average` is used with a changing mask.
    """
    if (epochs is None) == (steps is None):
        raise InvalidValueError(f"pass epochs= or steps=, one of the two; got epochs={epochs!r} and steps={steps!r}")
    for name, count in (("epochs", epochs), ("steps", steps), ("accumulate", accumulate)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise InvalidValueError(f"{name} must be a whole number of at least 1, got {count!r}")
    if scheduler_step not in ("epoch", "batch"):
        raise InvalidValueError(f"scheduler_step must be 'epoch' or 'batch', got {scheduler_step!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise InvalidValueError(f"clip_norm must be above 0, got {clip_norm}; None does not clip")
    if average is not None and not 0 < average < 1:
        raise InvalidValueError(f"average must be in (0, 1), got {average}; it is the decay of a moving average, such as 0.999")
    if amp not in (None, torch.bfloat16, torch.float16):
        raise InvalidValueError(f"amp must be torch.bfloat16, torch.float16 or None, got {amp}")
    refuse_inference(model)
    teaching = None if distillation is None else _teaching(distillation, model, batches, loss)
    helpers = [module for module in (loss, teaching) if isinstance(module, nn.Module)]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidValueError(f"no parameter of {type(model).__name__} requires gradients; call model.requires_grad_(True)")
    parameters = [entry for module in (model, *helpers) for entry in module.parameters() if entry.requires_grad]
    optimizer = _optimizer(optimizer, model, parameters, helpers)
    kind = parameters[0].device.type
    schedule = _schedule(scheduler, optimizer)
    follows_metric = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
    by_batch = scheduler_step == "batch" and not follows_metric
    scaler = torch.amp.GradScaler(kind, enabled=amp is torch.float16)
    averaged = None
    if average is not None:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(average), use_buffers=True)
    result = model if averaged is None else averaged.module
    every: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": schedule, "scaler": scaler}
    every |= {"average": averaged, **{type(module).__name__: module for module in helpers if list(module.parameters())}}
    parts = {name: part for name, part in every.items() if part is not None}
    history: list[EpochRecord] = []
    best: _Best = None, None, 0
    done = 0  # steps of the optimizer
    frozen = [module for module in model.modules() if model.training and not module.training]

    def compute(module: nn.Module, batch: Batch, teaching: Teaching | None = None) -> Tensor:
        with torch.autocast(kind, dtype=amp) if amp is not None else contextlib.nullcontext():
            taught = None if teaching is None else teaching.teach(*batch.inputs(with_target=loss is None))
            outputs = batch.run(module, with_target=loss is None)
            value = loss_of(outputs, batch.target, loss)
            return value if teaching is None or taught is None else teaching.combine(value, outputs, taught, batch.target)

    def train(epoch: int) -> float:
        """Train one epoch, or what is left of the steps, and return the mean loss over its batches."""
        nonlocal done
        set_mode(model, True)
        for module in frozen:
            module.training = False
        losses: list[float] = []
        reader = read_batches(batches, model, f"Epoch {epoch}{f'/{epochs}' if epochs else ''}", progress=progress)
        while (steps is None or done < steps) and (group := list(itertools.islice(reader, accumulate))):
            optimizer.zero_grad(set_to_none=True)
            whole = sum(each.examples for each in group)
            for batch in group:
                value = compute(model, batch, teaching)
                losses.append(float(value.detach()))
                if not math.isfinite(losses[-1]) and not scaler.is_enabled():  # a scaler skips such a step
                    raise InvalidValueError(
                        f"the loss is {losses[-1]} in batch {len(losses) - 1} of epoch {epoch}; lower the learning rate, clip"
                        " gradients with clip_norm=1.0, or look for NaN in the data"
                    )
                scaler.scale(value * (batch.examples / whole) if len(group) > 1 else value).backward()
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, clip_norm)
            scaler.step(optimizer)
            scaler.update()
            done += 1
            if averaged is not None:
                averaged.update_parameters(model)
            if schedule is not None and by_batch:
                schedule.step()
        return sum(losses) / len(losses)

    def validate() -> float | None:
        if validation is None:
            return None
        with measured(result):  # random numbers drawn in validation must not affect training
            if callable(validation):
                with calling("validation"):
                    found: Any = validation(result)
            else:
                reader = read_batches(validation, result, "Validation")
                scored = [(float(compute(result, each)), each.examples) for each in reader]
                found = -sum(value * count for value, count in scored) / sum(count for _, count in scored)
        score = score_of(found, "validation")
        if math.isnan(score):
            raise InvalidValueError("the score on validation is NaN; look at the metric and at the learning rate")
        return score

    told: dict[str, object] = {"seed": seed, "steps": steps, "accumulate": accumulate, "average": average}
    told |= {"clip_norm": clip_norm, "amp": amp, "scheduler_step": scheduler_step}
    told["distillation"] = None if distillation is None else distillation.settings
    file = None if checkpoint is None else CheckpointFile(Path(checkpoint), parts, batches, told)
    if schedule is not None and (length := batch_count(batches)) is not None:
        an_epoch = math.ceil(length / accumulate)
        every_step = steps or an_epoch * (epochs or 0)
        _check_schedule(schedule, every_step if by_batch else math.ceil(every_step / an_epoch))
    kept = copy.deepcopy(model.state_dict())
    with (
        evaluated(model, *([] if teaching is None else [teaching.teacher]), leaves=True),
        torch_scope(np.random.default_rng(seed)),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        contextlib.nullcontext() if teaching is None else teaching.watching(),
    ):
        try:
            if file is not None and resume and file.path.exists():
                found = file.load()
                history, best, done = [EpochRecord(**each) for each in found["history"]], found["best"], found["steps"]
                kept = best[0] or copy.deepcopy(result.state_dict())
            while len(history) < epochs if epochs else done < (steps or 0):
                epoch, begun = len(history) + 1, time.perf_counter()
                if getattr(model, "unmet", ""):  # scores of a wider model are not comparable
                    best = None, None, 0
                mean, score = train(epoch), validate()
                if schedule is not None and follows_metric:
                    schedule.step(mean if score is None else -score)
                elif schedule is not None and not by_batch:
                    schedule.step()
                rate = float(optimizer.param_groups[0]["lr"])
                history.append(EpochRecord(epoch, mean, score, rate, time.perf_counter() - begun))
                if score is None or best[1] is None or score > best[1]:
                    kept = copy.deepcopy(result.state_dict())
                    best = best if score is None else (kept, score, epoch)
                if file is not None:
                    file.save({"history": [asdict(record) for record in history], "best": best, "steps": done})
                if on_epoch is not None:
                    on_epoch(history[-1])
        except BaseException:
            model.load_state_dict(kept)
            raise
        if best[0] is not None or averaged is not None:
            model.load_state_dict(kept)
    if unmet := getattr(model, "unmet", ""):
        warnings.warn(unmet, stacklevel=2)
    return FineTuned(model, tuple(history), best[2] or len(history))


def _teaching(distillation: Distillation, model: nn.Module, batches: Batches, loss: Loss | None) -> Teaching:
    teaching = Teaching(distillation, model)
    if distillation.pairs:
        with measured(model, distillation.teacher):
            teaching.begin(*next(read_batches(batches, model, "Distillation")).inputs(with_target=loss is None))
    return teaching


def _optimizer(
    given: MakeOptimizer | torch.optim.Optimizer | None,
    model: nn.Module,
    parameters: list[nn.Parameter],
    helpers: list[nn.Module],
) -> torch.optim.Optimizer:
    if given is None:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    made = given if isinstance(given, torch.optim.Optimizer) or not callable(given) else given(parameters)
    advice = "pass a function that makes one, such as optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)"
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidValueError(f"optimizer must be a torch.optim.Optimizer or make one, got {made!r}; {advice}")
    own = {id(entry) for module in (model, *helpers) for entry in module.parameters()}
    its = [entry for group in made.param_groups for entry in group["params"]]
    foreign = sum(id(entry) not in own for entry in its)
    if foreign:
        raise InvalidValueError(
            f"{foreign} of the {len(its)} parameters of the optimizer are not those of this {type(model).__name__}, such as"
            f" those of the dense model; {advice}"
        )
    held = {id(entry) for entry in its}
    for module in helpers:
        left = sum(entry.requires_grad and id(entry) not in held for entry in module.parameters())
        if left:
            warnings.warn(
                f"{left} parameters of {type(module).__name__} are in no optimizer, so they are not trained; {advice}, which"
                " gets them too",
                stacklevel=3,
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


def _check_schedule(schedule: Any, planned: int) -> None:
    """Warn if a scheduler is made for a number of steps that differs from the planned one by more than 10 %."""
    asked = getattr(schedule, "total_steps", None) or getattr(schedule, "T_max", None)
    if asked and abs(planned - asked) > 0.1 * asked:
        warnings.warn(
            f"the scheduler {type(schedule).__name__} is made for {asked} steps and will make {planned}, so the learning rate"
            f" does not end where it should; make it for {planned} steps, or change scheduler_step= ('epoch' or 'batch')",
            stacklevel=3,
        )
