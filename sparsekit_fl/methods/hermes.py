"""Hermes: each client prunes units step by step and trains what is left, physically small, under a group lasso.

Li, Sun, Li, Pu, Li, Chen: Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients, MobiCom 2021.
The abstract says that the server averages overlapping parameters only. That can mean the entries that all clients of a
cohort hold, with the others kept per client (so an implementation in the library Plato), or each entry over its holders.
With cohorts that change, in the first reading the value of an entry depends on who else was sampled; we take the second, as the
method's predecessor LotteryFL does. An entry that one client alone holds is then that client's own value, in both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sparsekit.allocation import mask_from_scores, ratio_counts
from sparsekit.criteria import unit_magnitudes
from sparsekit.graph import UnitMask, group_order
from sparsekit_fl.client.fit import Adjust
from sparsekit_fl.client.packing import Mask
from sparsekit_fl.methods.base import ClientContext, Result, StateDict, Task, sgd
from sparsekit_fl.methods.client import Leaves
from sparsekit_fl.methods.masks import PruneWhenAccurate
from sparsekit_fl.options import Hint, NonNegative


@dataclass(frozen=True, kw_only=True)
class Hermes(PruneWhenAccurate):
    """Iterative unit pruning under a group lasso; entries are averaged over the clients that hold them.

    The loss of a client has the term lasso · Σ over units ‖weights of the unit‖₂. The weights of a unit are the rows that
    make it, in all its matrices; biases and norms are not penalised.

    Args:
        threshold: Validation accuracy above which a client prunes. Xue et al., ICDE 2025, run it with 0.5 on MNIST, 0.45 on
            CIFAR-10, 0.25 on CIFAR-100, 0.06 on Tiny-ImageNet and 0.15 on Reddit, in their released code.
        target: Share of units at which it stops; 0.5, 0.3, 0.3, 0.4 and 0.5 there.
        lasso: λ; 0.001 in the released code of Xue et al., ICDE 2025, where its gradient is lost on the way.
    """

    source = "Li et al., Hermes, MobiCom 2021"
    needs_units = True

    lasso: Annotated[NonNegative, Hint("0 switches it off")] = 0.001

    def prune(self, client: ClientContext, state: StateDict, mask: Mask | None, ratio: float) -> Mask:
        """Return the units of largest L1 norm, max(1, ⌈ratio · size⌉) of each group, among those that are left."""
        norms: dict[str, Tensor] = {}
        for name, group in client.graph.groups.items():
            norms[name] = unit_magnitudes(group, state)
            if isinstance(mask, UnitMask):
                norms[name] = torch.where(mask[name], norms[name], -torch.ones_like(norms[name]))
        return mask_from_scores(client.graph, norms, ratio_counts(client.graph, ratio), source="norms")

    def fit(self, client: ClientContext, task: Task, *, pruned: bool) -> Result:
        """Train with the group lasso."""
        if not self.lasso:
            return sgd(client, task)
        return sgd(client, task, adjusts=lambda leaves: [_group_lasso(client, leaves, self.lasso)])


def _unit_rows(ctx: ClientContext, leaves: Leaves) -> Mapping[Tensor, tuple[int, Tensor]]:
    """Return leaf → (the axis along which it makes units, the unit of each narrow position), matrices only.

    Units are numbered through all groups; one more number stands for positions that make no unit.
    """
    graph = ctx.graph
    offsets, kept = group_order(graph.groups.values()), graph.kept_indices(ctx.masked.unit_mask())
    found: dict[Tensor, tuple[int, Tensor]] = {}
    for name, leaf in leaves.items():
        pieces = [(group, piece) for group, piece in graph.slices_of.get(name, ()) if piece.side == "out"]
        if leaf.dim() < 2 or not pieces:
            continue
        dim = pieces[0][1].dim
        units = torch.full((graph.shapes[name][dim],), graph.units)
        for group, piece in pieces:
            numbers = offsets[group] + torch.arange(len(piece.index))
            units[piece.index.reshape(-1).cpu()] = numbers.repeat_interleave(piece.span)
        found[leaf] = dim, units[kept[name][dim]].to(leaf.device)
    return found


def _group_lasso(ctx: ClientContext, leaves: Leaves, strength: float) -> Adjust:
    """Return an adjust that adds the gradient of strength · Σ ‖weights of a unit‖₂: strength · weight / norm of its unit."""
    rows = _unit_rows(ctx, leaves)

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        penalised = [(leaf, *rows[leaf]) for leaf in gradients if leaf in rows]
        if not penalised:
            return gradients
        squares = penalised[0][0].new_zeros(ctx.graph.units + 1)
        for leaf, dim, units in penalised:
            others = [axis for axis in range(leaf.dim()) if axis != dim]
            squares.index_add_(0, units, torch.linalg.vector_norm(leaf, dim=others).square())
        # A unit of norm 0 has no gradient; the smallest subgradient is 0.
        factors = torch.where(squares > 0, strength * squares.clamp(min=1e-24).rsqrt(), 0.0)
        factors[-1] = 0.0
        scales = {
            leaf: factors[units].unflatten(0, [-1 if axis == dim else 1 for axis in range(leaf.dim())])
            for leaf, dim, units in penalised
        }
        return {leaf: torch.addcmul(one, leaf, scales[leaf]) if leaf in scales else one for leaf, one in gradients.items()}

    return adjust
