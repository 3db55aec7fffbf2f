"""Cells: boxes that together make up the unit cube, halved where it pays and merged again where it does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsekit.bandit.smoothness import Floats
from sparsekit.errors import InvalidValueError

__all__ = ["Cells", "grid"]

NARROWEST = 1e-7
"""The narrowest side that a split leaves, as a share of the space: floats are still far apart, and so are the arms."""


def grid(count: int, axes: int) -> list[tuple[list[float], list[float]]]:
    """At least `count` equal boxes: their lowest and highest corners, in order.

    Args:
        count: The axes are cut one after the other, the first ones first, until there are so many.
        axes: Of the cube.
    """
    cuts = [1] * axes
    while math.prod(cuts) < count:
        cuts[cuts.index(min(cuts))] += 1
    boxes: list[tuple[list[float], list[float]]] = [([], [])]
    for parts in cuts:
        boxes = [([*low, i / parts], [*high, (i + 1) / parts]) for low, high in boxes for i in range(parts)]
    return boxes


class Cells:
    """A partition of the unit cube. Each cell has a number, and remembers from which other one it was split off.

    A cell that has not been split since can be merged again with the one that it came from, if that one has not been split
    since either: `joinable`.
    """

    def __init__(self, boxes: Sequence[tuple[Sequence[float], Sequence[float]]], capacity: int) -> None:
        """Begin with some boxes, which can never be merged.

        Args:
            boxes: Lowest and highest corner of each; together the cube.
            capacity: The largest number of cells.
        """
        axes = len(boxes[0][0])
        self.size = len(boxes)
        self.low: Floats = np.zeros((capacity, axes))
        self.high: Floats = np.zeros((capacity, axes))
        for place, (low, high) in enumerate(boxes):
            self.low[place], self.high[place] = low, high
        # From which cell each was split off (-1: none), the box that the two made up, and the cells split off from it.
        self.parent = [-1] * self.size
        self.before: list[tuple[list[float], list[float]] | None] = [None] * self.size
        self.children: list[list[int]] = [[] for _ in boxes]

    def halves(self, cell: int, lengths: Floats) -> tuple[int, float] | None:
        """The axis that is longest in correlation lengths, and its middle; None where the cell is too narrow to be halved."""
        low, high = self.low[cell], self.high[cell]
        axis = int(((high - low) / lengths).argmax()) if len(low) > 1 else 0
        start, end = float(low[axis]), float(high[axis])
        return (axis, 0.5 * (start + end)) if end - start >= 2.0 * NARROWEST else None

    def split(self, cell: int, axis: int, cut: float, *, keeps_low: bool) -> int:
        """Cut a cell in two.

        Args:
            cell: Keeps one side.
            axis: Which coordinate is cut.
            cut: Where, strictly within the cell.
            keeps_low: The cell keeps the lower side.

        Returns:
            The number of the new cell, which is the other side.
        """
        new = self.size
        self.before.append((self.low[cell].tolist(), self.high[cell].tolist()))
        self.low[new], self.high[new] = self.low[cell], self.high[cell]
        if keeps_low:
            self.high[cell, axis] = self.low[new, axis] = cut
        else:
            self.low[cell, axis] = self.high[new, axis] = cut
        self.parent.append(cell)
        self.children.append([])
        self.children[cell].append(new)
        self.size = new + 1
        return new

    def find(self, point: Floats) -> int:
        """The cell that holds a point; on a border, the first one."""
        inside = (self.low[: self.size] <= point) & (point <= self.high[: self.size])
        return int(inside.all(axis=1).argmax())

    def joinable(self) -> list[int]:
        """The cells that can be merged with the one that they were split off from."""
        return [
            cell
            for cell, parent in enumerate(self.parent)
            if parent >= 0 and not self.children[cell] and self.children[parent][-1] == cell
        ]

    def join(self, cell: int) -> int:
        """Give a joinable cell back to the one that it came from.

        Returns:
            That one. The cell is empty until `keep` takes it away.
        """
        parent, box = self.parent[cell], self.before[cell]
        assert box is not None
        self.low[parent], self.high[parent] = box
        self.children[parent].pop()
        self.parent[cell] = -1
        return parent

    def keep(self, cells: Sequence[int]) -> None:
        """Keep these cells alone, in this order; the others must have been joined."""
        place = {old: new for new, old in enumerate(cells)}
        size = len(cells)
        self.low[:size], self.high[:size] = self.low[cells], self.high[cells]
        self.parent = [place.get(self.parent[old], -1) for old in cells]
        self.before = [self.before[old] for old in cells]
        self.children = [[place[child] for child in self.children[old]] for old in cells]
        self.size = size

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "low": self.low[: self.size].tolist(),
            "high": self.high[: self.size].tolist(),
            "parent": list(self.parent),
            "before": [None if box is None else [list(corner) for corner in box] for box in self.before],
            "children": [list(children) for children in self.children],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], capacity: int) -> Cells:
        """The cells that `state_dict` described.

        Raises:
            InvalidValueError: they are too many, do not lie in the unit cube, or do not belong together.
        """
        boxes = list(zip(state["low"], state["high"], strict=True))
        if not 0 < len(boxes) <= capacity:
            raise InvalidValueError(f"a state must have 1 to {capacity} cells, got {len(boxes)}")
        made = cls(boxes, capacity)
        made.parent = [int(parent) for parent in state["parent"]]
        made.before = [None if box is None else (list(map(float, box[0])), list(map(float, box[1]))) for box in state["before"]]
        made.children = [[int(child) for child in children] for children in state["children"]]
        size = made.size
        low, high = made.low[:size], made.high[:size]
        if not bool(((low >= 0.0) & (low < high) & (high <= 1.0)).all()):
            raise InvalidValueError("the cells of a state must lie in the unit cube, each with low below high")
        lengths = {len(made.parent), len(made.before), len(made.children)}
        numbers = [*made.parent, *(child for children in made.children for child in children)]
        if lengths != {size} or not all(-1 <= number < size for number in numbers):
            raise InvalidValueError("the cells of a state must name one another by their numbers")
        return made
