"""Tree: a partition of the unit cube into cells, which are split one by one, with the posterior of each cell's arm."""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

# results/bandit-constants.md describes the effect of each constant.
NARROWEST, DEEPEST, _CAPACITY = 1e-7, 64, 2048
_SHRINK, _SHRINK_WEIGHT = 0.7, 3.0
_TAIL, _TAIL_KEPT = 2.0, 0.15
_BASE, _GROWTH, _DEEPER = 0.25, 0.07, 0.1  # a, b and c of B[h], see split_ucbv.py


class Tree:
    """A partition of the unit cube. Row k of each array is for cell k and its arm; the first `size` rows are in use.

    Each cell faces one cell on each of its sides, or the border, -1. With several axes, a side may touch many cells. `facing`
    then has the last one that was split off there, or the one that both parts of a split faced before.

    Posterior means and variances are relative to a level, under f(arm) - f(its parent) ~ N(0, D[depth at its birth]). An arm
    without a parent is around 0 with variance D[0] = `scale`, which is 0 until there are rewards.
    """

    def __init__(self, count: int, axes: int, rng: np.random.Generator) -> None:
        """Begin with at least `count` equal cells in random order."""
        cuts = [1] * axes
        while math.prod(cuts) < count:
            cuts[cuts.index(min(cuts))] += 1
        self.size = size = math.prod(cuts)
        self.capacity = most = max(_CAPACITY, 2 * size)
        places = np.indices(cuts).reshape(axes, size).T[rng.permutation(size)]
        self.low: Floats = np.zeros((most, axes))
        self.high: Floats = np.zeros((most, axes))
        self.low[:size], self.high[:size] = places / cuts, (places + 1) / cuts
        # Depth of each cell (number of splits), its depth when it was created, and the largest depth.
        self.depth: Integers = np.zeros(most, dtype=np.int64)
        self.born: Integers = np.zeros(most, dtype=np.int64)
        self.deepest = 0
        self.parent: Integers = np.arange(most)  # the cell from which each was split off; the cell itself at the start
        # Columns 2 · axis and 2 · axis + 1: neighbors below and above.
        self.facing: Integers = np.full((most, 2 * axes), -1)
        numbers = np.full([parts + 2 for parts in cuts], -1)
        numbers[tuple(places.T + 1)] = self.parent[:size]
        for side in range(2 * axes):
            beside = places + 1
            beside[:, side // 2] += 1 if side % 2 else -1
            self.facing[:size, side] = numbers[tuple(beside.T)]
        self.scale = self.level = 0.0
        self._ratio = _SHRINK ** (2.0 / axes)
        # The last element has the mean -inf, since index -1 stands for no arm.
        self.means: Floats = np.zeros(most + 1)
        self.means[-1] = -math.inf
        self.variances: Floats = np.zeros(most + 1)
        # By depth: D, and B of the index.
        self.variation: Floats = np.zeros(DEEPEST + 2)
        self.room: Floats = np.zeros(DEEPEST + 1)

    @property
    def full(self) -> bool:
        """Whether no cell can be split anymore."""
        return self.size >= self.capacity

    def halves(self, cell: int) -> tuple[int, float] | None:
        """Return the longest axis and its middle; None if the cell is too narrow to be halved."""
        low, high = self.low[cell].tolist(), self.high[cell].tolist()
        sides = [end - start for start, end in zip(low, high)]
        longest = max(sides)
        axis = sides.index(longest)
        return (axis, 0.5 * (low[axis] + high[axis])) if longest >= 2.0 * NARROWEST else None

    def cut(self, cell: int, axis: int, at: float, *, keeps_low: bool) -> int:
        """Split a cell at a position strictly within it; return the new cell. `keeps_low`: whether the old one is below it."""
        new = self.size
        self.size = new + 1
        self.low[new], self.high[new] = self.low[cell], self.high[cell]
        if keeps_low:
            self.high[cell, axis] = self.low[new, axis] = at
        else:
            self.low[cell, axis] = self.high[new, axis] = at
        depth = min(self.depth.item(cell) + 1, DEEPEST)
        self.depth[cell] = self.depth[new] = self.born[new] = depth
        self.deepest = max(self.deepest, depth)
        self.parent[new] = cell
        self.facing[new] = self.facing[cell]
        away, back = 2 * axis + keeps_low, 2 * axis + 1 - keeps_low
        self.facing[cell, away] = new
        self.facing[new, back] = cell
        beyond = int(self.facing[new, away])
        if beyond >= 0 and self.facing[beyond, back] == cell:
            self.facing[beyond, back] = new
        self.means[new] = self.means[cell]
        self.variances[new] = self.variances[cell] + self.variation[depth]
        return new

    def find(self, point: Floats) -> int:
        """Return the first cell that contains a point."""
        inside = (self.low[: self.size] <= point) & (point <= self.high[: self.size])
        return int(inside.all(axis=1).argmax())

    def begin(self, scale: float, level: float) -> None:
        """Set the prior of all arms: mean `level`, which is subtracted from rewards, and variance `scale`, above 0."""
        self.scale, self.level = scale, level
        self.variances[:] = scale
        self.variation = scale * self._ratio ** np.arange(DEEPEST + 2.0)

    def observe(self, arm: int, reward: float, noise: float) -> None:
        """Update the posterior of one arm with a reward of variance `noise`; the next `sweep` updates the other arms."""
        mean, variance = self.means.item(arm), self.variances.item(arm)
        gain = variance / (variance + noise)
        self.means[arm] = mean + gain * (reward - self.level - mean)
        self.variances[arm] = variance * (1.0 - gain)

    def sweep(self, weights: Floats, rewards: Floats, noise: float, told: float) -> None:
        """Estimate D again, and update each arm from its own rewards, its parent's posterior and its children's rewards.

        `weights` has the number of rewards of each arm, `rewards` their means, float (arms,); `told` counts all rewards.
        """
        size = self.size
        own = rewards - self.level
        parent, born = self.parent[:size], self.born[:size]
        has_parent = (born > 0).astype(np.float64)
        above, doubt = self.means.take(parent), self.variances.take(parent)
        # The mean of an arm without rewards gets almost no weight.
        own_variance = noise / np.maximum(weights, 1e-9)
        tied = self.variation.take(born)
        share = tied / (tied + own_variance + doubt)
        surprise = share * (own - above)
        surprise *= surprise
        self._learn_variation(
            np.bincount(born, share, self.deepest + 3).tolist(),
            np.bincount(born, surprise, self.deepest + 3).tolist(),
            self.depth.item(self.means[:size].argmax()),
            math.log(max(told, 1.0)),
        )
        tied = self.variation.take(born)
        up = 1.0 / (tied + has_parent * doubt)
        down = has_parent / (tied + own_variance)
        precision = 1.0 / own_variance + up + np.bincount(parent, down, size)
        weighed = own / own_variance + has_parent * above * up + np.bincount(parent, down * own, size)
        np.divide(1.0, precision, out=self.variances[:size])
        np.divide(weighed, precision, out=self.means[:size])

    def _learn_variation(self, counts: list[float], squares: list[float], best: int, log_told: float) -> None:
        """Estimate D and B by depth, from the number of arms created there and their squared distances from their parents."""
        prior = _SHRINK_WEIGHT * self._ratio
        freedom, variation = _TAIL, self.scale
        variations, rooms = [variation], []
        # Until the next sweep, cells may become one level deeper, and their halves one more.
        for depth in range(1, min(self.deepest + 2, DEEPEST + 1) + 1):
            count = counts[depth]
            variation = (prior * variation + squares[depth]) / (_SHRINK_WEIGHT + count)
            freedom = _TAIL + count + _TAIL_KEPT * freedom
            # In place of log t, to which it tends as ν grows: x²/2, where a Student t density at x is 1/t of its peak.
            quantile = 0.5 * freedom * math.expm1(2.0 * log_told / (freedom + 1.0))
            variations.append(variation)
            rooms.append(variation * (_BASE + _GROWTH * quantile + _DEEPER * max(best - depth + 1, 0)))
        self.variation[: len(variations)] = variations
        self.room[: len(rooms)] = rooms
