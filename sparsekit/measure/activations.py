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
from itertools import combinations, count
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.errors import TraceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.flops import Product, Recorder, record_pass
from sparsekit.measure.volumes import Extents
from sparsekit.surgery.rebuild import narrow_module


@dataclass(frozen=True)
class Lengths:
    """An integer as a product of lengths: factor · Π (whole + Σ each · units kept).

    Args:
        factor: The number if all lengths are 1.
        axes: The lengths; tied groups go by the first of their names.
    """

    factor: Fraction
    axes: Extents

    def at(self, counts: Mapping[str, int]) -> Fraction:
        lengths: list[int] = [_length(axis, counts) for axis in self.axes]
        return self.factor * math.prod(lengths)


def measure_shrinkage(
    model: nn.Module, graph: UnitGraph, dense: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, Lengths]:
    """Return number of a call → its positions, or the FLOPs of a product between activations; none for calls that do not
    change.

    A call that the lengths of narrow passes do not explain counts as unchanged, so that costs are then too high and never too
    low. `dense` is a pass of the model.
    """
    if not graph.groups:
        return {}
    first, sizes, lost = _widths(graph)
    counts = {name: sizes[home] - lost[home] for name, home in first.items()}
    try:
        narrow = record_pass(narrow_module(model, graph, _first_units(graph, counts)), args, kwargs)
    except TraceError:  # such as a normalization that refuses so little; then nothing is known
        return {}

    def changes(of_weights: bool) -> dict[int, Lengths]:
        def calls(recorder: Recorder) -> dict[int, Product]:
            return {place: call for place, call in enumerate(recorder.calls) if (call.key is not None) == of_weights}

        own, halves = calls(dense), calls(narrow)
        keys = [call.key for call in own.values()]
        if [call.key for call in halves.values()] != keys:
            return {}
        before = {place: dense.amount(call) for place, call in own.items()}
        after = {place: narrow.amount(call) for place, call in zip(own, halves.values())}
        changed = [place for place in own if before[place] != after[place]]
        if not changed:
            return {}

        def lengths(module: nn.Module) -> list[tuple[int, ...]]:
            found = calls(dense if module is model else record_pass(module, args, kwargs)).values()
            if [call.key for call in found] != keys:
                raise TraceError("a narrow model makes other calls")
            return [call.lengths for place, call in zip(own, found) if place in changed]

        told = {
            place: _lengths(before[place], axes, graph) for place, axes in zip(changed, probe_shapes(model, graph, lengths))
        }
        return {place: each for place, each in told.items() if each is not None and each.at(counts) == after[place]}

    # A narrow layer may use its weights by other calls than a dense one, and still make the same products.
    return changes(of_weights=False) | changes(of_weights=True)


def _lengths(dense: Fraction, axes: Extents, graph: UnitGraph) -> Lengths | None:
    """Return the lengths of a shape, with whole positions for each unit; None if there are others."""
    own = [(size, spans) for size, spans in axes if spans]
    if any(each != int(each) for size, spans in own for each in (size, *spans.values())):
        return None
    whole = tuple((int(size), {name: int(each) for name, each in spans.items()}) for size, spans in own)
    sizes = {name: group.size for name, group in graph.groups.items()}
    return Lengths(dense / max(1, math.prod(_length(axis, sizes) for axis in whole)), whole)


def _length(axis: tuple[Any, Mapping[str, Any]], counts: Mapping[str, int]) -> Any:
    return axis[0] + sum(each * counts[group] for group, each in axis[1].items())


def probe_shapes(
    model: nn.Module, graph: UnitGraph, run: Callable[[nn.Module], Sequence[tuple[int, ...]]]
) -> tuple[Extents, ...]:
    """Let `run` list shapes of the dense model and of models with one width halved; returns how shapes follow the widths.

    If the list has other shapes or ranks with a width halved, that width is assumed to change no shape: costs are then
    too high and never too low. The shapes of tied groups have the name of the first.
    """
    dense = list(run(model))
    first, sizes, lost = _widths(graph)
    leaders = list(sizes)

    def shrinks(halved: Collection[str]) -> list[tuple[int, ...]] | None:
        """Return how much shorter each axis of each shape becomes if some widths are halved."""
        halves = {name: sizes[home] - lost[home] for name, home in first.items() if home in halved}
        try:
            found = list(run(narrow_module(model, graph, _first_units(graph, halves))))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
        if [len(shape) for shape in found] != [len(shape) for shape in dense]:
            return None
        return [tuple(a - b for a, b in zip(one, other, strict=True)) for one, other in zip(dense, found, strict=True)]

    spans = _decoded(dense, leaders, lost, shrinks)
    if spans is None:
        spans = [[{} for _ in shape] for shape in dense]
        for leader in leaders:
            less = shrinks({leader}) if lost[leader] else None
            for place, axes in enumerate(less or ()):
                for dim, each in enumerate(axes):
                    if each > 0:
                        spans[place][dim][leader] = each / lost[leader]
    whole = {name: group.size for name, group in graph.groups.items()}
    return tuple(
        tuple((size - _length((0, own), whole), own) for size, own in zip(shape, axes, strict=True))
        for shape, axes in zip(dense, spans, strict=True)
    )


def _widths(graph: UnitGraph) -> tuple[dict[str, str], dict[str, int], dict[str, int]]:
    """Group → the first of its tied groups; that one → units of the smallest of them, and their number in half a width."""
    first = {name: tied[0] for tied in graph.tied_sets for name in tied}
    sizes: dict[str, int] = {}
    lost: dict[str, int] = {}
    for tied in graph.tied_sets:
        size = sizes[tied[0]] = min(graph.groups[name].size for name in tied)
        # Two stay where there are more: with a single one a copy may become a view.
        lost[tied[0]] = size - max(min(2, size - 1), size // 2, *(graph.groups[name].least for name in tied))
    return first, sizes, lost


def _first_units(graph: UnitGraph, counts: Mapping[str, int]) -> dict[str, Tensor]:
    return {name: torch.arange(group.size) < counts.get(name, group.size) for name, group in graph.groups.items()}


def _decoded(
    dense: Sequence[tuple[int, ...]],
    leaders: Sequence[str],
    lost: Mapping[str, int],
    shrinks: Callable[[Collection[str]], list[tuple[int, ...]] | None],
) -> list[list[dict[str, float]]] | None:
    """Return the same from few passes, if no axis follows more than one width; None if one does.

    Each width is halved in half of the passes, in another half than every other width, so that the passes with a shorter axis
    name its width. Two widths together would name more than half of them.
    """
    number = next(n for n in count(2) if math.comb(n, n // 2) >= len(leaders))
    codes = dict(zip(combinations(range(number), number // 2), leaders))
    if number >= len(leaders):
        return None
    passes = []
    for place in range(number):
        found = shrinks({leader for code, leader in codes.items() if place in code})
        if found is None:
            return None
        passes.append(found)
    spans: list[list[dict[str, float]]] = [[{} for _ in shape] for shape in dense]
    for shape in range(len(dense)):
        for dim in range(len(dense[shape])):
            less = [found[shape][dim] for found in passes]
            code = tuple(place for place, each in enumerate(less) if each)
            if not code:
                continue
            if code not in codes or len({less[place] for place in code}) > 1:
                return None
            leader = codes[code]
            spans[shape][dim][leader] = less[code[0]] / lost[leader]
    return spans
