"""NestedModule: a narrower module inside a narrow model, with parameters in the same memory."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sparsekit.errors import ForeignMaskError
from sparsekit.graph.index import cut_axes, gather, places
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import resize
from sparsekit.training.narrow_model import NarrowModel

__all__ = ["NestedModule"]


class _Part:
    """The part of one leaf that a narrower module holds: a view where its positions come first, else a copy."""

    def __init__(self, positions: dict[int, Tensor], shape: torch.Size) -> None:
        self._positions = cut_axes(shape, positions)
        self.is_view = all(torch.equal(index, torch.arange(index.numel())) for index in self._positions.values())

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor shaped like the leaf; shares its memory if `is_view`."""
        if not self.is_view:
            return gather(whole, self._positions)
        for dim, index in self._positions.items():
            whole = whole.narrow(dim, 0, index.numel())
        return whole

    def write(self, part: Tensor, into: Tensor, *, add: bool = False) -> None:
        """Put a part into a tensor shaped like the leaf, or add it there."""
        if self.is_view:
            target = self.of(into)
            target.add_(part) if add else target.copy_(part)
            return
        # Rows first: the other axes are cut within the rows that are read and written back. That takes a third to two thirds
        # of the time of `graph.index.add_`, and this runs in every step.
        first, *rest = self._positions
        rows = self._positions[first].to(into.device)
        if not rest:
            into.index_add_(first, rows, part) if add else into.index_copy_(first, rows, part)
            return
        block = into.index_select(first, rows)
        _Part({dim: self._positions[dim] for dim in rest}, block.shape).write(part, block, add=add)
        into.index_copy_(first, rows, block)


class NestedModule:
    """A narrower module inside a narrow model: it has the same structure, and fewer of its units.

    Its parameters are views of the narrow model's leaves where possible, so that both train together without copying. What
    cannot be a view (the gates of a recurrent layer) is a copy, which `pull` and `push` keep up to date. Its buffers, such as
    the statistics of batch norms, are its own. It is valid until the narrow model is loaded or remasked.

    Args:
        narrow_model: Loaded with the wider mask.
        mask: What the narrower module keeps; part of the narrow model's mask.

    Raises:
        ForeignMaskError: the mask keeps a unit that the narrow model does not, or belongs to another graph.
    """

    def __init__(self, narrow_model: NarrowModel, mask: UnitMask) -> None:
        mask.check(narrow_model.graph)
        for name, keep in mask.items():
            if bool((keep & ~narrow_model.mask[name]).any()):
                raise ForeignMaskError(f"the mask keeps units of group {name!r} that the wider module does not hold")
        self.mask = mask
        wide = narrow_model.module
        tensors = [*wide.parameters(), *wide.buffers()]
        self.module = copy.deepcopy(wide, {id(tensor): tensor for tensor in tensors})
        kept = narrow_model.graph.kept_indices(mask)
        parts: dict[int, _Part] = {}
        made: dict[int, Tensor] = {}
        for name, tensor in wide.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                continue
            if id(tensor) not in made:
                part = parts[id(tensor)] = _Part(_positions(narrow_model, name, kept), tensor.shape)
                value = part.of(tensor.detach())
                if isinstance(tensor, nn.Parameter):
                    made[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad)
                else:
                    made[id(tensor)] = value.clone()
            owner, _, attribute = name.rpartition(".")
            setattr(self.module.get_submodule(owner), attribute, made[id(tensor)])
        resize(self.module)
        outer = narrow_model.named_parameters()
        self._parts = [parts[id(leaf)] for leaf in outer.values()]
        self.leaves: dict[str, nn.Parameter] = {name: made[id(leaf)] for name, leaf in outer.items()}  # type: ignore[misc]
        """State-dict key → leaf of this module, in the order of `narrow_model.named_parameters()`."""
        self.copied = [place for place, part in enumerate(self._parts) if not part.is_view]
        """Places of the leaves that are copies."""
        whole, inner = list(outer.values()), list(self.leaves.values())
        self._copies = [(place, whole[place].detach(), inner[place].detach()) for place in self.copied]

    def share(self, place: int, whole: Tensor) -> Tensor:
        """Return the part of a tensor that belongs to this module.

        Args:
            place: The leaf of the narrow model whose shape the tensor has.
            whole: For example that leaf's momentum.

        Returns:
            A view where it can be, else a copy, which `pull` and `push` keep up to date.
        """
        part = self._parts[place].of(whole)
        if place in self.copied:
            self._copies.append((place, whole, part))
        return part

    def write(self, place: int, part: Tensor, into: Tensor, *, add: bool = False) -> None:
        """Put a part into a tensor shaped like leaf `place`, or add it there."""
        self._parts[place].write(part, into, add=add)

    def pull(self) -> None:
        """Bring copies up to date, before a step."""
        for place, whole, part in self._copies:
            part.copy_(self._parts[place].of(whole))

    def push(self) -> None:
        """Write copies back, after a step."""
        for place, whole, part in self._copies:
            self.write(place, part, whole)


def _positions(narrow_model: NarrowModel, name: str, kept: dict[str, dict[int, Tensor]]) -> dict[int, Tensor]:
    """Axis → where the kept dense positions of an entry lie in the entry of the narrow model."""
    key = narrow_model.key_of(name)
    if key not in kept:
        return {}
    found = {}
    for dim, dense in kept[key].items():
        held = narrow_model.slots(key).positions[dim]
        found[dim] = places(held, narrow_model.graph.shapes[key][dim])[dense]
    return found
