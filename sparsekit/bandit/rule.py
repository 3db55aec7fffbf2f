"""Rule: the numbers by which a SplitUCBV chooses; one set for every problem."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsekit.bandit.smoothness import Prior

__all__ = ["Rule"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The numbers of the index and of its upkeep; the symbols are those of `SplitUCBV`.

    Args:
        certainty: β, what a unit of posterior variance at the arm is worth.
        variation: γ, what a unit of variation within the cell is worth.
        growth: δ, by how much more with each factor e of rewards.
        patience: κ, the cell is halved when the variance of its arm's mean is below this share of the variation.
        splits: At most so many halvings before one pull.
        line: Cells to begin with on an interval.
        cube: The same on a box of two axes or more; rounded up to a grid.
        jitter: Width of the middle part of a cell from which its arm is drawn, as a share of the cell.
        refresh: The smoothness is drawn anew after so many more rewards, as a share of those told.
        moves: Steps of the walk each time.
        capacity: The largest number of cells.
        kept: Share of the cells that are left when they have become too many.
        prior: Of the smoothness.
    """

    certainty: float = 2.0
    variation: float = 0.8
    growth: float = 0.12
    patience: float = 0.5
    splits: int = 6
    line: int = 4
    cube: int = 4
    jitter: float = 0.15
    refresh: float = 0.15
    moves: int = 4
    capacity: int = 96
    kept: float = 0.75
    prior: Prior = field(default_factory=Prior)
