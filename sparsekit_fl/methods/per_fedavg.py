"""Per-FedAvg: an initial model that does well after one step of gradient descent on a client's own data.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020 (arXiv 2002.07948). Both approximations of the paper are here: first-order (the second derivative is
left out) and Hessian-free (its product with the gradient is a difference of two gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from sparsekit.foreach import foreach_add, foreach_add_, foreach_copy_, foreach_sub
from sparsekit.graph import StateDict
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.fit import Batch, Batches, SgdStep, make_step
from sparsekit_fl.client.messages import Update, WorkCost
from sparsekit_fl.methods.base import Method
from sparsekit_fl.methods.client import Leaves, load_leaves
from sparsekit_fl.methods.context import ServerContext
from sparsekit_fl.methods.means import mean
from sparsekit_fl.methods.task import Model, Result, Task
from sparsekit_fl.options import Count, Hint, NonNegative, NonNegativeCount, Positive


def _forever(batches: Callable[[], Batches]) -> Iterator[Batch]:
    while True:
        for epoch in batches():
            yield from epoch


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Method):
    """FedAvg of meta-learned models: every step adapts to one batch and descends the loss of another. Clients count equally.

    With independent batches D, D′, D″ of the size of the run: w̃ = w − α ∇f(w; D), g = ∇f(w̃; D′); then w ← w − β g
    (first-order), or w ← w − β (g − α (∇f(w + δg; D″) − ∇f(w − δg; D″)) / (2δ)) (Hessian-free). β is the learning rate of
    the run, with its momentum, weight decay and clipping; D′ are the batches that FedAvg would train on.

    Args:
        adaptation_lr: α; None takes a tenth of the learning rate of the run. At the 0.1 of the image tasks that is 0.01, the
            adaptation rate of FL-bench; at α = β = 0.1 the initial model hardly learns on clients of two classes.
        variant: Which approximation.
        delta: δ, half the distance of the two gradients; 0.001 in FL-bench.
        steps: Number of adaptation steps before deployment; one in the paper, which the initial model is trained for.
        largest_batch: An adaptation step before deployment sees all training examples of the client, or a batch of this size if
            it has more.
    """

    called: ClassVar[str] = "per-fedavg"
    source: ClassVar[str] = "Fallah et al., Per-FedAvg, NeurIPS 2020, arXiv 2002.07948"
    note: ClassVar[str] = "Deployed after 1 step on the client's own data, as in its paper, unless `steps` says otherwise."

    adaptation_lr: Annotated[NonNegative | None, Hint("0 does not adapt")] = None
    variant: Literal["first-order", "hessian-free"] = "first-order"
    delta: Positive = 1e-3
    steps: Annotated[NonNegativeCount, Hint("0 deploys the global model")] = 1
    largest_batch: Count = 256

    def _adaptation(self, client: ClientContext, leaves: Leaves) -> SgdStep:
        """Return plain gradient descent at the adaptation rate, clipped as the run clips."""
        rate = 0.1 * client.training.lr if self.adaptation_lr is None else self.adaptation_lr
        return SgdStep(leaves.values(), lr=rate, clip=client.training.clip)

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train; the work of a step is two gradients (first-order) or four."""
        leaves = load_leaves(client, task.state, None)
        parameters: list[Tensor] = list(leaves.values())
        batches, others = client.batches(), _forever(lambda: client.batches(epochs=1))
        update = make_step(client.training, leaves.values())
        adapt = self._adaptation(client, leaves)
        module, loss_of = client.masked.model, client.problem.loss
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

        log = client.fit(module, batches, step)
        once = client.work(None, log)
        gradients_per_batch = 3 if self.variant == "hessian-free" else 1
        compact = 3 * client.costs.forward_flops(None) * further
        extra = WorkCost(flops=compact, flops_paper=once.flops_paper * gradients_per_batch)
        return Result.of(client, None, log, work=once + extra)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean with equal weights, as in the paper."""
        return mean(server, updates, weights="uniform")

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the global model after a few steps of gradient descent on the client's training data."""
        adapt = self._adaptation(client, load_leaves(client, state, None))
        module = client.masked.model
        # Statistics of batch norm stay those of the server: a few steps are too few to learn new ones.
        module.eval()
        batches = _forever(lambda: client.batches(epochs=1, batch_size=min(self.largest_batch, len(client.client.data.train))))
        for _, batch in zip(range(self.steps), batches, strict=False):
            adapt(client.problem.loss(module(*batch.inputs), batch.targets))
            client.deploying.append(client.work_on(batch.size).flops)
        return Model(state=client.masked.narrow_state())
