"""Isomorphic: a ranking for each kind of structure, such as attention, MLP and convolution."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from sparsekit.allocation.limits import Counts, spread
from sparsekit.allocation.within_budget import Problem, RankedWithinBudget
from sparsekit.allocation.worth import Scale, block_losses, ranked_worth
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup


@dataclass(frozen=True)
class Isomorphic(RankedWithinBudget):
    """Every class of groups with the same structure loses the same share of its units, those of least worth in the class.

    Scores of attention heads and of convolutions mean different things; within a class they compare. The share is the least
    that meets the budget; then what still fits is put back, with scores as shares of the mean of the class.

    Args:
        budget: What the model may cost.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.
        scale: How scores of the groups of a class are made comparable, as in `ranked_worth`.

    Raises:
        InvalidValueError: a limit, multiple or scale that is not allowed.

    Source: Fang et al., Isomorphic pruning for vision models, ECCV 2024 (arXiv 2407.04616).
    """

    scale: Scale = "mean"

    def _find(self, problem: Problem) -> Counts:
        graph = problem.graph
        worth = ranked_worth(graph, problem.scores, self.scale)
        members: dict[Any, list[str]] = {}
        for groups in graph.tied_sets:
            members.setdefault(_structure(graph, groups), []).extend(groups)
        for names in members.values():  # between classes a unit counts for what it is worth of the mean of its class
            mean = float(np.mean(np.concatenate([worth[name] for name in names])))
            for name in names:
                worth[name] = worth[name] / mean if mean > 0 else np.ones_like(worth[name])
        losses = partial(block_losses, worth)

        classes: dict[Any, list[tuple[float, int, tuple[str, ...], int]]] = {}
        for groups, counts in problem.free.items():
            blocks = classes.setdefault(_structure(graph, groups), [])
            for place, (fewer, more) in enumerate(pairwise(counts)):
                units = more - fewer
                blocks.append((losses(groups, (fewer, more))[1] / units / len(groups), -place, groups, units))
        for blocks in classes.values():
            blocks.sort()

        def at(cut: float) -> Counts:
            found = spread(problem.free, lambda _, counts: counts[-1])
            for blocks in classes.values():
                left = cut * sum(units for *_, units in blocks)
                for _, _, groups, units in blocks:
                    if left < units and cut < 1:
                        break
                    left -= units
                    found.update((name, found[name] - units) for name in groups)
            return found

        return problem.fill(problem.least_that_fits(at), losses)


def _structure(graph: UnitGraph, groups: tuple[str, ...]) -> Any:
    """What groups of a class have in common: the kind of their units, and which entries of which rank they lie in."""

    def of(group: UnitGroup) -> Any:
        pieces = sorted(
            (piece.name.rpartition(".")[2], piece.dim, piece.side, tuple(graph.shapes[piece.name][2:]))
            for piece in group.slices
        )
        return group.kind, tuple(pieces)

    return tuple(of(graph.groups[name]) for name in groups)
