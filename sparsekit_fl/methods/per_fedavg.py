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

from sparsekit.foreach import foreach_add, foreach_add_, foreach_copy_, foreach_sub
from sparsekit.graph import StateDict
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.loop import Batch, Batches
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.client.optimizer import SgdStep, make_step
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options import Count, Hint, NonNegative, NonNegativeCount, Positive
from sparsekit_fl.policies import Leaves, LocalPolicy, LocalResult, Mask, Mean, PersonalModel, PersonalPolicy, load_leaves

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
        parameters: list[Tensor] = list(leaves.values())
        batches, others = ctx.batches(), _forever(lambda: ctx.batches(epochs=1))
        update = make_step(ctx.training, leaves.values(), steps=batches.steps)
        adapt = _adaptation(ctx.training, leaves, self.adaptation_lr)
        module, loss_of = ctx.masked.model, ctx.problem.loss
        further = 0  # examples of the gradients besides the one that FedAvg would take

        def other_loss(batch: Batch) -> Tensor:
            nonlocal further
            further += batch.size
            return loss_of(module(*batch.inputs), batch.targets)

        def corrected(gradients: dict[Tensor, Tensor], before: list[Tensor]) -> dict[Tensor, Tensor]:
            """Take the product of the Hessian and the gradient off, a difference of two gradients."""
            batch, ends, moved, along = next(others), [], list(gradients), list(gradients.values())
            for sign in (self.delta, -self.delta):
                foreach_copy_(parameters, before)
                foreach_add_(moved, along, alpha=sign)
                with torch.enable_grad():
                    ends.append(torch.autograd.grad(other_loss(batch), moved))
            found = foreach_add(along, foreach_sub(*ends), alpha=-adapt.lr / (2 * self.delta))
            return dict(zip(moved, found, strict=True))

        def step(batch: Batch) -> tuple[Any, Tensor]:
            before = [parameter.detach().clone() for parameter in parameters]
            adapt(other_loss(next(others)))
            outputs = module(*batch.inputs)
            loss = loss_of(outputs, batch.targets)

            def back(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
                if self.variant == "hessian-free":
                    gradients = corrected(gradients, before)
                foreach_copy_(parameters, before)
                return gradients

            update(loss, [back])
            return outputs, loss

        log = ctx.fit(module, batches, step)
        once = ctx.work(None, log)
        gradients_per_batch = 3 if self.variant == "hessian-free" else 1
        compact = 3 * ctx.costs.forward_flops(None) * further
        extra = WorkCost(flops=compact, flops_paper=once.flops_paper * gradients_per_batch)
        return LocalResult.of(ctx, None, log, work=once + extra)


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
            ctx.deploying.append(ctx.work_on(batch.size).flops)
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
