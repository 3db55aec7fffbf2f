"""Criteria that need no data: Magnitude, from the weights as operators use them, Ordered, Random and Scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import tree_leaves
from sparsekit.criteria.base import ScoringContext
from sparsekit.errors import InvalidValueError, MissingImportanceError
from sparsekit.graph import StateDict, UnitGraph, UnitGroup, UnitSlice
from sparsekit.graph.index import wide
from sparsekit.registry import calling
from sparsekit.tracing.modes import measured

Order = Literal[1, 2]

_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, eq=False)
class UsedWeight:
    """A weight that the forward pass computes from state entries; `names` are their keys."""

    names: frozenset[str]
    value: Tensor

    def replaces(self, piece: UnitSlice, shape: Sequence[int]) -> bool:
        """Return whether the units of a slice of an entry have the same positions on the same axis of this tensor."""
        same = self.value.dim() > piece.dim and self.value.shape[piece.dim] == shape[piece.dim]
        return same and piece.name in self.names


class _Watch(TorchFunctionMode):
    """Tracks tensors that are computed from state entries only, and records them when they are combined with other tensors."""

    def __init__(self, entries: Iterator[tuple[str, Tensor]]) -> None:
        super().__init__()
        # Keep references to the tensors, so that their ids are not reused.
        self._known: dict[int, tuple[Tensor, frozenset[str], Tensor | None]] = {}
        for name, entry in entries:
            known = self._known.get(id(entry), (entry, frozenset[str](), None))
            self._known[id(entry)] = entry, known[1] | {name}, None
        self.found: dict[int, UsedWeight] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, dict(kwargs or {}))) if isinstance(leaf, Tensor)]
        known = [self._known[id(leaf)] for leaf in given if id(leaf) in self._known]
        if len(known) < len(given):
            for _, names, value in known:
                if value is not None and value.is_floating_point():
                    self.found[id(value)] = UsedWeight(names, value)
        elif known and isinstance(result, Tensor) and id(result) not in self._known:
            names = frozenset(chain.from_iterable(names for _, names, _ in known))
            # Record the base of a view, since the axes of the view may differ from the axes of the units.
            place = result.untyped_storage().data_ptr()
            views = [value for tensor, _, value in known if tensor.untyped_storage().data_ptr() == place != 0]
            self._known[id(result)] = result, names, views[0] if views else result
        return result


def used_weights(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[UsedWeight]:
    """Run a model once, and return the weights that it computes.

    They come from `torch.nn.utils.prune`, weight norm or any parametrization, and from expressions in a forward pass.
    """
    entries = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    with measured(model), _Watch(entries) as watch, calling("the model"):
        model(*args, **kwargs)
    return list(watch.found.values())


def unit_entries(model: nn.Module, graph: UnitGraph) -> dict[str, list[tuple[nn.Parameter, UnitSlice]]]:
    """Return group name → the parameters that hold its units, with their slices. Tied parameters occur once."""
    entries = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, list[tuple[nn.Parameter, UnitSlice]]] = {}
    for name, group in graph.groups.items():
        once: dict[tuple[int, int], tuple[nn.Parameter, UnitSlice]] = {}
        for piece in group.slices:
            if (entry := entries.get(piece.name)) is not None:
                once.setdefault((id(entry), piece.dim), (entry, piece))
        found[name] = list(once.values())
    return found


def along_axis(values: Tensor, dim: int) -> Tensor:
    others = [axis for axis in range(values.dim()) if axis != dim]
    return values.sum(others) if others else values


def unit_magnitudes(group: UnitGroup, weights: StateDict) -> Tensor:
    """Return Σ |θ| over the entries that produce each unit, |θ|_J in the paper: float (units,), at least float32.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance regularization term.
    """
    return unit_sums(group, weights, order=1)


def unit_sums(group: UnitGroup, weights: StateDict, *, order: Order, used: Sequence[UsedWeight] = ()) -> Tensor:
    """Return Σ |θ| or Σ θ² over the entries that produce each unit, without running statistics: float (units,).

    Weights in `used` replace the entries from which they are computed. Without any entries, the sums are 0.
    """
    total: Tensor | None = None
    done: set[tuple[int, int]] = set()
    for piece in group.slices:
        if piece.name not in weights or piece.side != "out" or piece.name.endswith(_STATISTICS):
            continue
        entry = weights[piece.name]
        value = next((each.value for each in used if each.replaces(piece, entry.shape)), None)
        if value is not None:
            if (id(value), piece.dim) in done:
                continue
            done.add((id(value), piece.dim))
        entry = wide((entry if value is None else value).detach())
        if order == 1 and entry.dim() > 1:  # a norm, which makes no copy of the entry
            along = torch.linalg.vector_norm(entry, ord=1, dim=[axis for axis in range(entry.dim()) if axis != piece.dim])
        else:
            along = along_axis(entry.abs() if order == 1 else entry.square(), piece.dim)
        part = along[piece.index.to(entry.device)].sum(1)
        total = part if total is None else total + part.to(total.device)
    return total if total is not None else torch.zeros(group.size)


@dataclass(frozen=True)
class Magnitude:
    """The magnitude of the parameters that produce a unit: filter rows, bias, norm scale.

    Weights that the model computes from several entries, as with weight norm or `torch.nn.utils.prune`, count as the model
    uses them.

    Scores depend on the scale of a layer, so allocations normalize them within each group.

    Args:
        order: 1 for the sum of absolute values, 2 for the square root of the sum of squares.

    Raises:
        InvalidValueError: `order` is neither 1 nor 2.

    Source: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017.
    """

    order: Order = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise InvalidValueError(f"order must be 1 (absolute values) or 2 (squares), got {self.order!r}")

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Return the magnitudes: float (units,), at least float32."""
        found, weights = {}, context.weights
        if weights is None:
            raise MissingImportanceError("Magnitude needs the weights; pass ScoringContext(weights=model.state_dict())")
        used = () if context.model is None or context.call is None else used_weights(context.model, *context.call)
        for name, group in graph.groups.items():
            sums = unit_sums(group, weights, order=self.order, used=used)
            found[name] = sums if self.order == 1 else sums.sqrt()
        return found


