"""used_weights(): the tensors that operators read, if a model computes its weights from several entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import tree_leaves
from sparsekit.graph.groups import UnitSlice
from sparsekit.measure.clock import measured
from sparsekit.registry import calling


@dataclass(frozen=True, eq=False)
class UsedWeight:
    """A weight, float, that is computed in the forward pass from the entries of some names."""

    names: frozenset[str]
    value: Tensor

    def replaces(self, piece: UnitSlice, shape: Sequence[int]) -> bool:
        """Tell whether the units of a slice of an entry have the same positions on the same axis of this tensor."""
        same = self.value.dim() > piece.dim and self.value.shape[piece.dim] == shape[piece.dim]
        return same and piece.name in self.names


class _Watch(TorchFunctionMode):
    """Follow tensors that are computed from entries alone, and record them when they are combined with other tensors."""

    def __init__(self, entries: Iterator[tuple[str, Tensor]]) -> None:
        super().__init__()
        # Tensors are held, so that no other one gets their identity.
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
            # A view shows the same values, and its axes are not the axes of the units.
            views = [value for tensor, _, value in known if _shares(tensor, result)]
            self._known[id(result)] = result, names, views[0] if views else result
        return result


def _shares(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != 0


def used_weights(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[UsedWeight]:
    """Run a model once, and return the weights that it computes.

    They come from `torch.nn.utils.prune`, weight norm or any parametrization, and from expressions in a forward pass.
    """
    entries = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    with measured(model), _Watch(entries) as watch, calling("the model"):
        model(*args, **kwargs)
    return list(watch.found.values())
