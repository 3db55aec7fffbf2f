"""How passes shrink with the groups where no weight tells it: measured on narrow models.

Attention maps go with their heads. A weight that is computed from its entries is multiplied as an activation is, and shrinks
with two groups or more. A layer over tokens that channels stand behind is used at fewer positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import nn

from sparsekit.errors import TraceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.flops import Recorder, record_pass
from sparsekit.surgery.rebuild import narrow_module

__all__ = ["Lengths", "Shrinkage", "measure_shrinkage"]

_MOST = 64
"""Groups that are looked at one by one, a narrow pass each."""


@dataclass(frozen=True)
class Lengths:
    """A number that is a product of one length for each of some groups: factor · Π (whole + each · units kept).

    Args:
        factor: The number where all lengths are 1.
        of: Group name → (whole, each); of tied groups, the first name.
    """

    factor: Fraction
    of: Mapping[str, tuple[int, int]]

    def at(self, counts: Mapping[str, int]) -> Fraction:
        """The number where the groups keep `counts` units."""
        return self.factor * math.prod(whole + each * counts[name] for name, (whole, each) in self.of.items())


@dataclass(frozen=True)
class Shrinkage:
    """What masks change beside the sizes of weights.

    Args:
        products: FLOPs of those products between activations that shrink.
        positions: Number of a use of a weight, in the order of the calls → at how many positions it is, where that changes.
    """

    products: tuple[Lengths, ...] = ()
    positions: Mapping[int, Lengths] = field(default_factory=dict)


def measure_shrinkage(
    model: nn.Module, graph: UnitGraph, dense: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Shrinkage:
    """Find with which groups each call shrinks.

    Every group has a number, and pass k leaves two units to the groups whose number has bit k set: the passes in which a call
    is cheaper spell the number of the group that it shrinks with. A call that this does not explain gets a pass for each group
    that may have a part in it, and one in which all of these leave two units, which must cost what the single passes
    say; else it counts as one that no mask changes.

    Args:
        model: The dense model.
        graph: Its units.
        dense: A pass of it.
        args: Positional inputs.
        kwargs: Keyword inputs.
    """
    if not graph.groups or not (dense.products or dense.terms):
        return Shrinkage()
    passes = _Passes(model, graph, args, kwargs)
    products = (passes.explain(Fraction(flops), _product(dense, i)) for i, flops in enumerate(dense.products))
    positions = {i: passes.explain(places, _positions(dense, i)) for i, (_, places) in enumerate(dense.terms)}
    return Shrinkage(
        tuple(found for found in products if found is not None),
        {i: found for i, found in positions.items() if found is not None},
    )


_Value: TypeAlias = Callable[[Recorder], Fraction | None]
"""Reads a number of a call from a narrow pass; None if that made other calls."""


def _product(dense: Recorder, call: int) -> _Value:
    """FLOPs of a product."""
    count = len(dense.products)
    return lambda found: Fraction(found.products[call]) if len(found.products) == count else None


def _positions(dense: Recorder, call: int) -> _Value:
    """Positions of a use of a weight."""
    names = [name for name, _ in dense.terms]
    return lambda found: found.terms[call][1] if [name for name, _ in found.terms] == names else None


class _Passes:
    """Passes of narrow models, each run once."""

    def __init__(self, model: nn.Module, graph: UnitGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.model, self.graph, self.args, self.kwargs = model, graph, args, kwargs
        firsts = {name: next((min(tied) for tied in graph.ties if name in tied), name) for name in graph.groups}
        self.tied: dict[str, list[str]] = {}
        for name, first in firsts.items():
            self.tied.setdefault(first, []).append(name)
        # A tensor with an axis of one unit may take another way through an operator, so that calls cannot be told apart.
        self.least = {name: min(2, max(1, graph.groups[name].size - 1)) for name in self.tied}
        self._run: dict[frozenset[str], Recorder] = {}
        self._numbers = {name: number for number, name in enumerate(self.tied, start=1)}
        bits = range(max(self._numbers.values()).bit_length())
        self._spelt = [[name for name, own in self._numbers.items() if own >> bit & 1] for bit in bits]

    def narrow(self, firsts: Sequence[str]) -> Recorder:
        """A pass in which some groups, and those tied to them, keep their least."""
        key = frozenset(firsts)
        if key not in self._run:
            counts = {name: group.size for name, group in self.graph.groups.items()}
            counts |= {name: self.least[first] for first in key for name in self.tied[first]}
            keep = {name: torch.arange(self.graph.groups[name].size) < count for name, count in counts.items()}
            try:
                self._run[key] = record_pass(narrow_module(self.model, self.graph, keep), self.args, self.kwargs)
            except TraceError:  # such as a normalisation that refuses so little; then nothing is known of this pass
                self._run[key] = Recorder({}, {})
        return self._run[key]

    def explain(self, dense: Fraction, value: _Value) -> Lengths | None:
        """With which groups a number of the dense pass shrinks; None for no group, or where passes do not say it."""
        if value(self.narrow(list(self.tied))) == dense:
            return None
        spelt = [value(self.narrow(names)) for names in self._spelt]
        number = sum(1 << bit for bit, found in enumerate(spelt) if found not in (None, dense))
        if not number:
            return None
        single = next((name for name, own in self._numbers.items() if own == number), None)
        if single is not None and len({found for found in spelt if found is not None} - {dense}) == 1:
            return self._line(single, dense, next(found for found in spelt if found not in (None, dense)))
        parts = [name for name, own in self._numbers.items() if own & number == own and self.graph.groups[name].size > 1]
        return self._joint(parts, dense, value) if len(parts) <= _MOST else None

    def _line(self, name: str, dense: Fraction, least: Fraction | None) -> Lengths | None:
        """The number as a length of one group, by its values at the least and at all units."""
        size, few = self.graph.groups[name].size, self.least[name]
        if least is None or size == few:
            return None
        each = (dense - least) / (size - few)
        whole = dense - each * size
        if whole < 0 or each < 0:
            return None
        unit = Fraction(math.gcd(whole.numerator * each.denominator, each.numerator * whole.denominator))
        unit /= whole.denominator * each.denominator
        return Lengths(unit, {name: (int(whole / unit), int(each / unit))})

    def _joint(self, names: Sequence[str], dense: Fraction, value: _Value) -> Lengths | None:
        """The number as a product of lengths, if a pass in which all shrink says so."""
        factor, lengths = dense, dict[str, tuple[int, int]]()
        for name in names:
            alone = value(self.narrow([name]))
            line = None if alone == dense else self._line(name, dense, alone)
            if line is not None:
                lengths |= line.of
                factor *= line.factor / dense
            elif alone != dense:
                return None
        found = Lengths(factor, lengths)
        return found if lengths and value(self.narrow(list(lengths))) == found.at(self.least) else None
