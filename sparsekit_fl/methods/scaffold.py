"""SCAFFOLD: every step on a client is corrected by how the client's gradients differ from everybody's.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020
(arXiv 1910.06378). The control variate of a client is what the paper calls option II, written as what it stands for: the mean
of the gradients of the round. For plain SGD both are the same; with momentum, clipping or a schedule this stays a gradient.
The global step size η_g is 1.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekit.graph import StateDict
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import (
    ClientContext,
    LocalPolicy,
    LocalResult,
    Mask,
    Mean,
    Request,
    Rule,
    ServerContext,
    Update,
    load_leaves,
    mean,
    sgd,
)
from sparsekit_fl.policies.aggregate import Arrivals


@dataclass(frozen=True)
class ControlledSgd(LocalPolicy):
    """SGD along g − cᵢ + c, where cᵢ is the mean gradient of the client's last participation, and c that of all clients."""

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        self.trains_whole(mask)
        leaves = load_leaves(ctx, start, None)
        own = {name: ctx.memory.get(name, torch.zeros_like(common)) for name, common in ctx.extra.items()}
        # What does not travel, such as a head of the client's own, has no c and is not corrected.
        shift = {leaf: (ctx.extra[name] - own[name]).to(leaf) for name, leaf in leaves.items() if name in own}
        sums = {leaf: torch.zeros_like(leaf) for leaf in leaves.values()}

        def corrected(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
            for leaf, gradient in gradients.items():
                sums[leaf] += gradient
            return {leaf: gradient + shift.get(leaf, 0.0) for leaf, gradient in gradients.items()}

        log = sgd(ctx, leaves, ctx.batches(), [corrected])
        means = {name: sums[leaves[name]].cpu() / log.batches if name in leaves else old for name, old in own.items()}
        ctx.memory.update(means)
        return LocalResult.of(ctx, None, log, extra={name: means[name] - old for name, old in own.items()})


@dataclass(frozen=True)
class ControlledMean(Mean):
    """The mean of the changes, and of those of the control variates; c moves by the share of clients that took part."""

    def broadcast(self, ctx: ServerContext, client_id: int) -> StateDict:
        """Return c of all shared parameters, at first zero."""
        return {name: ctx.memory.get(name, torch.zeros_like(ctx.state[name])) for name in sorted(ctx.parameters)}

    def validate(self, ctx: ServerContext, update: Update, assignment: Request) -> None:
        super().validate(ctx, update, assignment)
        found, sent = ({name: (t.shape, t.dtype) for name, t in one.extra.items()} for one in (update, assignment))
        if found != sent:
            raise UpdateError(f"the update of client {update.client_id} lacks control variates, or has others than were sent")

    def combine(self, ctx: ServerContext, state: StateDict, arrivals: Arrivals, rule: Rule = mean) -> dict[str, Tensor]:
        share = len(arrivals) / len(ctx.everybody)
        both = {**state, **{_key(name): tensor for name, tensor in self.broadcast(ctx, 0).items()}}
        joined = []
        for update, age in arrivals:
            controls = {_key(name): share * change for name, change in update.extra.items()}
            joined.append((replace(update, delta={**update.delta, **controls}), age))
        found = super().combine(ctx, both, joined, rule)
        ctx.memory.update({name: found.pop(_key(name)) for name in ctx.parameters})
        return found


def _key(name: str) -> str:
    return f"control variate of {name}"


def scaffold() -> Method:
    """`ControlledSgd` and `ControlledMean`; clients count equally, as in the paper."""
    return Method(
        name="scaffold",
        source="Karimireddy et al., SCAFFOLD, ICML 2020, arXiv 1910.06378",
        local=ControlledSgd(),
        aggregate=ControlledMean("uniform"),
    )
