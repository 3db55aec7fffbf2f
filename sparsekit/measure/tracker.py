"""CostTracker: what a model costs at given widths, and what changes when a group gets wider or narrower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from sparsekit.measure.shapes import Array, Volumes


class Meter(Protocol):
    """A cost that is no sum over the weights, such as the peak of the memory."""

    def at(self, counts: Mapping[str, int]) -> float:
        """The cost where the groups keep `counts` units."""
        ...

    def gain(self, counts: Mapping[str, int], groups: Sequence[str], count: int, limit: float) -> float:
        """How far it leads towards `limit` if each of `groups` keeps `count` units: 0 if it does not help."""
        ...


class CostTracker:
    """Costs at widths that change step by step, by arithmetic on the tensors that a step touches."""

    def __init__(
        self,
        volumes: Volumes,
        factors: Mapping[str, Array],
        counts: Mapping[str, int],
        metrics: Sequence[str],
        meters: Mapping[str, Meter],
    ) -> None:
        """Start at `counts`.

        Args:
            volumes: The tensors that costs are sums over.
            factors: Metric → float (tensors,), what an entry of each costs.
            counts: Group name → units kept, for every group.
            metrics: What is tracked.
            meters: Metric → meter, for the others.
        """
        self.counts = dict(counts)
        self._meters = {name: meter for name, meter in meters.items() if name in metrics}
        self._metrics = tuple(name for name in metrics if name not in self._meters)
        self._volumes = volumes
        self._factors = np.array([factors[name] for name in self._metrics]).reshape(len(self._metrics), volumes.count)
        self._lengths = volumes.lengths(counts)
        self._entries = volumes.entries(self._lengths)
        self._totals = self._factors @ self._entries
        self._own: dict[tuple[str, ...], Array] = {}

    def _change(self, groups: Sequence[str], count: int) -> tuple[Array, tuple[Any, Array, Array]]:
        """What a step adds to each metric; the tensors that it touches, their lengths and entries after it."""
        key = tuple(groups)
        step = rows, _, entries = self._volumes.step(key, count - self.counts[key[0]], self._lengths)
        if key not in self._own:
            self._own[key] = self._factors[:, rows]
        return self._own[key] @ (entries - self._entries[rows]), step

    def totals(self) -> dict[str, float]:
        """Metric → cost at the present widths."""
        found = dict(zip(self._metrics, self._totals.tolist()))
        return found | {name: meter.at(self.counts) for name, meter in self._meters.items()}

    def change(self, groups: Sequence[str], count: int) -> dict[str, float]:
        """Metric → what would be added (below 0: saved) if each of `groups`, which keep equally many, kept `count` units."""
        found = dict(zip(self._metrics, self._change(groups, count)[0].tolist()))
        after = {**self.counts, **dict.fromkeys(groups, count)}
        return found | {name: meter.at(after) - meter.at(self.counts) for name, meter in self._meters.items()}

    def gain(self, groups: Sequence[str], count: int, limits: Mapping[str, float]) -> float:
        """What the same step saves of the budgets that are exceeded, as shares of these budgets, added up."""
        total = 0.0
        if self._metrics:
            changes = zip(self._metrics, self._totals.tolist(), self._change(groups, count)[0].tolist())
            total -= sum(
                change / max(limits[name], 1e-300) for name, cost, change in changes if cost > limits.get(name, float("inf"))
            )
        for name, meter in self._meters.items():
            if name in limits:
                total += meter.gain(self.counts, groups, count, limits[name]) / max(limits[name], 1e-300)
        return total

    def move(self, groups: Sequence[str], count: int) -> None:
        """Let each of `groups` keep `count` units from now on."""
        change, (rows, lengths, entries) = self._change(groups, count)
        self._totals = self._totals + change
        self._lengths[rows], self._entries[rows] = lengths, entries
        self.counts.update(dict.fromkeys(groups, count))
