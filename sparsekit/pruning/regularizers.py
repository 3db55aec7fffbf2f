"""GroupLasso, GroupSL, GrowingRegularizer: penalties that make whole units small, for training before the cut.

Each adds its gradient to `.grad` after the backward pass; `finetune(..., regularizer=…)` calls it, and so can any loop. The
norm of a unit is taken over everything that goes when it goes: rows, norms and the columns of its consumers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsekit.criteria.weights import own_slices, unit_sums
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import along, wide
from sparsekit.graph.mask import UnitMask


def _strength(name: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise InvalidValueError(f"{name} must be a finite number of at least 0, got {value}")
    return float(value)


class UnitRegularizer(ABC):
    """The base: gradient += coefficient of the unit · weight, for every entry of every unit.

    Args:
        graph: The units.
    """

    def __init__(self, graph: UnitGraph) -> None:
        self.graph = graph

    @abstractmethod
    def coefficients(self, name: str, norms: Tensor) -> Tensor:
        """The coefficients of the units of a group.

        Args:
            name: Name of the group.
            norms: float (units,), the Euclidean norm of each unit.

        Returns:
            float (units,), at least 0.
        """

    def add_gradients(self, model: nn.Module) -> None:
        """Add the gradient of the penalty to `.grad` of every parameter that has one. Call it before the optimiser's step.

        Args:
            model: The dense model that the graph was traced from.

        Raises:
            ForeignMaskError: it is another model.
        """
        entries = dict(model.named_parameters(remove_duplicate=False))
        state = {name: entry.detach() for name, entry in entries.items()}
        wrong = [name for name, e in entries.items() if name in self.graph.shapes and self.graph.shapes[name] != e.shape]
        if wrong:
            raise ForeignMaskError(f"{wrong[0]!r} does not have the shape that the graph expects; pass the dense model")
        with torch.no_grad():
            for name, group in self.graph.groups.items():
                values = self.coefficients(name, unit_sums(group, state, order=2, coupled=True).sqrt())
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

    def end_epoch(self) -> None:  # noqa: B027 - a default
        """Called after each epoch."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """What changes while training: name → tensor."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - a default
        """Go on from what `state_dict` returned."""


class GroupLasso(UnitRegularizer):
    """λ·Σ √n·‖unit‖ over all units, n the number of entries of one: units that the task does not hold up become zero.

    Args:
        graph: The units.
        strength: λ, at least 0.

    Source: Yuan and Lin, JRSS B 2006; Wen et al., Learning Structured Sparsity in Deep Neural Networks, NeurIPS 2016.
    """

    def __init__(self, graph: UnitGraph, strength: float = 1e-4) -> None:
        super().__init__(graph)
        self.strength = _strength("strength", strength)
        self._roots: dict[str, float] = {}
        for name, group in graph.groups.items():
            pieces = [(piece, graph.shapes[piece.name]) for piece in own_slices(group, graph.shapes, coupled=True)]
            self._roots[name] = sum(shape.numel() / shape[piece.dim] * piece.span for piece, shape in pieces) ** 0.5

    def coefficients(self, name: str, norms: Tensor) -> Tensor:
        """λ·√n / ‖unit‖; 0 for a unit that is zero."""
        return torch.where(norms > 0, self.strength * self._roots[name] / norms.clamp_min(1e-12), torch.zeros_like(norms))


class GroupSL(UnitRegularizer):
    """λ·2^(α·(max I − I)/(max I − min I))·weight, I the norm of the unit: a decay that is 2^α times as strong on the smallest.

    Args:
        graph: The units.
        strength: λ, at least 0.
        alpha: α, at least 0.

    Source: Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023, group-level sparse learning.
    """

    def __init__(self, graph: UnitGraph, strength: float = 1e-4, *, alpha: float = 4.0) -> None:
        super().__init__(graph)
        self.strength, self.alpha = _strength("strength", strength), _strength("alpha", alpha)

    def coefficients(self, name: str, norms: Tensor) -> Tensor:  # noqa: ARG002 - the base's signature
        """The scaled decay of each unit."""
        largest, least = norms.max(), norms.min()
        place = (largest - norms) / (largest - least).clamp_min(1e-12)
        return self.strength * 2.0 ** (self.alpha * place)


class GrowingRegularizer(UnitRegularizer):
    """A decay that grows after every epoch on the units that will go, and leaves the others alone.

    Args:
        graph: The units.
        mask: What will stay.
        increment: What is added after each epoch, at least 0.
        ceiling: Where growth ends, at least 0.

    Raises:
        ForeignMaskError: the mask belongs to another graph.

    Source: Wang et al., Neural Pruning via Growing Regularization (GReg-1), ICLR 2021.
    """

    def __init__(self, graph: UnitGraph, mask: UnitMask, *, increment: float = 1e-3, ceiling: float = 1.0) -> None:
        super().__init__(graph)
        mask.check(graph)
        self._going = {name: ~keep for name, keep in mask.items()}
        self.increment, self.ceiling = _strength("increment", increment), _strength("ceiling", ceiling)
        self.decay = min(self.increment, self.ceiling)

    def coefficients(self, name: str, norms: Tensor) -> Tensor:
        """The present decay for units that will go, 0 for the others."""
        return self._going[name].to(norms) * self.decay

    def end_epoch(self) -> None:
        """Let the decay grow."""
        self.decay = min(self.decay + self.increment, self.ceiling)

    def state_dict(self) -> Mapping[str, Tensor]:
        """The present decay."""
        return {"decay": torch.tensor(self.decay, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with an earlier decay."""
        self.decay = float(state["decay"])
