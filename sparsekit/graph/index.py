"""Operations on index tables: gather a narrow tensor, scatter it back, gate units, compute narrow shapes.

All functions take a tensor and `axes`: axis → int64 (kept,), positions along it without repeats, in any order. Axes left out
are whole. The selection is the cross product: of a 3×4 tensor, `{0: [2], 1: [1, 3]}` selects the entries (2, 1) and (2, 3)
as a 1×2 tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Axes: TypeAlias = Mapping[int, Tensor]
"""Axis → int64 (kept,): the positions along that axis."""

StateDict: TypeAlias = Mapping[str, Tensor]
"""A state dict, read-only by convention: state-dict key → tensor."""


def narrow_shape(shape: Sequence[int], axes: Axes) -> torch.Size:
    """Return the shape after `gather` of a tensor of `shape`."""
    return torch.Size(axes[dim].numel() if dim in axes else size for dim, size in enumerate(shape))


def cut_axes(shape: Sequence[int], axes: Axes) -> dict[int, Tensor]:
    """Return the axes on which positions are left out. If positions ascend, the other axes need no index."""
    return {dim: index for dim, index in axes.items() if index.numel() < shape[dim]}


def moved_axes(shape: Sequence[int], axes: Axes) -> dict[int, Tensor]:
    """Return the axes on which positions are left out or reordered."""
    return {
        dim: index
        for dim, index in axes.items()
        if index.numel() < shape[dim] or not torch.equal(index, torch.arange(shape[dim], dtype=index.dtype))
    }


def inverse_index(index: Tensor, size: int) -> Tensor:
    """Return the inverse of an index, int64 (size,), -1 for absent positions: of `[4, 1]`, 5 it is `[-1, 1, -1, -1, 0]`."""
    found = torch.full((size,), -1, dtype=torch.int64)
    found[index] = torch.arange(index.numel())
    return found


def gather(dense: Tensor, axes: Axes) -> Tensor:
    """Select the entries at `axes`: a new tensor, or `dense` itself where `axes` is empty. Differentiable."""
    narrow = dense
    # Index the axis with the smallest kept share first, so that later selections copy less.
    for dim in sorted(axes, key=lambda dim: (axes[dim].numel() / max(1, dense.shape[dim]), dim)):
        narrow = narrow.index_select(dim, axes[dim].to(dense.device))
    return narrow


def scatter(narrow: Tensor, dense: Tensor, axes: Axes) -> Tensor:
    """Return a copy of `dense`, on its device and in its dtype, with the entries at `axes` replaced by `narrow`."""
    narrow = narrow.to(dense)
    return scatter_(narrow, dense.clone(), axes) if axes else narrow.clone()


def scatter_(narrow: Tensor, dense: Tensor, axes: Axes) -> Tensor:
    """Write `narrow` over the entries of `dense` at `axes`, in place, and return `dense`. Differentiable in `narrow`."""
    if not axes:
        return dense.copy_(narrow)
    if len(axes) == 1:
        [(dim, index)] = axes.items()
        return dense.index_copy_(dim, index.to(dense.device), narrow)
    dense[_mesh(dense, axes)] = narrow
    return dense


def gate(dense: Tensor, dim: int, index: Tensor, gates: Tensor) -> Tensor:
    """Multiply the positions of each unit, `index`, int64 (units, span), along an axis by its gate; differentiable in both."""
    entries = wide(dense)  # the gradient of a gate is a sum over many entries
    values = gates.to(entries.dtype).repeat_interleave(index.shape[1])
    vector = torch.ones(dense.shape[dim], dtype=entries.dtype, device=dense.device)
    vector = vector.index_copy(0, index.reshape(-1).to(dense.device), values)
    return (entries * along(vector, dim, dense.dim())).to(dense.dtype)


def wide(values: Tensor) -> Tensor:
    """Return floats of fewer than 32 bits as float32, so that sums over many are exact enough; return others unchanged."""
    return values.float() if values.is_floating_point() and values.dtype.itemsize < 4 else values


def along(vector: Tensor, dim: int, rank: int) -> Tensor:
    """View a vector as a tensor of `rank` axes that broadcasts over all of them but `dim`."""
    return vector.view([-1 if axis == dim % rank else 1 for axis in range(rank)])


def _mesh(dense: Tensor, axes: Axes) -> tuple[Any, ...]:
    # A slice between advanced indices would move their axes to the front, so whole axes between them are indexed too: axes 0
    # and 2 of three give indices of the shapes (k, 1, 1), (1, n, 1) and (1, 1, m).
    first, last = min(axes, default=0), max(axes, default=-1)
    block = [axes[dim] if dim in axes else torch.arange(dense.shape[dim]) for dim in range(first, last + 1)]
    meshed = (along(index.to(dense.device), place, len(block)) for place, index in enumerate(block))
    return (*[slice(None)] * first, *meshed, ...)
