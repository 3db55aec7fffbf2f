"""Sensitivity: every group is narrowed as far as costs the same measured degradation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sparsekit.allocation.limits import Counts, Limits, Multiples, spread
from sparsekit.allocation.within_budget import Problem, WithinBudget
from sparsekit.errors import InvalidValueError
from sparsekit.measure.budget import Budget

Table: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]
"""Group name → pairs (share of its units kept, degradation of the model when this group alone is narrowed so)."""


@dataclass(frozen=True)
class Sensitivity(WithinBudget):
    """The least widths whose measured degradation is at most τ in every group, for the least τ that meets the budget.

    Degradations are made monotone (a narrower group is never better) and are interpolated between the measured shares. In the
    end what still fits is put back.

    Args:
        budget: What the model may cost.
        table: What narrowing each group alone does; `measure_sensitivity` makes it. Of tied groups one entry is enough.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.

    Raises:
        InvalidValueError: an entry that is no list of pairs, or a limit or multiple that is not allowed.

    Source: FastNAS of NVIDIA's Model Optimizer, here with exact costs and without a search over subnets.
    """

    budget: Budget
    table: Table
    limits: Limits = field(default_factory=dict)
    multiple_of: Multiples = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, pairs in self.table.items():
            for pair in pairs:
                if len(pair) != 2 or not 0 < pair[0] <= 1 or not np.isfinite(pair[1]):
                    raise InvalidValueError(
                        f"the table of {name!r} must hold pairs (share kept in (0, 1], degradation), got {pair!r};"
                        " measure_sensitivity makes such a table"
                    )

    def _find(self, problem: Problem) -> Counts:
        harms: dict[tuple[str, ...], npt.NDArray[np.float64]] = {}
        for groups, counts in problem.free.items():  # the degradation at each count, which falls as counts rise
            told = [name for name in groups if self.table.get(name)]
            if not told:
                raise InvalidValueError(
                    f"the sensitivity table has no entry for group {groups[0]!r}; measure it again for this model"
                )
            shares = np.array(counts) / problem.graph.groups[told[0]].size
            harms[groups] = np.max([_interpolated(self.table[name], shares) for name in told], axis=0)
        levels = np.unique(np.concatenate([np.zeros(1), *harms.values()]))

        def at(cut: float) -> Counts:
            level = levels[min(len(levels) - 1, round(cut * (len(levels) - 1)))]
            return spread(problem.free, lambda groups, counts: counts[int(np.argmax(harms[groups] <= level))])

        def losses(groups: tuple[str, ...], _: Sequence[int]) -> Sequence[float]:
            return [0.0, *(-np.diff(harms[groups])).tolist()]

        return problem.fill(problem.least_that_fits(at), losses)


def _interpolated(pairs: Sequence[tuple[float, float]], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The degradation at other shares; strictly falling, and 0 at most where everything is kept."""
    points = sorted({1.0: 0.0, **dict(pairs)}.items())
    kept = np.array([share for share, _ in points])
    values = np.maximum.accumulate(np.array([value for _, value in points])[::-1])[::-1]
    values = values - values[-1]
    if kept[0] > 0:  # below what was measured it goes on at the steepest slope, so that nothing is cut for free
        slopes = -np.diff(values) / np.diff(kept) if len(kept) > 1 else np.ones(1)
        kept, values = np.concatenate([[0.0], kept]), np.concatenate([[values[0] + slopes.max() * kept[0]], values])
    # A little more for every unit orders groups whose degradation was nothing.
    tiny = 1e-9 * max(1e-30, float(values.max()), 1.0)
    return np.asarray(np.interp(shares, kept, values) + tiny * (1 - shares))
