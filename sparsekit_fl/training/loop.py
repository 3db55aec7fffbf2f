"""fit(): the only loop over batches, and what it needs: examples in memory, batches by index, an SGD step, scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit._torch import foreach_add, foreach_add_, foreach_mul, foreach_mul_, foreach_norm
from sparsekit.rng import torch_scope
from sparsekit_fl.problem.problem import Problem, arranged
from sparsekit_fl.wire.messages import Scores

__all__ = ["Batch", "Batches", "Examples", "SgdStep", "Step", "TrainingLog", "evaluate", "fit"]

_EVALUATION_BATCH = 256


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Batch:
    """One batch: the model's positional inputs, the targets, and the number of examples."""

    inputs: tuple[Tensor, ...]
    targets: Tensor
    size: int


Step = Callable[[Batch], tuple[Any, Tensor]]
"""Learns from one batch; returns the outputs that are scored and the loss, a scalar."""


class Examples:
    """One split of a client's data, read, normalised and moved once; batches are then slices.

    Args:
        problem: Says how examples are read.
        data: The split.
        device: Where the tensors are.
    """

    def __init__(self, problem: Problem, data: Any, *, device: str) -> None:
        whole = problem.materialise(data, device)
        self._arrange = arranged if problem.channels_last else _as_it_is
        self._inputs, self._targets = tuple(map(self._arrange, whole.inputs)), whole.targets

    def __len__(self) -> int:
        return len(self._targets)

    def batches(self, order: Tensor | None, bounds: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Return the examples in `order` (None: as stored), cut at `bounds` [start, stop)."""
        inputs, targets = self._inputs, self._targets
        if order is not None:
            # One gather per epoch, then batches are views.
            order = order.to(targets.device)
            inputs, targets = (
                tuple(self._arrange(item.index_select(0, order)) for item in inputs),
                targets.index_select(0, order),
            )
        for start, stop in bounds:
            yield Batch(tuple(item[start:stop] for item in inputs), targets[start:stop], stop - start)


class Batches:
    """Epochs of shuffled batches. A final batch of one example joins the one before it, as batch norm needs two.

    Args:
        examples: Where the batches come from.
        epochs: Number of passes.
        batch_size: Examples per batch.
        rng: Draws one permutation per epoch, all of them now, so that what is drawn later changes nothing.
    """

    def __init__(self, examples: Examples, *, epochs: int, batch_size: int, rng: np.random.Generator) -> None:
        self._examples = examples
        self._orders = [torch.from_numpy(rng.permutation(len(examples))) for _ in range(epochs)]
        starts = list(range(0, len(examples), batch_size))
        if len(starts) > 1 and len(examples) - starts[-1] == 1:
            starts.pop()
        self.bounds = list(zip(starts, [*starts[1:], len(examples)], strict=True))
        self.padded_examples = math.ceil(len(examples) / batch_size) * batch_size
        """Examples of an epoch with its last batch counted as full, as the paper counts FLOPs."""

    @property
    def epochs(self) -> int:
        """Number of passes."""
        return len(self._orders)

    def __iter__(self) -> Iterator[Iterator[Batch]]:
        for order in self._orders:
            yield self._examples.batches(order, self.bounds)


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """What happened while fitting. Logs of several fits add up.

    Args:
        loss: Mean loss per example, one value per epoch.
        accuracy: Mean training accuracy, one value per epoch; empty where the problem has no metric of that name.
        examples: Examples processed, over all epochs.
        padded_examples: The same with every last batch counted as full.
        batches: Steps taken.
    """

    loss: tuple[float, ...] = ()
    accuracy: tuple[float, ...] = ()
    examples: int = 0
    padded_examples: int = 0
    batches: int = 0

    def __add__(self, other: TrainingLog) -> TrainingLog:
        return TrainingLog(
            loss=self.loss + other.loss,
            accuracy=self.accuracy + other.accuracy,
            examples=self.examples + other.examples,
            padded_examples=self.padded_examples + other.padded_examples,
            batches=self.batches + other.batches,
        )

    def metrics(self) -> dict[str, float]:
        """`loss` and `accuracy`, each the mean over the epochs."""
        found = {"loss": self.loss, "accuracy": self.accuracy}
        return {name: sum(values) / len(values) for name, values in found.items() if values}


class SgdStep:
    """Stochastic gradient descent on a few fused operations; the same numbers as `torch.optim.SGD`.

    Args:
        parameters: Leaves; those that need no gradient are left alone.
        lr: Learning rate.
        momentum: In [0, 1).
        weight_decay: Factor of the weights that is added to the gradient.
        clip: Largest norm of the whole gradient, before weight decay; None does not clip.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.lr = lr
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._clip = clip
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """Leaf → name → tensor, as in a torch optimiser, so that a narrow model can remask it."""

    def __call__(self, loss: Tensor, *, adjust: Callable[[list[Tensor], list[int]], list[Tensor]] | None = None) -> None:
        """Take one step down `loss`.

        Args:
            loss: A scalar with a graph.
            adjust: Changes the gradients before clipping: (gradients, positions in `parameters`) → gradients.
        """
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        places = [place for place, gradient in enumerate(found) if gradient is not None]
        gradients = [gradient for gradient in found if gradient is not None]
        with torch.no_grad():
            if adjust is not None:
                gradients = adjust(gradients, places)
            self._apply(gradients, places)

    def _apply(self, gradients: list[Tensor], places: list[int]) -> None:
        # All out of place, since autograd may hand out expanded or shared tensors.
        parameters = self.parameters if len(places) == len(self.parameters) else [self.parameters[place] for place in places]
        if not parameters:
            return
        if self._clip is not None:
            norm = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients)))
            gradients = list(foreach_mul(gradients, (self._clip / (norm + 1e-6)).clamp(max=1.0)))
        if self._weight_decay:
            gradients = list(foreach_add(gradients, parameters, alpha=self._weight_decay))
        if self._momentum:
            velocity = [self._velocity(parameter) for parameter in parameters]
            foreach_mul_(velocity, self._momentum)
            foreach_add_(velocity, gradients)
            gradients = velocity
        foreach_add_(parameters, gradients, alpha=-self.lr)

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state.setdefault(parameter, {})
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def fit(
    module: nn.Module, batches: Batches, step: Step, *, metrics: Mapping[str, Any], rng: np.random.Generator
) -> TrainingLog:
    """Run `step` over every batch. The only loop over batches.

    Args:
        module: Put in training mode; the step trains it.
        batches: The epochs.
        step: Learns from one batch.
        metrics: Of the problem; "accuracy" is recorded where it exists.
        rng: Seeds torch's global generator, from which dropout draws.

    Returns:
        Loss and accuracy per epoch, and counts.
    """
    accuracy = metrics.get("accuracy")
    losses: list[float] = []
    accuracies: list[float] = []
    examples = steps = epochs = 0
    module.train()
    with torch_scope(rng):
        for epoch in batches:
            # Summed as tensors: reading a number from a device at every step would wait for it.
            loss_sum: Any = 0.0
            score_sum: Any = 0.0
            weight_sum: Any = 0.0
            seen = 0
            for batch in epoch:
                outputs, loss = step(batch)
                loss_sum += loss.detach() * batch.size
                if accuracy is not None:
                    with torch.no_grad():
                        score, weight = accuracy(outputs, batch.targets)
                    score_sum += score
                    weight_sum += weight
                seen += batch.size
                steps += 1
            examples += seen
            epochs += 1
            losses.append(float(loss_sum) / seen)
            if accuracy is not None:
                accuracies.append(float(score_sum) / max(float(weight_sum), 1e-12))
    return TrainingLog(
        loss=tuple(losses),
        accuracy=tuple(accuracies),
        examples=examples,
        padded_examples=batches.padded_examples * epochs,
        batches=steps,
    )


def evaluate(module: nn.Module, problem: Problem, examples: Examples, *, predict: Callable[..., Any] | None = None) -> Scores:
    """Score a module in evaluation mode.

    Args:
        module: What to score.
        problem: Loss and metrics.
        examples: The data; may be empty.
        predict: Called with a batch's inputs instead of the module.

    Returns:
        `loss` and every metric of the problem, as (sum over examples, weight); empty without examples.
    """
    if len(examples) == 0:
        return {}
    predict = module if predict is None else predict
    metrics = problem.metrics
    sums: dict[str, tuple[float, float]] = {}
    bounds = [(start, min(start + _EVALUATION_BATCH, len(examples))) for start in range(0, len(examples), _EVALUATION_BATCH)]
    module.eval()
    with torch.no_grad():
        for batch in examples.batches(None, bounds):
            outputs = predict(*batch.inputs)
            found: dict[str, tuple[Any, Any]] = {name: metric(outputs, batch.targets) for name, metric in metrics.items()}
            found["loss"] = (problem.loss(outputs, batch.targets) * batch.size, batch.size)
            for name, (score, weight) in found.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(score), before[1] + float(weight))
    return sums
