"""`fit`, the only loop over batches, and what it needs: examples, batches, optimizer steps, scores."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.rng import torch_scope
from sparsekit_fl.client.messages import Scores
from sparsekit_fl.config import Amp, TrainingConfig, optimizer_class
from sparsekit_fl.packing import is_finite
from sparsekit_fl.problem.data import TensorData, arranged, read
from sparsekit_fl.problem.metrics import loss_weight
from sparsekit_fl.problem.problem import Problem

_EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Batch:
    """One batch: the model's positional inputs, the targets, and the number of examples."""

    inputs: tuple[Tensor, ...]
    targets: Tensor
    size: int


Step = Callable[[Batch], tuple[Any, Tensor]]
"""Trains on one batch. Returns the outputs, for metrics, and the scalar loss."""


class Examples:
    """One split of a client's data. TensorData are transformed and moved once; other data sets are read batch by batch.

    `name` and `split` are used in errors, and `rng` returns the generator that seeds random transforms of a data set. Inputs
    with NaN or infinity raise a DataError: at once, or when the batch is read.
    """

    def __init__(
        self,
        problem: Problem,
        data: Any,
        *,
        device: str,
        name: str = "the data",
        split: str = "the split",
        rng: Callable[[], np.random.Generator] | None = None,
    ) -> None:
        self._name, self._split = name, split
        self._data, self._device = data, device
        self._rng = rng or partial(np.random.default_rng, 0)
        self._arrange = arranged if problem.channels_last else lambda tensor: tensor
        self._lazy = not isinstance(data, TensorData)
        if not self._lazy:
            inputs, targets = data.batch()
            self._inputs, self._targets = tuple(self._arrange(one.to(device)) for one in inputs), targets.to(device)
            self._check(self._inputs, range(len(self)))

    def __len__(self) -> int:
        return len(self._data) if self._lazy else len(self._targets)

    def _check(self, inputs: Sequence[Tensor], positions: Sequence[int]) -> None:
        floats = [item for item in inputs if item.is_floating_point() and not is_finite(item)]
        # Minus infinity is allowed, since it hides positions in float attention masks.
        bad = [int(row) for item in floats for row in (~(item < math.inf)).reshape(len(item), -1).any(dim=1).nonzero()]
        if bad:
            raise DataError(
                f"inputs of {self._name} hold NaN or infinity, in example {positions[min(bad)]} of {self._split} first;"
                " fill them in, or leave these examples out"
            )

    def batches(self, order: Tensor | None, bounds: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Return the batches `order[start:stop]` for each of `bounds`; `order`: int64 positions, None for the stored order."""
        return self._read(order, bounds) if self._lazy else self._slices(order, bounds)

    def _slices(self, order: Tensor | None, bounds: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        inputs, targets = self._inputs, self._targets
        if order is not None:
            # Gather once per epoch; batches are then views.
            order = order.to(targets.device)
            inputs, targets = (
                tuple(self._arrange(item.index_select(0, order)) for item in inputs),
                targets.index_select(0, order),
            )
        for start, stop in bounds:
            yield Batch(tuple(item[start:stop] for item in inputs), targets[start:stop], stop - start)

    def _read(self, order: Tensor | None, bounds: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        positions = list(range(len(self._data))) if order is None else order.tolist()
        for start, stop in bounds:
            with torch_scope(self._rng()):  # a data set may draw random numbers
                inputs, targets = read(self._data, positions[start:stop])
            moved, targets = tuple(self._arrange(item.to(self._device)) for item in inputs), targets.to(self._device)
            self._check(moved, positions[start:stop])
            yield Batch(moved, targets, stop - start)


class Batches:
    """Epochs of shuffled batches. A last batch of one example is merged into the batch before it: batch norm needs two.

    The permutations of all epochs are drawn at the start, so that they do not depend on other draws during training.
    """

    def __init__(self, examples: Examples, *, epochs: int, batch_size: int, rng: np.random.Generator) -> None:
        self._examples = examples
        self._orders = [torch.from_numpy(rng.permutation(len(examples))) for _ in range(epochs)]
        starts = list(range(0, len(examples), batch_size))
        if batch_size > 1 and len(starts) > 1 and len(examples) - starts[-1] == 1:
            starts.pop()
        self.bounds = list(zip(starts, [*starts[1:], len(examples)], strict=True))
        self.padded_examples = math.ceil(len(examples) / batch_size) * batch_size
        """Examples of an epoch with its last batch counted as full, as the paper counts FLOPs."""

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.bounds)

    @property
    def steps(self) -> int:
        return len(self.bounds) * len(self._orders)

    def __iter__(self) -> Iterator[Iterator[Batch]]:
        for order in self._orders:
            yield self._examples.batches(order, self.bounds)


Adjust = Callable[[dict[Tensor, Tensor]], dict[Tensor, Tensor]]
"""Changes the gradients of a step: takes and returns leaf → gradient, for the leaves that have one."""


class LocalStep:
    """An optimizer step: computes gradients, adjusts and clips them, and updates the parameters.

    `clip` limits the norm of the whole gradient, before weight decay. Without `optimizer`, the update is plain SGD with
    learning rate `lr`, as one fused operation with the same results as `torch.optim.SGD`.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        clip: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = optimizer
        self._lr, self._clip = lr, clip

    def __call__(self, loss: Tensor, adjusts: Iterable[Adjust] = ()) -> None:
        """Take one step to lower `loss`; `adjusts` change the gradients, one after the other, before clipping."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        gradients = {leaf: one for leaf, one in zip(self.parameters, found, strict=True) if one is not None}
        with torch.no_grad():
            for adjust in adjusts:
                gradients = adjust(gradients)
            leaves, values = list(gradients), list(gradients.values())
            if self._clip is not None:
                # All operations are out of place, since gradients from autograd may be expanded or shared tensors.
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
                values = list(torch._foreach_mul(values, (self._clip / (norm + 1e-6)).clamp(max=1.0)))
            if self.optimizer is None:
                torch._foreach_add_(leaves, values, alpha=-self._lr)
                return
            for leaf, value in zip(leaves, values, strict=True):
                leaf.grad = value
            self.optimizer.step()
            for leaf in leaves:
                leaf.grad = None


def check_training(training: TrainingConfig) -> None:
    """Raise UnknownNameError if torch has no such optimizer, or InvalidValueError if it refuses an argument."""
    make_step(training, [torch.nn.Parameter(torch.zeros(2, 2))])


def make_step(training: TrainingConfig, leaves: Iterable[Tensor]) -> LocalStep:
    """Return the step for some leaves with the optimizer of the options; raise InvalidValueError if it refuses an option."""
    name, given = training.optimizer, {"momentum": training.momentum, "weight_decay": training.weight_decay}
    leaves, optimizer = [leaf for leaf in leaves if leaf.requires_grad], None
    if leaves and (name != "sgd" or any(given.values())):
        kind: Any = optimizer_class(name)
        known = inspect.signature(kind).parameters
        for option, value in given.items():
            if value and option not in known:
                raise InvalidValueError(f"optimizer {name!r} takes no {option}, got {value}; leave it out")
        try:
            options = {option: value for option, value in given.items() if option in known}
            optimizer = kind(leaves, lr=training.lr, **options)
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"optimizer {name!r} refuses its arguments: {error}") from error
    return LocalStep(leaves, lr=training.lr, clip=training.clip, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """Losses and counts of a fit. Logs of several fits add up.

    Args:
        loss: Mean loss per example, one value per epoch.
        accuracy: Mean training accuracy, one value per epoch; empty if the problem has no metric of that name.
        examples: Examples processed, over all epochs.
        padded_examples: The same with every last batch counted as full.
        passes: Examples that passed with gradients through the model, or through any module of its architecture.
        forward_only: Examples that passed through such modules without gradients.
    """

    loss: tuple[float, ...] = ()
    accuracy: tuple[float, ...] = ()
    examples: int = 0
    padded_examples: int = 0
    passes: int = 0
    forward_only: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self) -> dict[str, float]:
        """Return `loss` and `accuracy`, each the mean over the epochs."""
        found = {"loss": self.loss, "accuracy": self.accuracy}
        return {name: sum(values) / len(values) for name, values in found.items() if values}


class _Passes:
    """Counts the examples that pass through a module, or any module of the same architecture, until `close` is called."""

    def __init__(self, module: nn.Module) -> None:
        self.counts = [0, 0]  # without gradients, with gradients
        self._module, self._known = module, {module: True}
        self.close = register_module_forward_hook(self._count).remove

    def _count(self, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:  # noqa: ARG002 - torch's signature
        if type(module) is type(self._module) and inputs and isinstance(inputs[0], Tensor):
            if module not in self._known:
                self._known[module] = _parts(module) == _parts(self._module)
            self.counts[torch.is_grad_enabled()] += len(inputs[0]) * self._known[module]


def _parts(module: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(part)) for name, part in module.named_modules()]


def fit(
    module: nn.Module,
    batches: Batches,
    step: Step,
    *,
    metrics: Mapping[str, Any],
    rng: np.random.Generator,
    amp: Amp = "off",
    device: str = "cpu",
) -> TrainingLog:
    """Run `step` over every batch, in training mode; return losses, accuracies and counts. No other code loops over batches.

    Accuracy is recorded if `metrics` has the name "accuracy". `rng` seeds torch's global generator, for example for dropout.
    """
    accuracy = metrics.get("accuracy")
    losses, accuracies = list[float](), list[float]()
    # No cache of cast weights, as a step may change the weights inside the context.
    smaller = None if amp == "off" else torch.autocast(torch.device(device).type, getattr(torch, amp), cache_enabled=False)
    module.train()
    with torch_scope(rng), closing(_Passes(module)) as seen:
        for epoch in batches:
            # Sum tensors: reading a number from a device at every step would synchronize with it.
            loss_sum: Any = 0.0
            score_sum: Any = 0.0
            weight_sum: Any = 0.0
            for batch in epoch:
                with smaller or nullcontext():
                    outputs, loss = step(batch)
                loss_sum += loss.detach() * batch.size
                if accuracy is not None:
                    with torch.no_grad():
                        score, weight = accuracy(outputs, batch.targets)
                    score_sum += score
                    weight_sum += weight
            losses.append(float(loss_sum) / batches.size)
            if accuracy is not None:
                accuracies.append(float(score_sum) / max(float(weight_sum), 1e-12))
    return TrainingLog(
        loss=tuple(losses),
        accuracy=tuple(accuracies),
        examples=batches.size * len(losses),
        padded_examples=batches.padded_examples * len(losses),
        passes=seen.counts[True],
        forward_only=seen.counts[False],
    )


def evaluate(module: nn.Module, problem: Problem, examples: Examples, *, positions: Tensor | None = None) -> Scores:
    """Score a module in evaluation mode on the examples at int64 `positions`, None for all; empty without examples."""
    if len(examples) == 0:
        return {}
    sums: dict[str, tuple[float, float]] = {}
    count = len(examples) if positions is None else len(positions)
    bounds = [(start, min(start + _EVALUATION_BATCH, count)) for start in range(0, count, _EVALUATION_BATCH)]
    module.eval()
    with torch.no_grad():
        for batch in examples.batches(positions, bounds):
            outputs = module(*batch.inputs)
            found: dict[str, tuple[Any, Any]] = {name: of(outputs, batch.targets) for name, of in problem.metrics.items()}
            counted = loss_weight(problem.loss, batch.targets)
            found["loss"] = (problem.loss(outputs, batch.targets) * counted, counted)
            for name, (score, weight) in found.items():
                before = sums.get(name, (0.0, 0.0))
                # A metric of weight 0 has no value in this batch, and its sum is ignored.
                sums[name] = (before[0] + float(score), before[1] + float(weight)) if float(weight) else before
    return sums
