"""GroupSL: a penalty that makes whole units small, for training before the cut."""

import torch
from torch import nn

from sparsekit.criteria.weights import own_slices, unit_sums
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import along, wide


class GroupSL:
    """A decay of λ·2^(α·(max I − I)/(max I − min I))·weight, I the norm of the unit: 2^α times as strong on the smallest.

    `finetune(..., regularizer=…)` adds its gradient to `.grad` after the backward pass, and so can any loop. The norm of a
    unit is taken over everything that is removed with it: rows, norms and the columns of its consumers.

    Args:
        graph: The units.
        strength: λ, at least 0.
        alpha: α, at least 0.

    Raises:
        InvalidValueError: a number below 0, infinite or NaN.

    Source: Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023, group-level sparse learning.
    """

    def __init__(self, graph: UnitGraph, strength: float = 1e-4, *, alpha: float = 4.0) -> None:
        for name, value in (("strength", strength), ("alpha", alpha)):
            if not 0 <= value < float("inf"):
                raise InvalidValueError(f"{name} must be a finite number of at least 0, got {value}")
        self.graph, self.strength, self.alpha = graph, float(strength), float(alpha)

    def add_gradients(self, model: nn.Module) -> None:
        """Add the gradient of the penalty to `.grad` of every parameter that has one. Call it before the optimizer's step.

        Args:
            model: The dense model from which the graph was traced.

        Raises:
            ForeignMaskError: it is another model.
        """
        entries = dict(model.named_parameters(remove_duplicate=False))
        state = {name: entry.detach() for name, entry in entries.items()}
        wrong = [name for name, e in entries.items() if name in self.graph.shapes and self.graph.shapes[name] != e.shape]
        if wrong:
            raise ForeignMaskError(f"{wrong[0]!r} does not have the shape that the graph expects; pass the dense model")
        with torch.no_grad():
            for group in self.graph.groups.values():
                norms = unit_sums(group, state, order=2, coupled=True).sqrt()
                largest, least = norms.max(), norms.min()
                values = self.strength * 2.0 ** (self.alpha * (largest - norms) / (largest - least).clamp_min(1e-12))
                done: set[tuple[int, int]] = set()
                for piece in own_slices(group, state, coupled=True):
                    entry = entries[piece.name]
                    if entry.grad is None or (id(entry), piece.dim) in done:
                        continue
                    done.add((id(entry), piece.dim))  # of tied names the first counts
                    vector = torch.zeros(entry.shape[piece.dim], dtype=wide(entry).dtype, device=entry.device)
                    index = piece.index.to(entry.device)
                    vector[index] = values.to(vector)[:, None].expand(index.shape)
                    entry.grad.add_((wide(entry) * along(vector, piece.dim, entry.dim())).to(entry.grad))
