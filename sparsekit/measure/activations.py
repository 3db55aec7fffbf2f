"""How calls shrink with the groups where no weight tells it: read off the shapes of narrow passes.

Attention maps go with their heads. A weight that is computed from its entries is multiplied as an activation is, and shrinks
with two groups or more. A layer over tokens that channels stand behind is used at fewer positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from sparsekit.errors import TraceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.flops import Call, Recorder, record_pass
from sparsekit.measure.shapes import half_of_all, length, probe_shapes
from sparsekit.measure.volumes import Axes
from sparsekit.surgery.rebuild import narrow_module


@dataclass(frozen=True)
class Lengths:
    """A number that is a product: factor · Π (whole + Σ each · units kept), of whole numbers.

    Args:
        factor: The number where all lengths are 1.
        axes: The lengths; of tied groups, the first name.
    """

    factor: Fraction
    axes: Axes

    def at(self, counts: Mapping[str, int]) -> Fraction:
        """Return the number where the groups keep `counts` units."""
        lengths: list[int] = [length(axis, counts) for axis in self.axes]
        return self.factor * math.prod(lengths)


def measure_shrinkage(
    model: nn.Module, graph: UnitGraph, dense: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, Lengths]:
    """Find with which groups each call shrinks.

    A call that the lengths of narrow passes do not explain counts as one that no mask changes, so that costs are then too high
    and never too low. `dense` is a pass of the model.

    Returns:
        Number of a call → its positions, or the FLOPs of a product between activations; none for calls that do not change.
    """
    if not graph.groups:
        return {}
    counts, keep = half_of_all(graph)
    try:
        narrow = record_pass(narrow_module(model, graph, keep), args, kwargs)
    except TraceError:  # such as a normalisation that refuses so little; then nothing is known
        return {}

    def changes(of_weights: bool) -> dict[int, Lengths]:
        def calls(recorder: Recorder) -> dict[int, Call]:
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


def _lengths(dense: Fraction, axes: Axes, graph: UnitGraph) -> Lengths | None:
    """Return the lengths of a shape, with whole positions for each unit; None where there are others."""
    own = [(size, spans) for size, spans in axes if spans]
    if any(each != int(each) for size, spans in own for each in (size, *spans.values())):
        return None
    whole = tuple((int(size), {name: int(each) for name, each in spans.items()}) for size, spans in own)
    sizes = {name: group.size for name, group in graph.groups.items()}
    return Lengths(dense / max(1, math.prod(length(axis, sizes) for axis in whole)), whole)
