"""Trial, Masks: the masks under which the verification compares a gated and a narrow model.

In three trials, each set of tied groups keeps about half of its units, one unit, and most of them, so that every unit is kept
at least once and dropped at least once. All sets keep one unit in the same trial. In the two others, their shares differ, so
that errors of code that compares two widths show: equal widths become unequal, and unequal ones equal. Code that compares or
converts a width may take another branch at one particular width, or at a pair of widths. A trace records such widths, and
further trials visit them pair by pair.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph

_STEPS = (0.6180, 0.7549)  # irrational, so that no two sets keep the same share again and again


class Trial(NamedTuple):
    """A mask to compare under.

    Args:
        turn: 0: sets whose number has an even bit keep about half of their units, the others most; 1: one unit each; 2: as
            0, the other way round; 3: wide sets keep one unit more than the set before, others as in 0.
        order: Number of the random order of the units, by which they are kept or dropped, and of that bit.
        fewest: Units that the least width keeps.
        training: Compare in train mode, where the model accepts it.
        twice: Cut in two steps, as a schedule does: the first step removes half of the units.
        positive: Draw biases of order one above zero, so that few units are silent after a ReLU, where errors do not show.
        bit: If given, keep the units whose index does not have this bit.
        widths: If given, group name → its width, as (level, number of levels) from the smallest to the largest.
        mixed: Give the narrow model its units in another order, equally in every tensor, so that each unit must have its own
            positions. Otherwise, swapped positions of two kept units would not show.
        gradients: Run with gradients, and compare those of inputs and of entries without units.
    """

    turn: int
    order: int = 0
    fewest: int = 1
    training: bool = False
    twice: bool = False
    positive: bool = False
    bit: int | None = None
    widths: Mapping[str, tuple[int, int]] | None = None
    mixed: bool = True
    gradients: bool = False

    def cuts(self, tied: tuple[str, ...]) -> bool:
        """Return whether units of a set of tied groups may be dropped."""
        return self.widths is None or tied[0] in self.widths


_ROLES = (
    Trial(0, positive=True, gradients=True),
    Trial(1, twice=True, positive=True),
    Trial(2, training=True, positive=True, gradients=True),
)
FEW = _ROLES
"""Trials for larger models. All biases are positive: with so few trials, the wrong order of silent units may not show."""
MANY = (*FEW, Trial(0, 1, training=True), Trial(1, 1), Trial(2, 1, training=True), Trial(1, 2, positive=True))
OUTSIDE = (Trial(1), Trial(3))
"""Trials for code outside of blocks, which depends on widths only: the smallest equal widths, and the smallest unequal ones."""
_PRIMES = (2, 3, 5, 7)


def width_trials(graph: UnitGraph, compared: Iterable[Collection[str]], modes: Sequence[bool], most: int = 7) -> list[Trial]:
    """Return trials that cover the widths of the compared groups, and all pairs of widths of any two of them.

    Wider groups visit widths from the least to the greatest, at equal distances.

    Args:
        graph: The groups.
        compared: Names of the groups that are compared together.
        modes: True for train mode, False for eval mode; all pairs are visited in each.
        most: Maximum number of widths of a group to visit.
    """
    together: list[list[tuple[str, ...]]] = []
    for names in compared:
        met = [sets for sets in together if any(not set(tied).isdisjoint(names) for tied in sets)]
        own = [tied for tied in graph.tied_sets if not set(tied).isdisjoint(names)]
        together = [sets for sets in together if sets not in met] + [list(dict.fromkeys(itertools.chain(own, *met)))]
    largest = max((graph.groups[tied[0]].size for sets in together for tied in sets), default=0)
    base = next((prime for prime in _PRIMES if prime >= min(most, largest)), most)
    longest = max(map(len, together), default=0)
    digits = [digit for digit in range(longest) if digit == 0 or base**digit < longest]
    steps = range(base) if longest > 1 else range(1)

    def level(at: int, digit: int, first: int, second: int) -> tuple[int, int]:
        return (first + at // base**digit * second) % base, base

    numbered = {name: at for sets in together for at, tied in enumerate(sets) for name in tied}
    return [
        Trial(0, widths={name: level(at, *numbers) for name, at in numbered.items()}, training=training)
        for training, *numbers in itertools.product(modes, digits, range(base), steps)
        if numbered
    ]


class Masks:
    """Draws the masks of trials. Trials of equal `order` use the same random order of the units of a group."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._orders: dict[tuple[int, str], Tensor] = {}

    def draw(self, graph: UnitGraph, names: Collection[str], trial: Trial) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return group name → bool (units,), kept, after each of two pruning steps. Groups outside `names` keep all units."""
        first: dict[str, Tensor] = {}
        keep: dict[str, Tensor] = {}
        number = {name: at for at, tied in enumerate(graph.tied_sets) for name in tied}
        for name, group in graph.groups.items():
            first[name], keep[name] = (torch.ones(group.size, dtype=torch.bool) for _ in range(2))
            if name in names:
                dropped = self._dropped(name, group.size, trial, number[name])
                if len(dropped) < group.multiple:  # kernels need a multiple
                    dropped = torch.cat([dropped, torch.tensor([n for n in range(group.size) if n not in dropped])])
                    dropped = dropped[: group.multiple]
                for stays, gone in ((first, len(dropped) // 2), (keep, len(dropped))):
                    stays[name][dropped[: group.size - group.rounded(group.size - gone)]] = False
        return first, keep

    def _dropped(self, name: str, size: int, trial: Trial, number: int) -> Tensor:
        if trial.bit is not None:
            return torch.nonzero((torch.arange(size) >> trial.bit) % 2).flatten()
        key = (trial.order, name)
        if key not in self._orders or len(self._orders[key]) != size:
            self._orders[key] = torch.randperm(size, generator=self._generator)
        order = self._orders[key]
        if trial.widths is not None:
            level, levels = trial.widths[name]
            return order[1 + (level % size if size <= levels else level * (size - 1) // (levels - 1)) :]
        half, few = (number * step % 1 for step in _STEPS)
        if trial.turn == 1:
            return order[trial.fewest :]
        if trial.turn == 3 and size > 8:
            return order[2 + number % (size - 2) :]
        if ((number >> trial.order) + trial.turn // 2) % 2 == 0:  # about half, not the unit that the least width keeps
            # The kept units include order[0], which other trials drop, so kept units change their positions in both directions.
            kept = math.ceil((0.3 + 0.4 * half) * size) if size > 4 else 1
            return torch.cat([order[kept + 1 :], order[:1]])
        return order[: min(max(1, round(few * size / 4)), size - 1)]  # most, not that unit either
