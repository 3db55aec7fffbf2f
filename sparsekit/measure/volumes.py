"""Costs as functions of the widths: numbers of entries by arithmetic on arrays, and sums over them."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

Extents: TypeAlias = tuple[tuple[float, Mapping[str, float]], ...]
"""A shape that follows the widths: of each axis its constant part, and group name → positions per unit that is kept."""

Prices: TypeAlias = Mapping[str, tuple[Array, int]]
"""Metric → float (tensors,), price of an entry of each tensor, and the divisor of the sum over all."""


class Volumes:
    """The numbers of entries of many tensors at given widths, by arithmetic on all of them at once."""

    def __init__(self, shapes: Sequence[Extents], groups: Sequence[str]) -> None:
        rank = max([1, *map(len, shapes)])
        self._groups = tuple(groups)
        self._fixed: Array = np.ones((len(shapes), rank))
        self._spans: Array = np.zeros((len(shapes), rank, len(self._groups)))
        columns = {name: column for column, name in enumerate(self._groups)}
        for row, axes in enumerate(shapes):
            for dim, (fixed, spans) in enumerate(axes):
                self._fixed[row, dim] = fixed
                for name, each in spans.items():
                    self._spans[row, dim, columns[name]] += each
        self._least: Array = np.asarray(self._spans.any(2), dtype=np.float64)  # an axis of units keeps a position
        self._growth: dict[tuple[str, ...], Array] = {}

    def lengths(self, counts: Mapping[str, int]) -> Array:
        """Return float (tensors, axes)."""
        return self._fixed + self._spans @ np.array([counts[name] for name in self._groups], dtype=np.float64)

    def entries(self, lengths: Array) -> Array:
        """Return float (tensors,): the numbers of entries at such lengths."""
        found: Array = np.maximum(np.rint(lengths), self._least).prod(1)
        return found

    def at(self, counts: Mapping[str, int]) -> Array:
        """Return float (tensors,): the numbers of entries if the groups keep `counts` units."""
        return self.entries(self.lengths(counts))

    def growth(self, groups: tuple[str, ...]) -> Array:
        """Return float (tensors, axes): the growth of the axes if each of `groups` gets one more unit."""
        if groups not in self._growth:
            columns = [self._groups.index(name) for name in groups]
            self._growth[groups] = self._spans[:, :, columns].sum(2)
        return self._growth[groups]


class CostTracker:
    """Costs at widths that change step by step."""

    def __init__(self, volumes: Volumes, prices: Prices, counts: Mapping[str, int]) -> None:
        """Start at `counts`: group name → units kept, for every group."""
        self.counts = dict(counts)
        self._volumes, self._prices = volumes, prices
        self._set(volumes.lengths(counts))

    def _set(self, lengths: Array) -> None:
        self._lengths, self._totals = lengths, self._at(lengths)

    def _at(self, lengths: Array) -> dict[str, float]:
        entries = self._volumes.entries(lengths)
        return {name: float(each @ entries) / scale for name, (each, scale) in self._prices.items()}

    def _after(self, groups: Sequence[str], count: int) -> Array:
        return self._lengths + self._volumes.growth(tuple(groups)) * (count - self.counts[groups[0]])

    def totals(self) -> dict[str, float]:
        return dict(self._totals)

    def change(self, groups: Sequence[str], count: int) -> dict[str, float]:
        """Return metric → change of the cost if each of `groups`, which keep equally many units, kept `count`."""
        then = self._at(self._after(groups, count))
        return {name: cost - self._totals[name] for name, cost in then.items()}

    def gain(self, groups: Sequence[str], count: int, limits: Mapping[str, float]) -> float:
        """Return the saving of the same step in the budgets that are exceeded, as shares of these budgets, added up."""
        change = self.change(groups, count)
        exceeded = (name for name in change if name in limits and self._totals[name] > limits[name])
        return sum(-change[name] / max(limits[name], 1e-300) for name in exceeded)

    def move(self, groups: Sequence[str], count: int) -> None:
        self._set(self._after(groups, count))
        self.counts.update(dict.fromkeys(groups, count))
