"""Cells: boxes that together make up the unit cube, split where it pays; each knows which ones it faces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

NARROWEST = 1e-7
"""The narrowest side that a split leaves, as a share of the space: floats are still far apart, and so are the arms."""
DEEPEST = 64
"""Cells that were split more often than this count as split so often."""


def grow(owner: Any, names: Sequence[str], size: int) -> None:
    """Make arrays of an object so long along their first axis; what is new is 0."""
    for name in names:
        array = getattr(owner, name)
        longer = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
        longer[: len(array)] = array
        setattr(owner, name, longer)


class Cells:
    """A partition of the unit cube. Each cell has a number, a depth, and on each of its sides a cell that it faces there.

    On an interval these are its neighbours. In a box a side may touch many cells, of which one is known: that which was split
    off there last, or which the two had in common before a split. -1 stands for the border of the cube.
    """

    def __init__(self, count: int, axes: int, rng: np.random.Generator) -> None:
        """Begin with at least `count` equal cells in random order.

        Args:
            count: The axes are cut one after the other, the first ones first, until there are so many.
            axes: Number of axes of the cube.
            rng: Draws the order.
        """
        cuts = [1] * axes
        while math.prod(cuts) < count:
            cuts[cuts.index(min(cuts))] += 1
        self.size = size = math.prod(cuts)
        places = np.indices(cuts).reshape(axes, size).T[rng.permutation(size)]
        self.low: Floats = places / cuts
        self.high: Floats = (places + 1) / cuts
        # How often the cell was split, and how often that which it was split off from had been when it was.
        self.depth: Integers = np.zeros(size, dtype=np.int64)
        self.born: Integers = np.zeros(size, dtype=np.int64)
        # The largest depth.
        self.deepest = 0
        # From which cell each was split off; itself, if from none.
        self.parent: Integers = np.arange(size)
        # Columns 2 axis and 2 axis + 1: below and above.
        self.facing: Integers = np.full((size, 2 * axes), -1)
        numbers = np.full([parts + 2 for parts in cuts], -1)
        numbers[tuple(places.T + 1)] = self.parent
        for side in range(2 * axes):
            beside = places + 1
            beside[:, side // 2] += 1 if side % 2 else -1
            self.facing[:, side] = numbers[tuple(beside.T)]

    def reserve(self, size: int) -> None:
        grow(self, ("low", "high", "depth", "born", "parent", "facing"), size)

    def halves(self, cell: int) -> tuple[int, float] | None:
        """The longest axis and its middle; None where the cell is too narrow to be halved."""
        low, high = self.low[cell].tolist(), self.high[cell].tolist()
        sides = [end - start for start, end in zip(low, high)]
        longest = max(sides)
        axis = sides.index(longest)
        return (axis, 0.5 * (low[axis] + high[axis])) if longest >= 2.0 * NARROWEST else None

    def split(self, cell: int, axis: int, cut: float, *, keeps_low: bool) -> int:
        """Cut a cell in two; there must be room in the arrays.

        Args:
            cell: Keeps one side.
            axis: Which coordinate is cut.
            cut: Where, strictly within the cell.
            keeps_low: The cell keeps the lower side.

        Returns:
            The number of the new cell, which is the other side.
        """
        new = self.size
        self.size = new + 1
        self.low[new], self.high[new] = self.low[cell], self.high[cell]
        if keeps_low:
            self.high[cell, axis] = self.low[new, axis] = cut
        else:
            self.low[cell, axis] = self.high[new, axis] = cut
        depth = min(self.depth.item(cell) + 1, DEEPEST)
        self.depth[cell] = self.depth[new] = self.born[new] = depth
        self.deepest = max(self.deepest, depth)
        self.parent[new] = cell
        self.facing[new] = self.facing[cell]
        away, back = 2 * axis + keeps_low, 2 * axis + 1 - keeps_low
        self.facing[cell, away] = new
        self.facing[new, back] = cell
        beyond = int(self.facing[new, away])
        if beyond >= 0 and self.facing[beyond, back] == cell:
            self.facing[beyond, back] = new
        return new

    def find(self, point: Floats) -> int:
        """The cell that holds a point; on a border, the first one."""
        inside = (self.low[: self.size] <= point) & (point <= self.high[: self.size])
        return int(inside.all(axis=1).argmax())
