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


def grid(count: int, axes: int) -> list[tuple[list[float], list[float]]]:
    """At least `count` equal boxes: their lowest and highest corners, in order.

    Args:
        count: The axes are cut one after the other, the first ones first, until there are so many.
        axes: Number of axes of the cube.
    """
    cuts = [1] * axes
    while math.prod(cuts) < count:
        cuts[cuts.index(min(cuts))] += 1
    boxes: list[tuple[list[float], list[float]]] = [([], [])]
    for parts in cuts:
        boxes = [([*low, i / parts], [*high, (i + 1) / parts]) for low, high in boxes for i in range(parts)]
    return boxes


def grown(array: Any, size: int) -> Any:
    """A longer array that begins with this one, the rest 0."""
    longer = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


class Cells:
    """A partition of the unit cube. Each cell has a number, a depth, and on each of its sides a cell that it faces there.

    On an interval these are its neighbours. In a box a side may touch many cells, of which one is known: that which was split
    off there last, or which the two had in common before a split. -1 stands for the border of the cube.
    """

    def __init__(self, boxes: Sequence[tuple[Sequence[float], Sequence[float]]]) -> None:
        """Begin with some boxes.

        Args:
            boxes: Lowest and highest corner of each; together the cube.
        """
        size, axes = len(boxes), len(boxes[0][0])
        self.size = size
        self.low: Floats = np.array([low for low, _ in boxes], dtype=np.float64)
        self.high: Floats = np.array([high for _, high in boxes], dtype=np.float64)
        # How often the cell was split, and how often that which it was split off from had been when it was.
        self.depth: Integers = np.zeros(size, dtype=np.int64)
        self.born: Integers = np.zeros(size, dtype=np.int64)
        # The largest depth.
        self.deepest = 0
        # From which cell each was split off; itself, if from none.
        self.parent: Integers = np.arange(size)
        # Columns 2 axis and 2 axis + 1: below and above.
        self.facing: Integers = np.full((size, 2 * axes), -1)
        for cell in range(size):
            middle = 0.5 * (self.low[cell] + self.high[cell])
            for axis in range(axes):
                for above in (0, 1):
                    beside = middle.copy()
                    beside[axis] = self.high[cell, axis] if above else self.low[cell, axis]
                    beside[axis] += 1e-3 / size * (1.0 if above else -1.0)
                    if 0.0 < beside[axis] < 1.0:
                        self.facing[cell, 2 * axis + above] = self.find(beside)

    def reserve(self, size: int) -> None:
        """Make the arrays so long."""
        for name in ("low", "high", "depth", "born", "parent", "facing"):
            setattr(self, name, grown(getattr(self, name), size))

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
