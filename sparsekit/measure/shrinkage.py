"""Costs as a function of widths. Shapes of weights follow from the graph; sizes of calls are measured in narrow passes.

Narrow passes are needed because the graph describes weights only. Attention maps shrink with the number of heads, computed
weights, which count as activations, shrink with several groups, and token mixing is applied to fewer channels.

Shapes are assumed to be affine in the numbers of units. This holds for all exact cuts: an axis of units, several groups
concatenated on one axis, or an axis that is flattened with others.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from itertools import combinations, count, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sparsekit.errors import TraceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.flops import Recorder, record_pass
from sparsekit.surgery.rebuild import narrow_module

Array: TypeAlias = npt.NDArray[np.float64]

Extents: TypeAlias = tuple[tuple[float, Mapping[str, float]], ...]
"""A shape as a function of widths. For each axis: its constant part, and group name → positions per kept unit."""

Prices: TypeAlias = Mapping[str, tuple[Array, int]]
"""Metric → price per element of each tensor, float (tensors,), and the divisor of the total."""


class Volumes:
    """Computes the numbers of elements of many tensors at given widths, for all of them at once."""

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
        self._least: Array = np.asarray(self._spans.any(2), dtype=np.float64)  # axes of units keep a position
        self._growth: dict[tuple[str, ...], Array] = {}

    def lengths(self, counts: Mapping[str, int]) -> Array:
        """Return float (tensors, axes): the lengths of all axes if the groups keep `counts` units."""
        return self._fixed + self._spans @ np.array([counts[name] for name in self._groups], dtype=np.float64)

    def entries(self, lengths: Array) -> Array:
        """Return float (tensors,): the numbers of elements, given the `lengths` of all axes."""
        found: Array = np.maximum(np.rint(lengths), self._least).prod(1)
        return found

    def at(self, counts: Mapping[str, int]) -> Array:
        """Return float (tensors,): the numbers of elements if the groups keep `counts` units."""
        return self.entries(self.lengths(counts))

    def growth(self, groups: tuple[str, ...]) -> Array:
        """Return float (tensors, axes): the growth of the axes if each of `groups` gets one more unit."""
        if groups not in self._growth:
            columns = [self._groups.index(name) for name in groups]
            self._growth[groups] = self._spans[:, :, columns].sum(2)
        return self._growth[groups]


class CostTracker:
    """Tracks the costs of a model while its widths change step by step. Made by `CostModel.tracker`."""

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
        """Return metric → change of the cost if each of `groups`, which are tied, kept `count` units."""
        then = self._at(self._after(groups, count))
        return {name: cost - self._totals[name] for name, cost in then.items()}

    def gain(self, groups: Sequence[str], count: int, limits: Mapping[str, float]) -> float:
        """Return the saving of the same step, in shares of each limit, summed over the limits that are still exceeded."""
        change = self.change(groups, count)
        exceeded = (name for name in change if name in limits and self._totals[name] > limits[name])
        return sum(-change[name] / max(limits[name], 1e-300) for name in exceeded)

    def move(self, groups: Sequence[str], count: int) -> None:
        self._set(self._after(groups, count))
        self.counts.update(dict.fromkeys(groups, count))


_Calls: TypeAlias = Sequence[tuple[Fraction, tuple[int, ...]]]
"""Of each call: its amount, as in `Recorder.amount`, and lengths."""


@dataclass(frozen=True)
class Lengths:
    """Positions or FLOPs of a call as a function of widths: factor · Π (whole + Σ each · units kept).

    Of tied groups, only the first occurs.
    """

    factor: Fraction
    axes: Extents

    def at(self, counts: Mapping[str, int]) -> Fraction:
        lengths = (whole + sum(each * counts[group] for group, each in spans.items()) for whole, spans in self.axes)
        return self.factor * math.prod(int(length) for length in lengths)


def measure_shrinkage(
    model: nn.Module, graph: UnitGraph, dense: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, Lengths]:
    """Return index of a call → its positions, or FLOPs of a product between activations, as a function of widths.

    Calls that do not change are absent. So are calls that the lengths in narrow passes do not explain, so that costs are never
    too low. `dense` is the recorded pass of the dense model.
    """
    lost = {tied[0]: _half(graph, tied) for tied in graph.tied_sets}

    @cache
    def record(halved: frozenset[str]) -> Recorder | None:
        """Record a pass with some widths halved. None if the model fails, such as in a norm that needs more values."""
        keep = {name: torch.arange(graph.groups[name].size) < kept for name, kept in _counts(graph, lost, halved).items()}
        try:
            return record_pass(narrow_module(model, graph, keep), args, kwargs) if halved else dense
        except (TraceError, RuntimeError, ValueError, TypeError, IndexError):
            return None

    def calls(halved: Collection[str], *, of_weights: bool) -> _Calls | None:
        """Return the calls with a weight, or the products between activations; None if they differ from the dense pass."""
        recorder = record(frozenset(halved))
        if recorder is None:
            return None
        own, made = ([call for call in r.calls if (call.key is not None) == of_weights] for r in (dense, recorder))
        same = [call.key for call in own] == [call.key for call in made]
        return [(recorder.amount(call), call.lengths) for call in made] if same else None

    found: dict[int, Lengths] = {}
    for of_weights in (False, True):  # a narrow layer may use its weights by other calls, and still make the same products
        places = [place for place, call in enumerate(dense.calls) if (call.key is not None) == of_weights]
        changes = _changes(partial(calls, of_weights=of_weights), lost, graph)
        found |= {places[number]: lengths for number, lengths in changes.items()}
    return found


def _changes(
    calls: Callable[[Collection[str]], _Calls | None], lost: Mapping[str, int], graph: UnitGraph
) -> dict[int, Lengths]:
    """Return index of a changed call → its amount as a function of widths. `calls` measures with some widths halved."""
    whole, narrow = calls(()), calls(lost)
    if whole is None or narrow is None:
        return {}
    changed = [number for number, (before, after) in enumerate(zip(whole, narrow, strict=True)) if before[0] != after[0]]

    def lengths(halved: Collection[str]) -> list[int] | None:
        made = calls(halved)
        if made is None or any(len(made[number][1]) != len(whole[number][1]) for number in changed):
            return None
        return [size for number in changed for size in made[number][1]]

    spans = iter(_spans(lengths, lost) if changed else ())
    found = {}
    for number in changed:
        amount, shape = whole[number]
        told = _lengths(amount, shape, list(islice(spans, len(shape))), graph)
        if told is not None and told.at(_counts(graph, lost, lost)) == narrow[number][0]:
            found[number] = told
    return found


def _counts(graph: UnitGraph, lost: Mapping[str, int], halved: Collection[str]) -> dict[str, int]:
    """Return group name → units kept if some widths are halved. `halved` has the first name of each set of tied groups."""
    counts = {name: group.size for name, group in graph.groups.items()}
    for tied in graph.tied_sets:
        if tied[0] in halved:
            counts |= dict.fromkeys(tied, min(graph.groups[name].size for name in tied) - lost[tied[0]])
    return counts


def _half(graph: UnitGraph, tied: Sequence[str]) -> int:
    """Return how many units to remove to halve a width. Two units stay if possible: with one, a copy may become a view."""
    size = min(graph.groups[name].size for name in tied)
    return size - max(graph.groups[name].rounded(max(min(2, size - 1), size // 2)) for name in tied)


def _lengths(amount: Fraction, shape: Sequence[int], spans: Sequence[Mapping[str, float]], graph: UnitGraph) -> Lengths | None:
    """Return `amount` as a function of widths; None if a unit does not span a whole number of positions."""
    axes, product = [], 1
    for size, own in zip(shape, spans, strict=True):
        fixed = size - sum(each * graph.groups[name].size for name, each in own.items())
        if any(each != int(each) for each in (fixed, *own.values())):
            return None
        if own:
            axes.append((int(fixed), {name: int(each) for name, each in own.items()}))
            product *= size
    return Lengths(amount / max(1, product), tuple(axes))


def _spans(lengths: Callable[[Collection[str]], list[int] | None], lost: Mapping[str, int]) -> list[dict[str, float]]:
    """Return, for each length, first of tied groups → positions per unit. `lengths` measures them with some widths halved.

    If `lengths` returns None, since calls or ranks differ, the halved width is assumed to change no length.
    """
    dense = lengths(())
    assert dense is not None

    def shrinks(halved: Collection[str]) -> list[int] | None:
        found = lengths(halved)
        return None if found is None else [whole - less for whole, less in zip(dense, found, strict=True)]

    spans = _decoded(lost, shrinks)
    if spans is None:
        spans = [{} for _ in dense]
        for leader, fewer in lost.items():
            for own, each in zip(spans, (shrinks({leader}) if fewer else None) or ()):
                own |= {leader: each / fewer} if each > 0 else {}
    return spans


def _decoded(lost: Mapping[str, int], shrinks: Callable[[Collection[str]], list[int] | None]) -> list[dict[str, float]] | None:
    """Return the result of `_spans` from few passes; None if an axis depends on more than one width.

    Each width is halved in a different half of the passes, so the set of passes with a shorter axis identifies its width. An
    axis that depends on two widths is shorter in more than half of the passes.
    """
    number = next(n for n in count(2) if math.comb(n, n // 2) >= len(lost))
    if number >= len(lost):
        return None
    codes = dict(zip(combinations(range(number), number // 2), lost))
    passes = []
    for place in range(number):
        found = shrinks({leader for code, leader in codes.items() if place in code})
        if found is None:
            return None
        passes.append(found)
    spans: list[dict[str, float]] = []
    for less in zip(*passes, strict=True):
        code = tuple(place for place, each in enumerate(less) if each)
        if code and (code not in codes or len({less[place] for place in code}) > 1):
            return None
        spans.append({codes[code]: less[code[0]] / lost[codes[code]]} if code else {})
    return spans
