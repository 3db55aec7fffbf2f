"""Per-FedAvg: an initial model that does well after one step of gradient descent on a client's own data.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020 (arXiv 2002.07948). Both approximations of the paper are here: first-order (the second derivative is
left out) and Hessian-free (its product with the gradient is a difference of two gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from sparsekit.foreach import foreach_add, foreach_copy_, foreach_sub
from sparsekit.graph import StateDict
from sparsekit_fl.client.context import ClientContext, Work
from sparsekit_fl.client.loop import Batch, Batches
from sparsekit_fl.client.optimizer import SgdStep, make_step
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options.checked import Count, Hint, NonNegative, NonNegativeCount, Positive
from sparsekit_fl.options.config import TrainingConfig
from sparsekit_fl.policies import LocalPolicy, LocalResult, Mask, Mean, PersonalModel, PersonalPolicy
from sparsekit_fl.policies.local import Leaves, gradients_of, load_leaves

Variant = Literal["first-order", "hessian-free"]


def _adaptation(training: TrainingConfig, leaves: Leaves, rate: float | None) -> SgdStep:
    """Plain gradient descent at a rate of its own (None: a tenth of the run's), clipped as the run clips."""
    rate = 0.1 * training.lr if rate is None else rate
    return SgdStep(leaves.values(), lr=rate, clip=training.clip)


def _forever(batches: Callable[[], Batches]) -> Iterator[Batch]:
    while True:
        for epoch in batches():
            yield from epoch


@dataclass(frozen=True, kw_only=True)
class MetaSgd(LocalPolicy):
    """Every step adapts to one batch and descends the loss of another.

    With independent batches D, D′, D″ of the size of the run: w̃ = w − α ∇f(w; D), g = ∇f(w̃; D′); then w ← w − β g
    (first-order), or w ← w − β (g − α (∇f(w + δg; D″) − ∇f(w − δg; D″)) / (2δ)) (Hessian-free). β is the learning rate of
    the run, with its momentum, weight decay and clipping; D′ are the batches that FedAvg would train on.

    Args:
        adaptation_lr: α; None takes a tenth of the learning rate of the run. At the 0.1 of the image tasks that is 0.01, the
            adaptation rate of FL-bench; at α = β = 0.1 the initial model hardly learns on clients of two classes.
        variant: Which approximation.
        delta: δ, half the distance of the two gradients; 0.001 in FL-bench.
    """

    adaptation_lr: Annotated[NonNegative | None, Hint("0 does not adapt")] = None
    variant: Variant = "first-order"
    delta: Positive = 1e-3

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train; the work of a step is two gradients (first-order) or four."""
        self.trains_whole(mask)
        leaves = load_leaves(ctx, start, None)
        batches = ctx.batches()
        others = _forever(lambda: ctx.batches(epochs=1))
        delta = self.delta if self.variant == "hessian-free" else None
        step = _MetaStep(ctx, leaves, others, self.adaptation_lr, delta, steps=batches.steps)
        log = ctx.fit(ctx.masked.model, batches, step)
        once = ctx.work(None, log)
        extra = Work(3 * ctx.costs.forward_flops(None) * step.further_examples, once.flops_rowmask * step.gradients_per_batch)
        return LocalResult.of(ctx, None, log, work=once + extra)


class _MetaStep:
    """One step; counts the examples of the gradients besides the one that FedAvg would take."""

    def __init__(
        self,
        ctx: ClientContext,
        leaves: Leaves,
        others: Iterator[Batch],
        rate: float | None,
        delta: float | None,
        *,
        steps: int,
    ) -> None:
        self._module, self._loss = ctx.masked.model, ctx.problem.loss
        self._parameters: list[Tensor] = list(leaves.values())
        self._update = make_step(ctx.training, leaves.values(), steps=steps)
        self._adapt = _adaptation(ctx.training, leaves, rate)
        self._others, self._delta = others, delta
        self.gradients_per_batch = 1 if delta is None else 3
        self.further_examples = 0

    def __call__(self, batch: Batch) -> tuple[Any, Tensor]:
        before = [parameter.detach().clone() for parameter in self._parameters]
        other = next(self._others)
        self.further_examples += other.size
        self._adapt(self._loss(self._module(*other.inputs), other.targets))
        outputs = self._module(*batch.inputs)
        loss = self._loss(outputs, batch.targets)
        self._update(loss, adjust=lambda gradients, places: self._back(before, gradients, places))
        return outputs, loss

    def _back(self, before: list[Tensor], gradients: list[Tensor], places: list[int]) -> list[Tensor]:
        """Go back to where the step began, and correct the gradient by the Hessian where that is asked for."""
        if self._delta is not None:
            moved = [self._parameters[place] for place in places]
            origin = [before[place] for place in places]
            other = next(self._others)
            ends = []
            for sign in (self._delta, -self._delta):
                foreach_copy_(self._parameters, before)
                foreach_copy_(moved, foreach_add(origin, gradients, alpha=sign))
                with torch.enable_grad():
                    ends.append(self._gradient(other))
            difference = foreach_sub([ends[0][place] for place in places], [ends[1][place] for place in places])
            gradients = list(foreach_add(gradients, difference, alpha=-self._adapt.lr / (2 * self._delta)))
        foreach_copy_(self._parameters, before)
        return gradients

    def _gradient(self, batch: Batch) -> list[Tensor]:
        self.further_examples += batch.size
        return gradients_of(self._loss(self._module(*batch.inputs), batch.targets), self._parameters)


@dataclass(frozen=True, kw_only=True)
class AdaptedModel(PersonalPolicy):
    """The global model after a few steps of gradient descent on the client's training data.

    Args:
        steps: Number of steps; one in the paper, which is what the initial model is trained for.
        adaptation_lr: α; None takes a tenth of the learning rate of the run.
        largest_batch: A step sees all training examples of the client, or a batch of this size where it has more.
    """

    steps: Annotated[NonNegativeCount, Hint("0 deploys the global model")] = 1
    adaptation_lr: Annotated[NonNegative | None, Hint("0 does not adapt")] = None
    largest_batch: Count = 256

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        adapt = _adaptation(ctx.training, load_leaves(ctx, state, None), self.adaptation_lr)
        module = ctx.masked.model
        # Statistics of batch norm stay those of the server: a few steps are too few to learn them anew.
        module.eval()
        batches = _forever(lambda: ctx.batches(epochs=1, batch_size=min(self.largest_batch, len(ctx.client.data.train))))
        for _, batch in zip(range(self.steps), batches, strict=False):
            adapt(ctx.problem.loss(module(*batch.inputs), batch.targets))
            ctx.deploying.append(ctx.work_on(batch.size).flops_compact)
        return PersonalModel(state=ctx.masked.narrow_state())


def per_fedavg(*, adaptation_lr: float | None = None) -> Method:
    """FedAvg of meta-learned models; clients count equally, as in the paper.

    Args:
        adaptation_lr: α; None takes a tenth of the learning rate of the run.
    """
    return Method(
        name="per-fedavg",
        source="Fallah et al., Per-FedAvg, NeurIPS 2020, arXiv 2002.07948",
        local=MetaSgd(adaptation_lr=adaptation_lr),
        aggregate=Mean("uniform"),
        personal=AdaptedModel(adaptation_lr=adaptation_lr),
        note="Deployed after 1 step on the client's own data, as in its paper, unless `personal.steps` says otherwise.",
    )
