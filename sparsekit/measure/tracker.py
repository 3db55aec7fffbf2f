"""CostTracker: what a model costs at given widths, and what changes when a group gets wider or narrower.

The cost of a tensor is a product of its axes, and each axis is a constant plus a number of positions for each unit that is
kept. So the change of one width concerns the tensors on whose axes its units lie, and nothing else has to be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sparsekit.graph.graph import UnitGraph

Axes: TypeAlias = tuple[tuple[int, Mapping[str, int]], ...]
"""Of each axis its constant part, and group name → positions per unit."""


def length(axis: tuple[int, Mapping[str, int]], counts: Mapping[str, int]) -> int:
    """The length of an axis where the groups keep `counts` units."""
    return axis[0] + sum(each * counts[group] for group, each in axis[1].items())


@dataclass(frozen=True)
class Product:
    """A number that is a product of axes, such as the entries of a weight.

    Args:
        axes: The lengths.
        factors: Metric → what one unit of the product costs.
    """

    axes: Axes
    factors: Mapping[str, float]


@dataclass(frozen=True)
class Polynomials:
    """Costs that are sums of products.

    Args:
        products: Those in which units lie on at least one axis.
        constants: Metric → the part that no width changes.
    """

    products: tuple[Product, ...]
    constants: Mapping[str, float]


class Meter(Protocol):
    """A cost that is no polynomial, such as the peak of the memory."""

    def at(self, counts: Mapping[str, int]) -> float:
        """The cost where the groups keep `counts` units."""
        ...

    def gain(self, before: Mapping[str, int], after: Mapping[str, int], limit: float) -> float:
        """How far the step from `before` to `after` leads towards `limit`: 0 if it does not help."""
        ...


def tensor_axes(graph: UnitGraph, name: str) -> Axes:
    """The axes of the tensor under a key."""
    axes: list[tuple[int, dict[str, int]]] = [(size, {}) for size in graph.shapes[name]]
    for group, piece in graph.slices_of.get(name, ()):
        whole, spans = axes[piece.dim]
        spans[group] = spans.get(group, 0) + piece.span
        axes[piece.dim] = whole - piece.span * graph.groups[group].size, spans
    return tuple(axes)


def tensor_products(graph: UnitGraph, factors: Mapping[str, Mapping[str, float]]) -> tuple[list[Product], dict[str, float]]:
    """The entries of tensors as products.

    Args:
        graph: The units.
        factors: State-dict key → metric → what each entry costs; keys left out cost nothing.

    Returns:
        The products that units change, and metric → the sum of all others.
    """
    products: list[Product] = []
    constants: dict[str, float] = {}
    for name, each in factors.items():
        axes = tensor_axes(graph, name)
        if any(spans for _, spans in axes):
            products.append(Product(axes, each))
        else:
            entries = math.prod(graph.shapes[name])
            for metric, factor in each.items():
                constants[metric] = constants.get(metric, 0.0) + factor * entries
    return products, constants


class CostTracker:
    """Costs at widths that change step by step, by arithmetic on the tensors that a step touches."""

    def __init__(
        self,
        polynomials: Polynomials,
        counts: Mapping[str, int],
        metrics: Sequence[str],
        meters: Mapping[str, Meter] | None = None,
    ) -> None:
        """Start at `counts`.

        Args:
            polynomials: Of all metrics but those of `meters`.
            counts: Group name → units kept, for every group.
            metrics: What is tracked.
            meters: Metric → meter.
        """
        self.counts = dict(counts)
        self._meters = {name: meter for name, meter in (meters or {}).items() if name in metrics}
        self._metrics = tuple(name for name in metrics if name not in self._meters)
        self._lengths: list[list[int]] = []
        self._factors: list[tuple[float, ...]] = []
        self._linear: dict[str, list[float]] = {name: [0.0] * len(self._metrics) for name in counts}
        self._touched: dict[str, list[tuple[int, tuple[tuple[int, int], ...]]]] = {name: [] for name in counts}
        self._totals = [polynomials.constants.get(name, 0.0) for name in self._metrics]
        for product in polynomials.products:
            self._add(product)
        self._joint: dict[tuple[str, ...], tuple[list[tuple[int, tuple[tuple[int, int], ...]]], list[float]]] = {}

    def _add(self, product: Product) -> None:
        factors = tuple(product.factors.get(metric, 0.0) for metric in self._metrics)
        if not any(factors):
            return
        lengths = [length(axis, self.counts) for axis in product.axes]
        entries = math.prod(lengths)
        self._totals = [total + factor * entries for total, factor in zip(self._totals, factors)]
        wide = [dim for dim, (_, spans) in enumerate(product.axes) if spans]
        if len(wide) == 1:  # linear in each of its groups
            rest = math.prod(size for dim, size in enumerate(lengths) if dim != wide[0])
            for group, each in product.axes[wide[0]][1].items():
                linear = self._linear[group]
                for place, factor in enumerate(factors):
                    linear[place] += factor * rest * each
            return
        rest = math.prod(size for dim, size in enumerate(lengths) if dim not in wide)
        number = len(self._lengths)
        self._lengths.append([lengths[dim] for dim in wide])
        self._factors.append(tuple(factor * rest for factor in factors))
        groups = {group for dim in wide for group in product.axes[dim][1]}
        for group in sorted(groups):
            axes = tuple((axis, product.axes[dim][1][group]) for axis, dim in enumerate(wide) if group in product.axes[dim][1])
            self._touched[group].append((number, axes))

    def _parts(self, groups: Sequence[str]) -> tuple[list[tuple[int, tuple[tuple[int, int], ...]]], list[float]]:
        """The products that several groups touch together, and what one unit of each adds beside them."""
        key = tuple(groups)
        if key not in self._joint:
            together: dict[int, dict[int, int]] = {}
            linear = [0.0] * len(self._metrics)
            for group in key:
                linear = [total + each for total, each in zip(linear, self._linear[group])]
                for number, axes in self._touched[group]:
                    own = together.setdefault(number, {})
                    for axis, each in axes:
                        own[axis] = own.get(axis, 0) + each
            self._joint[key] = [(number, tuple(axes.items())) for number, axes in together.items()], linear
        return self._joint[key]

    def _changes(self, groups: Sequence[str], count: int) -> list[float]:
        touched, linear = self._parts(groups)
        step = count - self.counts[groups[0]]
        changes = [each * step for each in linear]
        for number, axes in touched:
            lengths = self._lengths[number]
            before = math.prod(lengths)
            after = lengths.copy()
            for axis, each in axes:
                after[axis] += each * step
            difference = math.prod(after) - before
            for place, factor in enumerate(self._factors[number]):
                changes[place] += factor * difference
        return changes

    def totals(self) -> dict[str, float]:
        """Metric → cost at the present widths."""
        found = dict(zip(self._metrics, self._totals))
        found.update((name, meter.at(self.counts)) for name, meter in self._meters.items())
        return found

    def change(self, groups: Sequence[str], count: int) -> dict[str, float]:
        """Metric → what would be added (below 0: saved) if each of `groups`, which keep equally many, kept `count` units."""
        found = dict(zip(self._metrics, self._changes(groups, count)))
        if self._meters:
            after = {**self.counts, **dict.fromkeys(groups, count)}
            found.update((name, meter.at(after) - meter.at(self.counts)) for name, meter in self._meters.items())
        return found

    def gain(self, groups: Sequence[str], count: int, limits: Mapping[str, float]) -> float:
        """What the same step saves of the budgets that are exceeded, as shares of these budgets, added up."""
        changes = self._changes(groups, count)
        total = 0.0
        for place, metric in enumerate(self._metrics):
            if metric in limits and self._totals[place] > limits[metric]:
                total -= changes[place] / max(limits[metric], 1e-300)
        if self._meters:
            after = {**self.counts, **dict.fromkeys(groups, count)}
            for name, meter in self._meters.items():
                if name in limits:
                    total += meter.gain(self.counts, after, limits[name]) / max(limits[name], 1e-300)
        return total

    def move(self, groups: Sequence[str], count: int) -> None:
        """Let each of `groups` keep `count` units from now on."""
        self._totals = [total + change for total, change in zip(self._totals, self._changes(groups, count))]
        step = count - self.counts[groups[0]]
        for number, axes in self._parts(groups)[0]:
            for axis, each in axes:
                self._lengths[number][axis] += each * step
        self.counts.update(dict.fromkeys(groups, count))
