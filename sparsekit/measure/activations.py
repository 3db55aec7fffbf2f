"""How calls shrink with the groups where no weight tells it: read off the shapes of narrow passes.

Attention maps go with their heads. A weight that is computed from its entries is multiplied as an activation is, and shrinks
with two groups or more. A layer over tokens that channels stand behind is used at fewer positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from sparsekit.errors import TraceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.flops import Call, Recorder, record_pass
from sparsekit.measure.shapes import AffineShape, half_of_all, probe_shapes
from sparsekit.measure.tracker import Axes, length
from sparsekit.surgery.rebuild import narrow_module


@dataclass(frozen=True)
class Lengths:
    """A number that is a product: factor · Π (whole + Σ each · units kept).

    Args:
        factor: The number where all lengths are 1.
        axes: Of each length its constant part, and group name → positions per unit; of tied groups, the first name.
    """

    factor: Fraction
    axes: Axes

    def at(self, counts: Mapping[str, int]) -> Fraction:
        """The number where the groups keep `counts` units."""
        return self.factor * math.prod(length(axis, counts) for axis in self.axes)


def measure_shrinkage(
    model: nn.Module, graph: UnitGraph, dense: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, Lengths]:
    """Find with which groups each call shrinks.

    A call that the lengths of narrow passes do not explain counts as one that no mask changes, so that costs are then too high
    and never too low.

    Args:
        model: The dense model.
        graph: Its units.
        dense: A pass of it.
        args: Positional inputs.
        kwargs: Keyword inputs.

    Returns:
        Number of a call → its positions, or the FLOPs of a product between activations; none for calls that do not change.
    """
    if not graph.groups:
        return {}
    try:
        narrow = record_pass(narrow_module(model, graph, half_of_all(graph)[1]), args, kwargs)
    except TraceError:  # such as a normalisation that refuses so little; then nothing is known
        return {}
    # A narrow layer may use its weights by other calls than a dense one, and still make the same products.
    kinds = [
        {place: call for place, call in enumerate(dense.calls) if (call.key is None) == products} for products in (True, False)
    ]
    return {place: each for kind in kinds for place, each in _explain(model, graph, kind, dense, narrow, args, kwargs).items()}


def _explain(
    model: nn.Module,
    graph: UnitGraph,
    calls: Mapping[int, Call],
    dense: Recorder,
    narrow: Recorder,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[int, Lengths]:
    """The lengths of those `calls` that differ in the narrow pass."""
    keys = [call.key for call in calls.values()]

    def alike(recorder: Recorder) -> list[Call]:
        found = [call for call in recorder.calls if (call.key is None) == (keys[0] is None)]
        if [call.key for call in found] != keys:
            raise TraceError("a narrow model makes other calls")
        return found

    try:
        halved = [narrow.amount(call) for call in alike(narrow)] if calls else []
    except TraceError:
        return {}
    counts, _ = half_of_all(graph)
    before = [dense.amount(call) for call in calls.values()]
    changed = [i for i, (one, other) in enumerate(zip(before, halved)) if one != other]
    if not changed:
        return {}

    def lengths(module: nn.Module) -> list[tuple[int, ...]]:
        found = alike(dense if module is model else record_pass(module, args, kwargs))
        return [found[i].lengths for i in changed]

    shapes = zip(changed, probe_shapes(model, graph, lengths))
    told = {i: each for i, shape in shapes if (each := _lengths(before[i], shape, graph)) is not None}
    return {place: told[i] for i, place in enumerate(calls) if i in told and told[i].at(counts) == halved[i]}


def _lengths(dense: Fraction, shape: AffineShape, graph: UnitGraph) -> Lengths | None:
    """The lengths of a shape, with whole positions for each unit."""
    axes = []
    for size, spans in shape.axes:
        each = {name: int(span) for name, span in spans.items()}
        if any(each[name] != span for name, span in spans.items()):
            return None
        axes.append((size - sum(span * graph.groups[name].size for name, span in each.items()), each))
    varying = math.prod(size for size, spans in shape.axes if spans)
    return Lengths(dense / max(1, varying), tuple(axis for axis in axes if axis[1]))
