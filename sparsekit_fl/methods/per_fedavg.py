"""Per-FedAvg: an initial model that does well after one step of gradient descent on a client's own data.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020 (arXiv 2002.07948). Of the paper's two approximations this is the first-order one, which leaves the
second derivative out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from sparsekit_fl.client.fit import Batch, Batches, SgdStep, make_step
from sparsekit_fl.client.packing import foreach_copy_
from sparsekit_fl.methods.base import ClientContext, Method, Model, Result, StateDict, Task
from sparsekit_fl.methods.client import Leaves, load_leaves
from sparsekit_fl.options import Hint, NonNegative

_LARGEST_BATCH = 256  # of an adaptation step before deployment, which sees all training examples of a client that has fewer


def _forever(batches: Callable[[], Batches]) -> Iterator[Batch]:
    while True:
        for epoch in batches():
            yield from epoch


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Method):
    """FedAvg of meta-learned models: every step adapts to one batch and descends the loss of another. Clients count equally.

    With independent batches D, D′ of the size of the run: w̃ = w − α ∇f(w; D), then w ← w − β ∇f(w̃; D′). β is the learning rate
    of the run, with its momentum, weight decay and clipping; D′ are the batches that FedAvg would train on.

    Args:
        adaptation_lr: α; None takes a tenth of the learning rate of the run. At the 0.1 of the image tasks that is 0.01, the
            adaptation rate of FL-bench; at α = β = 0.1 the initial model hardly learns on clients of two classes.
    """

    called = "per-fedavg"
    source = "Fallah et al., Per-FedAvg, NeurIPS 2020, arXiv 2002.07948"
    weights = "uniform"
    note = "Deployed after 1 step on the client's own data, as in its paper."

    adaptation_lr: Annotated[NonNegative | None, Hint("0 does not adapt")] = None

    def _adaptation(self, client: ClientContext, leaves: Leaves) -> SgdStep:
        """Return plain gradient descent at the adaptation rate, clipped as the run clips."""
        rate = 0.1 * client.training.lr if self.adaptation_lr is None else self.adaptation_lr
        return SgdStep(leaves.values(), lr=rate, clip=client.training.clip)

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train; the work of a step is two gradients."""
        leaves = load_leaves(client, task.state, None)
        parameters: list[Tensor] = list(leaves.values())
        batches, others = client.batches(), _forever(lambda: client.batches(epochs=1))
        update = make_step(client.training, leaves.values())
        adapt = self._adaptation(client, leaves)
        module, loss_of = client.masked.model, client.problem.loss
        adapted = 0  # examples of the adaptation steps

        def step(batch: Batch) -> tuple[Any, Tensor]:
            nonlocal adapted
            before, other = [parameter.detach().clone() for parameter in parameters], next(others)
            adapted += other.size
            adapt(loss_of(module(*other.inputs), other.targets))
            outputs = module(*batch.inputs)
            loss = loss_of(outputs, batch.targets)

            def back(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
                foreach_copy_(parameters, before)
                return gradients

            update(loss, [back])
            return outputs, loss

        log = client.fit(module, batches, step)
        work = client.work(None, log) + client.work_on(adapted, padded_examples=log.padded_examples)
        return Result.of(client, None, log, work=work)

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the global model after one step of gradient descent on the client's training data."""
        adapt = self._adaptation(client, load_leaves(client, state, None))
        module = client.masked.model
        # Statistics of batch norm stay those of the server: one step is too few to learn new ones.
        module.eval()
        batches = client.batches(epochs=1, batch_size=min(_LARGEST_BATCH, len(client.client.data.train)))
        batch = next(next(iter(batches)))
        adapt(client.problem.loss(module(*batch.inputs), batch.targets))
        client.deploying.append(client.work_on(batch.size).flops)
        return Model(state=client.masked.narrow_state())
