"""Costs as functions of the widths: numbers of entries by arithmetic on arrays, and meters that read costs off them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

Axes: TypeAlias = tuple[tuple[float, Mapping[str, float]], ...]
"""A shape that follows the widths: of each axis its constant part, and group name → positions per unit that is kept."""


class Volumes:
    """The numbers of entries of many tensors at given widths, by arithmetic on all of them at once."""

    def __init__(self, shapes: Sequence[Axes], groups: Sequence[str]) -> None:
        """Set up arrays.

        Args:
            shapes: Of the tensors.
            groups: Names of the groups that they follow, of tied ones the first.
        """
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
        """Return float (tensors,): the numbers of entries where the groups keep `counts` units."""
        return self.entries(self.lengths(counts))

    def growth(self, groups: tuple[str, ...]) -> Array:
        """Return float (tensors, axes): by how much the axes grow where each of `groups` gets a unit more."""
        if groups not in self._growth:
            columns = [self._groups.index(name) for name in groups if name in self._groups]
            self._growth[groups] = self._spans[:, :, columns].sum(2)
        return self._growth[groups]


class Meter(ABC):
    """A cost that follows from the numbers of entries of tensors: of `volumes`."""

    volumes: Volumes

    @abstractmethod
    def read(self, entries: Array) -> float:
        """Return the cost where the tensors have `entries`, float (tensors,)."""

    def gain(self, now: Array, then: Array, limit: float) -> float:
        """Return how far a step from one number of entries to another leads towards a `limit` that is exceeded."""
        del limit
        return self.read(now) - self.read(then)

    def at(self, counts: Mapping[str, int]) -> float:
        """Return the cost where the groups keep `counts` units."""
        return self.read(self.volumes.at(counts))


class Sum(Meter):
    """A cost that is a sum over the tensors: `factors`, float (tensors,), is what an entry of each costs, times `scale`."""

    def __init__(self, volumes: Volumes, factors: Array, scale: int = 1) -> None:
        self.volumes, self.factors, self.scale = volumes, factors, scale

    def read(self, entries: Array) -> float:
        return float(self.factors @ entries) / self.scale


class CostTracker:
    """Costs at widths that change step by step."""

    def __init__(self, meters: Mapping[str, Meter], counts: Mapping[str, int]) -> None:
        """Start at `counts`: group name → units kept, for every group. `meters` are metric → meter."""
        self.counts = dict(counts)
        self._meters = dict(meters)
        self._set({meter.volumes: meter.volumes.lengths(counts) for meter in meters.values()})

    def _set(self, lengths: dict[Volumes, Array]) -> None:
        self._lengths = lengths
        self._entries = {volumes: volumes.entries(own) for volumes, own in lengths.items()}
        self._totals = {name: meter.read(self._entries[meter.volumes]) for name, meter in self._meters.items()}

    def _after(self, groups: Sequence[str], count: int) -> dict[Volumes, Array]:
        """Return the lengths after a step."""
        more = count - self.counts[groups[0]]
        return {volumes: own + volumes.growth(tuple(groups)) * more for volumes, own in self._lengths.items()}

    def totals(self) -> dict[str, float]:
        """Return metric → cost at the present widths."""
        return dict(self._totals)

    def change(self, groups: Sequence[str], count: int) -> dict[str, float]:
        """Return metric → what would be added (below 0: saved) if each of `groups`, which keep equally many, kept `count`
        units.
        """
        then = {volumes: volumes.entries(lengths) for volumes, lengths in self._after(groups, count).items()}
        return {name: meter.read(then[meter.volumes]) - self._totals[name] for name, meter in self._meters.items()}

    def gain(self, groups: Sequence[str], count: int, limits: Mapping[str, float]) -> float:
        """Return what the same step saves of the budgets that are exceeded, as shares of these budgets, added up."""
        then = {volumes: volumes.entries(lengths) for volumes, lengths in self._after(groups, count).items()}
        return sum(
            meter.gain(self._entries[meter.volumes], then[meter.volumes], limits[name]) / max(limits[name], 1e-300)
            for name, meter in self._meters.items()
            if name in limits and self._totals[name] > limits[name]
        )

    def move(self, groups: Sequence[str], count: int) -> None:
        """Let each of `groups` keep `count` units from now on."""
        self._set(self._after(groups, count))
        self.counts.update(dict.fromkeys(groups, count))