@dataclass(frozen=True)
class Ordered:
    """Keeps a prefix of each group, units 0 to count − 1, so that smaller submodels are nested in larger ones.

    Source: Horváth et al., FjORD, NeurIPS 2021; Diao et al., HeteroFL, ICLR 2021.
    """

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        """Score each unit by minus its index."""
        return {name: -torch.arange(group.size, dtype=torch.float64) for name, group in graph.groups.items()}


@dataclass(frozen=True)
class Random:
    """Keeps a uniformly random subset, a new one in each call. The context must have a generator.

    Source: Caldas et al., Federated Dropout, arXiv 1812.07210.
    """

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Draw a random order of each group's units."""
        generator = context.generator
        if generator is None:
            raise MissingImportanceError("Random needs a generator; pass ScoringContext(generator=torch.Generator())")
        orders = {name: torch.randperm(group.size, generator=generator) for name, group in graph.groups.items()}
        return {name: -torch.argsort(order).to(torch.float64) for name, order in orders.items()}


@dataclass(frozen=True)
class Scored:
    """Importance scores that were computed before.

    Use it to prune to several budgets without scoring again (`Pruned.scores` holds such criteria), or to supply your own
    scores.

    Args:
        values: Group name → float (units,), larger stays.
        name: Name of the criterion in reports.
        comparable: Whether scores of different groups have the same meaning.
        of: Hash of the weights that were scored, as in `Pruned.scores`. `prune` raises an error for other weights. Empty: not
            checked.
    """

    values: Mapping[str, Tensor] = field(repr=False, compare=False)
    name: str = "Scored"
    comparable: bool = False
    of: str = field(default="", repr=False)

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        """Return the scores as they were given."""
        return self.values
