"""Masks of single weights: which entries may be pruned, and how they are chosen.

A `WeightMask` saves entries on a wire or a disk. It does not save time: a network with scattered zeros executes what a whole
one does. To save time, drop units.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, WeightMask, layer_weights
from sparsekit_fl.methods.base import Method, Problem


def prunable_weights(graph: UnitGraph, who: str = "this method") -> tuple[str, ...]:
    """Return the weights that may be pruned by entry: all matrices that train but the output layer's, no bias and no norm.

    Raises:
        InvalidValueError: there are none; `who` is named in the message.
    """
    names = layer_weights(graph.layers, graph.shapes)
    if not names:
        raise InvalidValueError(
            f"the model has no weight matrix besides its output layer that trains, so {who} has nothing to prune;"
            " use a model with at least one hidden layer, or freeze fewer"
        )
    return names


def weight_count(ratio: float, size: int) -> int:
    """Return max(1, ⌈ratio · size⌉), at most `size`, safe against the last bit; 0 for a ratio of 0 or less."""
    return 0 if ratio <= 0.0 or size == 0 else max(1, min(size, math.ceil(ratio * size - 1e-9)))


def keep_largest_entries(scores: Tensor, count: int) -> Tensor:
    """Return bool, shaped like `scores`, without NaN: exactly the `count` largest; ties go to the lower place in row-major
    order.
    """
    flat = scores.detach().reshape(-1)
    if count <= 0 or count >= flat.numel():
        return torch.full(scores.shape, count > 0)
    # Selecting a threshold takes linear time, where a sort of millions of entries does not.
    threshold = torch.kthvalue(flat, flat.numel() - count + 1).values
    keep = flat > threshold
    ties = (flat == threshold).nonzero().reshape(-1)[: count - int(keep.sum())]
    keep[ties] = True
    return keep.reshape(scores.shape).cpu()


def largest_weights(state: StateDict, names: Iterable[str], ratio: float, *, within: WeightMask | None = None) -> WeightMask:
    """Keep max(1, ⌈ratio · size⌉) weights of each layer, those of largest absolute value; ties go to the lower place.

    With `within`, only what that mask keeps may stay, as in iterative pruning, so fewer stay if fewer are left.
    """
    kept = {}
    for name in names:
        scores = state[name].detach().abs()
        count = weight_count(ratio, scores.numel())
        if within is not None and name in within:
            alive = within[name].to(scores.device)
            count = min(count, int(alive.sum()))
            scores = torch.where(alive, scores, -1.0)
        kept[name] = keep_largest_entries(scores, count)
    return WeightMask(kept)


@dataclass(frozen=True, kw_only=True)
class SparseWeights(Method):
    """A method that prunes single weights."""

    masked = True
    note = "Masks of single weights save bytes and not time; its FLOPs are those of the whole model."

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise InvalidValueError if there is nothing to prune."""
        super().check(problem, graph)
        prunable_weights(graph, type(self).__name__)
