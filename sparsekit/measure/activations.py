"""How calls shrink with the groups if no weight shows it, measured from the shapes of narrow passes.

Attention maps shrink with their heads. A computed weight is multiplied as an activation is, and shrinks with two groups or
more. A layer over tokens followed by channels is used at fewer positions.

Shapes are assumed to be affine in the numbers of units. That holds for all exact cuts: an axis of units, several of them side
by side, an axis flattened with others.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations, count
from typing import Any, TypeAlias

import torch
from torch import nn

from sparsekit.errors import TraceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.flops import Product, Recorder, record_pass
from sparsekit.measure.volumes import Extents
from sparsekit.surgery.rebuild import narrow_module

_Shapes: TypeAlias = list[tuple[int, ...]]
_Spans: TypeAlias = list[list[dict[str, float]]]
"""Shape → axis → width → positions of each of its units."""


@dataclass(frozen=True)
class Lengths:
    """A product of whole numbers: factor · Π (whole + Σ each · units kept); of tied groups, the first name."""

    factor: Fraction
    axes: Extents

    def at(self, counts: Mapping[str, int]) -> Fraction:
        lengths = (whole + sum(each * counts[group] for group, each in spans.items()) for whole, spans in self.axes)
        return self.factor * math.prod(int(length) for length in lengths)


def measure_shrinkage(
    model: nn.Module, graph: UnitGraph, dense: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, Lengths]:
    """Return number of a call → its positions, or the FLOPs of a product between activations; none for calls that do not
    change.

    A call that the lengths of narrow passes do not explain counts as unchanged, so that costs are then too high and never too
    low. `dense` is a pass of the model.
    """
    lost = {tied[0]: _half(graph, tied) for tied in graph.tied_sets}

    @cache
    def record(halved: frozenset[str]) -> Recorder | None:
        """Run the model with half of some widths; None if it fails, such as by a normalization that refuses so little."""
        keep = {name: torch.arange(graph.groups[name].size) < kept for name, kept in _counts(graph, lost, halved).items()}
        try:
            return record_pass(narrow_module(model, graph, keep), args, kwargs) if halved else dense
        except (TraceError, RuntimeError, ValueError, TypeError, IndexError):
            return None

    narrow = record(frozenset(lost)) if lost else None
    if narrow is None:
        return {}
    # A narrow layer may use its weights by other calls than a dense one, and still make the same products.
    return {
        place: lengths
        for of_weights in (False, True)
        for place, lengths in _changes(dense, narrow, record, graph, lost, of_weights=of_weights).items()
    }


def _changes(
    dense: Recorder,
    narrow: Recorder,
    record: Callable[[frozenset[str]], Recorder | None],
    graph: UnitGraph,
    lost: Mapping[str, int],
    *,
    of_weights: bool,
) -> dict[int, Lengths]:
    """Return the same for calls that read a weight, or for products; `narrow` is a pass with all widths halved."""
    own, halves = _calls(dense, of_weights), _calls(narrow, of_weights)
    keys = [call.key for call in own.values()]
    if [call.key for call in halves.values()] != keys:
        return {}
    after = {place: narrow.amount(call) for place, call in zip(own, halves.values())}
    changed = [place for place, call in own.items() if dense.amount(call) != after[place]]

    def shapes(halved: Collection[str]) -> _Shapes | None:
        recorder = record(frozenset(halved))
        calls = {} if recorder is None else _calls(recorder, of_weights)
        if [call.key for call in calls.values()] != keys:
            return None
        return [call.lengths for place, call in zip(own, calls.values()) if place in changed]

    found = {}
    for place, spans in zip(changed, _spans(shapes, lost) if changed else ()):
        told = _lengths(dense.amount(own[place]), own[place].lengths, spans, graph)
        if told is not None and told.at(_counts(graph, lost, lost)) == after[place]:
            found[place] = told
    return found


def _counts(graph: UnitGraph, lost: Mapping[str, int], halved: Collection[str]) -> dict[str, int]:
    """Return group name → units kept if some widths, by the first name of their tied groups, are halved."""
    counts = {name: group.size for name, group in graph.groups.items()}
    for tied in graph.tied_sets:
        if tied[0] in halved:
            counts |= dict.fromkeys(tied, min(graph.groups[name].size for name in tied) - lost[tied[0]])
    return counts


def _half(graph: UnitGraph, tied: Sequence[str]) -> int:
    """Return how many units less are half of a width. Two stay where there are more: with one, a copy may become a view."""
    size = min(graph.groups[name].size for name in tied)
    return size - max(min(2, size - 1), size // 2, *(graph.groups[name].least for name in tied))


def _calls(recorder: Recorder, of_weights: bool) -> dict[int, Product]:
    return {place: call for place, call in enumerate(recorder.calls) if (call.key is not None) == of_weights}


def _lengths(amount: Fraction, shape: Sequence[int], spans: Sequence[Mapping[str, float]], graph: UnitGraph) -> Lengths | None:
    """Return the lengths of a shape, with whole positions for each unit; None if there are others."""
    axes, product = [], 1
    for size, own in zip(shape, spans, strict=True):
        fixed = size - sum(each * graph.groups[name].size for name, each in own.items())
        if any(each != int(each) for each in (fixed, *own.values())):
            return None
        if own:
            axes.append((int(fixed), {name: int(each) for name, each in own.items()}))
            product *= size
    return Lengths(amount / max(1, product), tuple(axes))


def _spans(shapes: Callable[[Collection[str]], _Shapes | None], lost: Mapping[str, int]) -> _Spans:
    """Return how the axes of shapes follow the widths: `shapes` lists them with half of some widths.

    If there are other shapes or ranks with a width halved, that width is assumed to change no shape.
    """
    dense = shapes(())
    assert dense is not None

    def shrinks(halved: Collection[str]) -> _Shapes | None:
        found = shapes(halved)
        if found is None or [len(shape) for shape in found] != [len(shape) for shape in dense]:
            return None
        return [tuple(a - b for a, b in zip(one, other, strict=True)) for one, other in zip(dense, found, strict=True)]

    spans = _decoded(dense, lost, shrinks)
    if spans is None:
        spans = [[{} for _ in shape] for shape in dense]
        for leader, fewer in lost.items():
            less = shrinks({leader}) if fewer else None
            for place, axes in enumerate(less or ()):
                for dim, each in enumerate(axes):
                    if each > 0:
                        spans[place][dim][leader] = each / fewer
    return spans


def _decoded(dense: _Shapes, lost: Mapping[str, int], shrinks: Callable[[Collection[str]], _Shapes | None]) -> _Spans | None:
    """Return the same from few passes, if no axis follows more than one width; None if one does.

    Each width is halved in half of the passes, in another half than every other width, so that the passes with a shorter axis
    name its width. Two widths together would name more than half of them.
    """
    number = next(n for n in count(2) if math.comb(n, n // 2) >= len(lost))
    codes = dict(zip(combinations(range(number), number // 2), lost))
    if number >= len(lost):
        return None
    passes = []
    for place in range(number):
        found = shrinks({leader for code, leader in codes.items() if place in code})
        if found is None:
            return None
        passes.append(found)
    spans: _Spans = [[{} for _ in shape] for shape in dense]
    for shape, axes in enumerate(spans):
        for dim, own in enumerate(axes):
            less = [found[shape][dim] for found in passes]
            code = tuple(place for place, each in enumerate(less) if each)
            if code and (code not in codes or len({less[place] for place in code}) > 1):
                return None
            if code:
                own[codes[code]] = less[code[0]] / lost[codes[code]]
    return spans
