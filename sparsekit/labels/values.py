"""Labels: which unit each position along an axis of a tensor belongs to.

A *node* is one position along one axis of one state entry. Tensors in a trace carry, for each axis, the node of each position.
Operators state facts about nodes. Nodes that are connected at the end are a unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from sparsekit._torch import tree_leaves
from sparsekit.graph.groups import Constant
from sparsekit.labels.numbers import Held
from sparsekit.labels.numbers import IntArray as IntArray

NO_UNIT = -1  # a position that belongs to no unit, such as a raw input in a concatenation
ANY = -2  # a position of an axis along which the value is constant, such as an expanded one: it fits any unit

NOT_ZERO = 0
"""Source of a value that is not zero when its unit is gated away."""

ALWAYS_ZERO = 1
"""Source of a value that is zero whatever is gated."""


@dataclass(frozen=True, eq=False)
class Labels:
    """The units of the positions along one axis; or along several, if a unit axis was reshaped to (heads, head size).

    Later operators decide along which of several axes units differ: the positions along an axis that is summed over, sliced or
    combined with ordinary values become one unit.
    """

    nodes: IntArray
    """int64; a node, NO_UNIT or ANY: (size,) for one axis, or of the rank of the tensor, of size 1 along axes without units."""
    sources: IntArray
    """int64, of the same shape: the id in `Tracer.source` of the entries whose gates make the value exactly zero."""
    numbers: frozenset[Held] = frozenset()
    """Integers of a module that may have given the length of an axis along which the value is constant."""

    @property
    def size(self) -> int:
        return int(self.nodes.shape[0])

    @property
    def dims(self) -> tuple[int, ...]:
        """The axes along which units differ, for labels with the rank of the tensor."""
        return tuple(dim for dim, size in enumerate(self.nodes.shape) if size > 1)

    @property
    def is_uniform(self) -> bool:
        """Whether the value is constant along the one axis."""
        return self.size > 0 and int(self.nodes[0]) == ANY

    def take(self, positions: IntArray | slice) -> Labels:
        return Labels(self.nodes[positions], self.sources[positions])

    def at(self, dim: int, rank: int) -> Labels:
        """Return the labels of one axis with the rank of the tensor."""
        column = [-1 if d == dim else 1 for d in range(rank)]
        return Labels(self.nodes.reshape(column), self.sources.reshape(column))

    def flat(self) -> Labels:
        """Return the labels of the only axis along which units differ."""
        return Labels(self.nodes.reshape(-1), self.sources.reshape(-1))

    def without_zero(self) -> Labels:
        """Return the same units with values that are not zero when gated."""
        return Labels(self.nodes, np.full(self.size, NOT_ZERO, dtype=np.int64))

    def same(self, other: Labels) -> bool:
        return np.array_equal(self.nodes, other.nodes) and np.array_equal(self.sources, other.sources)


def uniform(size: int, source: int = NOT_ZERO, numbers: frozenset[Held] = frozenset()) -> Labels:
    """Return labels of an axis along which the value is constant."""
    return Labels(np.full(size, ANY, dtype=np.int64), np.full(size, source, dtype=np.int64), numbers)


def joined(parts: Sequence[Labels | None]) -> Labels | None:
    """Return the labels of concatenated axes; None if one of them is an ordinary axis."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Labels(np.concatenate([part.nodes for part in known]), np.concatenate([part.sources for part in known]))


def aligned(array: IntArray, rank: int) -> IntArray:
    """Return the array with axes of size 1 in front, as in broadcasting."""
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def without_repeats(array: IntArray, *, first: int = 0) -> IntArray:
    """Return the array with size 1 along every axis, from `first` on, along which it is constant."""
    for dim in range(first, array.ndim):
        line = array.take([0], dim)
        if array.shape[dim] > 1 and (array == line).all():
            array = line
    return array


def constant(shape: Sequence[int]) -> tuple[Labels | None, ...]:
    """Return labels of the axes of a tensor whose values are all equal."""
    return tuple(uniform(size) if size > 1 else None for size in shape)


