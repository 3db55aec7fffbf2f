"""Posterior: what is believed of arms that form a tree, and how far an arm lies from the one that it was split from."""

from __future__ import annotations

import math

import numpy as np

from sparsekit.bandit.cells import DEEPEST, Cells, Floats, grow

# Where nothing is known: the ratio of the deviations of cells one of whose sides is half as long, and the number of arms that
# it counts for at each depth.
_SHRINK, _SHRINK_WEIGHT = 0.7, 3.0
# Degrees of freedom of what an unseen arm may be at depth 0, and the share of them that the next depth begins with; it adds
# the arms born there.
_TAIL, _TAIL_KEPT = 2.0, 0.15
# a, b and c: what a unit of variation within the cell is worth, by how much more with each factor e of rewards, and what each
# level that the best cell lies deeper is worth.
_BASE, _GROWTH, _DEEPER = 0.25, 0.07, 0.1


class Posterior:
    """Posterior means and variances of arms, less a level, under f(arm) - f(its parent) ~ N(0, D[depth where it was born]).

    An arm that was split from none lies around 0 with variance D[0].
    """

    def __init__(self, scale: float, level: float, axes: int) -> None:
        """Begin with arms of which nothing is known.

        Args:
            scale: D[0], above 0.
            level: What rewards are counted from.
            axes: Of the cube: the more, the more splits it takes until a cell is half as wide.
        """
        self.scale, self.level = scale, level
        self._ratio = _SHRINK ** (2.0 / axes)
        # The last place stays free and below all others: arm -1 stands for none.
        self.means: Floats = np.full(1, -math.inf)
        self.variances: Floats = np.full(1, scale)
        # By depth: D, and what the variation within a cell adds under the root of the index.
        self.variation: Floats = scale * self._ratio ** np.arange(DEEPEST + 2.0)
        self.room: Floats = np.zeros(DEEPEST + 1)

    def reserve(self, size: int) -> None:
        """Make room for so many arms; new ones lie around the level."""
        used = len(self.means) - 1
        grow(self, ("means", "variances"), size + 1)
        self.means[used:] = 0.0
        self.means[-1] = -math.inf
        self.variances[used:] = self.scale

    def settle(self, parent: int, new: int, depth: int) -> None:
        """Begin with an arm that was just split off from another."""
        self.means[new] = self.means[parent]
        self.variances[new] = self.variances[parent] + self.variation[depth]

    def observe(self, arm: int, reward: float, noise: float) -> None:
        """Take in a reward, counted from the level; the other arms learn of it with the next `sweep`."""
        mean, variance = self.means.item(arm), self.variances.item(arm)
        gain = variance / (variance + noise)
        self.means[arm] = mean + gain * (reward - mean)
        self.variances[arm] = variance * (1.0 - gain)

    def sweep(self, cells: Cells, weights: Floats, rewards: Floats, noise: float, told: float) -> None:
        """Learn D anew, and let each arm learn from its own rewards, its parent's posterior and its children's rewards.

        Args:
            cells: To which the arms belong.
            weights: Number of rewards of each arm, float (arms,).
            rewards: Their means, float (arms,).
            noise: Variance of a reward.
            told: Number of rewards.
        """
        size = cells.size
        own = rewards - self.level
        parent, born = cells.parent[:size], cells.born[:size]
        has_parent = (born > 0).astype(np.float64)
        above, doubt = self.means.take(parent), self.variances.take(parent)
        # An arm without rewards has a mean of next to no weight.
        own_variance = noise / np.maximum(weights, 1e-9)
        tied = self.variation.take(born)
        share = tied / (tied + own_variance + doubt)
        surprise = share * (own - above)
        surprise *= surprise
        depths = cells.deepest + 3
        self._learn(
            cells.deepest,
            np.bincount(born, share, depths).tolist(),
            np.bincount(born, surprise, depths).tolist(),
            cells.depth.item(self.means[:size].argmax()),
            math.log(max(told, 1.0)),
        )
        tied = self.variation.take(born)
        up = 1.0 / (tied + has_parent * doubt)
        down = has_parent / (tied + own_variance)
        precision = 1.0 / own_variance + up + np.bincount(parent, down, size)
        weighed = own / own_variance + has_parent * above * up + np.bincount(parent, down * own, size)
        np.divide(1.0, precision, out=self.variances[:size])
        np.divide(weighed, precision, out=self.means[:size])

    def _learn(self, deepest: int, counts: list[float], squares: list[float], best: int, log_told: float) -> None:
        """D and what follows from it by depth, given how many arms were born there and how far they lay from their parents."""
        prior = _SHRINK_WEIGHT * self._ratio
        freedom, variation = _TAIL, self.scale
        variations, rooms = [variation], []
        # Cells one level deeper than any are there by the next sweep, and their halves lie one deeper again.
        for depth in range(1, min(deepest + 2, DEEPEST + 1) + 1):
            count = counts[depth]
            variation = (prior * variation + squares[depth]) / (_SHRINK_WEIGHT + count)
            freedom = _TAIL + count + _TAIL_KEPT * freedom
            # Stands for log t, to which it comes as ν grows: the same tail probability of a Student t.
            quantile = 0.5 * freedom * math.expm1(2.0 * log_told / (freedom + 1.0))
            variations.append(variation)
            rooms.append(variation * (_BASE + _GROWTH * quantile + _DEEPER * max(best - depth + 1, 0)))
        self.variation[: len(variations)] = variations
        self.room[: len(rooms)] = rooms