@dataclass(frozen=True, eq=False)
class Entry:
    """One parameter, buffer or other tensor that modules hold, with all of its names."""

    names: tuple[str, ...]  # state-dict keys, or names of constants
    shape: tuple[int, ...]  # of the dense tensor
    is_parameter: bool  # False for buffers, which are cut but never gated
    number: int  # position in `Tracer.entries`
    first: tuple[int | None, ...]  # first node of each axis; None if the axis has one position
    constants: tuple[Constant, ...] = ()  # places in modules, if it is not part of the state


@dataclass(frozen=True, eq=False)
class TensorLabels:
    """Labels of a tensor in a trace."""

    axes: tuple[Labels | None, ...]
    """Labels of each axis; None for an ordinary axis such as batch, time or space, and for the axes of `joint`."""
    entry: Entry | None = None  # the entry that the tensor is or rearranges, if there is one
    parts: tuple[TensorLabels, ...] | None = None
    """Parts with different units, stacked along axis 0 (the last states of the layers of an LSTM); `axes` are then None."""
    joint: Labels | None = None  # labels that vary along two axes or more, of the rank of the tensor
    mixed: IntArray | None = None
    """Nodes of units that this tensor mixes (weights averaged over heads): operators that use it make them unprunable."""
    from_state: bool = False  # whether the tensor was computed from entries alone, such as the weight of a parametrized layer

    @property
    def has_units(self) -> bool:
        if self.parts is not None or self.joint is not None or self.mixed is not None:
            return True
        return any(axis is not None and not axis.is_uniform for axis in self.axes)

    @property
    def units(self) -> tuple[Labels | None, ...]:
        """Labels of the axes that carry units; None for ordinary axes and constant values."""
        return tuple(None if axis is None or axis.is_uniform else axis for axis in self.axes)

    def without_zero(self) -> TensorLabels:
        """Return the units of a computed tensor whose values are not zero when gated."""
        return TensorLabels(tuple(None if axis is None else axis.without_zero() for axis in self.units))

    def all_nodes(self) -> IntArray:
        found = [labels.nodes.reshape(-1) for labels in (*self.axes, self.joint) if labels is not None]
        found += [part.all_nodes() for part in self.parts or ()]
        found += [] if self.mixed is None else [self.mixed]
        nodes: IntArray = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
        return nodes[nodes >= 0]

    def with_axis(self, dim: int, labels: Labels | None) -> TensorLabels:
        return replace(self, axes=tuple(labels if d == dim else axis for d, axis in enumerate(self.axes)))

    def dropped(self, gone: Collection[int]) -> TensorLabels:
        """Return the labels without some axes, along which joint ones do not vary."""
        axes = tuple(gone)
        joint = self.joint and Labels(self.joint.nodes.squeeze(axes), self.joint.sources.squeeze(axes))
        return replace(self, axes=tuple(axis for d, axis in enumerate(self.axes) if d not in gone), joint=joint)

    def collapsed(self) -> TensorLabels:
        """Convert joint labels that vary along one axis only into labels of that axis."""
        if self.joint is None or len(self.joint.dims) > 1:
            return self
        alone = replace(self, joint=None)
        for dim in self.joint.dims:
            alone = alone.with_axis(dim, self.joint.flat())
        return alone

    def computed(self) -> TensorLabels:
        """Return these labels without the link to a state entry, for a tensor that is computed from it."""
        return self if self.entry is None else replace(self, entry=None)

    def same(self, other: TensorLabels | None) -> bool:
        if other is None or len(self.axes) != len(other.axes) or self.parts is not None or other.parts is not None:
            return False
        pairs = zip((*self.axes, self.joint), (*other.axes, other.joint), strict=True)
        return all(a is b or (a is not None and b is not None and a.same(b)) for a, b in pairs)


_MARK = "_sparsekit_from_inputs"
"""Marks tensors that a pass computes from the inputs of the model: others without units are constants in the code."""


def mark_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for tensor in tree_leaves([args, dict(kwargs)]):
        if isinstance(tensor, Tensor):
            vars(tensor)[_MARK] = True


def mark_results(outputs: Iterable[Tensor], given: Iterable[Tensor]) -> None:
    if any(map(is_from_inputs, given)):
        for tensor in outputs:
            vars(tensor)[_MARK] = True


def is_from_inputs(tensor: Tensor) -> bool:
    return _MARK in vars(tensor)
