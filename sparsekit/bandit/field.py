"""Field: the arms of a SplitUCBV in the unit cube, their rewards, and the choice of the next arm.

`results/bandit-constants.md` says what each constant does.
"""

import math
from collections.abc import Mapping

import numpy as np

from sparsekit.bandit.tree import DEEPEST, NARROWEST, Floats, Integers, Tree

_LINE, _CUBE = 5, 6
_JITTER = 0.2
_CERTAINTY, _FACING = 1.0, 0.2  # p and φ of the index
_PATIENCE = 2.0  # κ
_SPLITS = 6
_REFRESH = 0.04
_LEAST_SCALE, _LEAST = 1e-250, 1e-14
_GUESS, _GUESS_WEIGHT = 0.2, 3.0
_REPEATS, _REPEATED = 2, 0.2
_EXACT = 0.01
_SETTLED, _FADED = 8, 0.05
_ALLOWANCE, _ALARM, _LARGEST = 0.5, 9.0, 3.0
_FAR, _FEWEST, _PART = 10.0, 3, 0.1
_BROAD = 3


class Field(Tree):
    """The arms of a `SplitUCBV` with their rewards. Arm k belongs to cell k; row k of `points` is its position in the cube."""

    def __init__(self, axes: int, rng: np.random.Generator) -> None:
        """Divide the unit cube into a few equal cells, in random order, each with an arm near its middle."""
        super().__init__(_LINE if axes == 1 else _CUBE, axes, rng)
        self._rng = rng
        self._begin = size = self.size
        self.points: Floats = np.zeros((self.capacity, axes))
        self.points[:size] = [self._middle(*box) for box in zip(self.low[:size], self.high[:size])]
        # Of each arm: the effective number of rewards, their mean, and the number of failed pulls.
        self._weights: Floats = np.zeros(self.capacity)
        self._rewards: Floats = np.zeros(self.capacity)
        self._failures: Floats = np.zeros(self.capacity)
        # Number of times that another point was executed in place of the arm, and whether this has happened at all.
        self._tries: Floats = np.zeros(self.capacity)
        self._tried = False
        self._asked = 0
        self._missed: set[int] = set()
        self._pulls: Integers = np.zeros(self.capacity, dtype=np.int64)
        # Position of the first reward of each arm among all rewards.
        self._first: Integers = np.full(self.capacity, -1)
        self._told = 0.0
        # Arms that have failed or diverged, and the ones among them without any other reward.
        self._failed: set[int] = set()
        self._diverged: set[int] = set()
        self._void: Integers = np.zeros(0, dtype=np.int64)
        self._floor, self._worst = -math.inf, 0.0  # rewards below `_floor` have diverged; failures get the reward `_worst`
        self._shown = self.means  # means as neighboring cells see them: the worst reward for arms that only failed or diverged
        # Over repeated rewards: sum of squared deviations from the arm's mean before, and their number. Last, the number of all
        # repeats, including diverged rewards and proposals that were executed elsewhere. Noise is estimated from repeated
        # rewards only: if it were mistaken for variation between points, cells would be split, points would never be repeated,
        # and the mistake would persist.
        self._within = self._replicates = self._repeats = 0.0
        self._distinct = False  # whether the rewards of the first arms differ, as they do unless rewards are counts or classes
        self._fall = 0.0  # S of `_falls`
        # Second term of the index of each cell, from a better neighboring arm, as of the last `_refresh`.
        self._beside: Floats = np.zeros(0)
        self._index: Floats | None = None  # index of each arm, ignoring open pulls; None if it must be computed
        # Number of rewards since the last `_refresh`, and whether it must run before the next proposal.
        self._since = 0.0
        self._stale = True
        self._clock = 0.0  # number of rewards since the start, or since rewards of arms fell
        self.open: dict[int, int] = {}  # open pull → arm; -1 if no cell could hold one

    def _middle(self, low: Floats, high: Floats) -> Floats:
        point: Floats = low + (high - low) * (0.5 + _JITTER * (self._rng.random(len(low)) - 0.5))
        return point

    @property
    def _exact(self) -> bool:
        """Whether rewards seem to be noise-free: repeated rewards of one point are equal, and rewards are not merely counts."""
        return self._distinct and self._within == 0.0

    @property
    def _noise(self) -> float:
        """Variance of a reward around the mean reward of its arm."""
        expected = _GUESS_WEIGHT * _GUESS * self.scale
        if self._exact:
            expected *= _EXACT**self._replicates
        return max((expected + self._within) / (_GUESS_WEIGHT + self._replicates), _LEAST * self.scale)

    def _falls(self, surprise: float, share: float) -> bool:
        """Return whether the rewards of arms have fallen, by a CUSUM test.

        `surprise` is a repeated reward minus the mean of earlier ones of the same arm; its variance is `share` · noise. The
        test sums up how far repeated rewards are below these means, in standard deviations:

            S ← max(0, S - z - k),   z = (reward - mean) / sqrt(σ² (1/w + 1/n)) within ±3;   alarm if S > h,

        with w the weight of the reward and n the weight of the earlier ones. Only falls matter: an arm that rises is pulled
        anyway, and a rival that rises past it is found when this arm falls.

        Source: Page, "Continuous Inspection Schemes", Biometrika 1954 (the sum); Liu, Lee, Shroff, "A Change-Detection Based
            Framework for Piecewise-Stationary Multi-Armed Bandit Problem", AAAI 2018 (restarting a bandit on it).
        """
        if not self.scale or self._repeats < _SETTLED:
            return False
        deviations = max(-_LARGEST, min(_LARGEST, surprise / math.sqrt(self._noise * share)))
        self._fall = max(0.0, self._fall - deviations - _ALLOWANCE)
        if self._fall <= _ALARM:
            return False
        self._fall = 0.0
        return True

    def learn(self, arm: int, reward: float, place: int) -> None:
        """Update an arm with a reward; `place` is the index of this reward among all rewards."""
        had, mean, fallen = self._weights.item(arm), self._rewards.item(arm), False
        if self._pulls.item(arm):
            self._repeats += 1.0
            if had > 0.0 and min(mean, reward) >= self._floor:
                fallen = self._falls(reward - mean, 1.0 / had + 1.0)
                self._within += (reward - mean) ** 2 * had / (had + 1.0)
                self._replicates += 1.0
        else:
            self._stale = True
        self._told += 1.0
        if self._first.item(arm) < 0:
            self._first[arm] = place
        self._weights[arm] = had + 1.0
        self._rewards[arm] = mean + (reward - mean) / (had + 1.0)
        self._count(arm)
        if reward < self._floor or arm in self._failed:
            self._stale = True
        elif self.scale:
            self.observe(arm, reward, self._noise)
        if fallen:
            np.minimum(self._weights, _FADED, out=self._weights)
            self._stale = True
            self._clock = 0.0
        if self._stale:
            self._index = None
        elif self._index is not None and self.scale:
            self._index[arm] = self._index_of(arm, 0)  # until the next refresh, a reward changes only its own arm

    def fail(self, arm: int) -> None:
        """Record a failed trial. It counts as a visit with the worst reward, but does not affect the noise or other arms.

        The cell of the arm is split before the arm is pulled again.
        """
        self._failed.add(arm)
        self._failures[arm] += 1.0
        if self.scale:
            self._count(arm)
            self._stale, self._index = True, None
        else:
            self._tries[arm] += 1.0

    def _count(self, arm: int) -> None:
        self._since += 1.0
        self._clock += 1.0
        self._pulls[arm] += 1

    def miss(self, arm: int) -> None:
        """Record that another point was executed in place of an arm.

        Otherwise, a proposal that is always executed elsewhere, for example rounded, would be repeated forever. Before there is
        a scale, the first time does not count, so that all of the first arms are tried.
        """
        if self.scale or arm in self._missed:
            self._tries[arm] += 1.0
        self._missed.add(arm)
        self._repeats += 1.0
        self._tried = True

    def _sort_out(self) -> None:
        """Find diverged arms: their rewards are so far below all others that the size carries no information.

        Sorted from the best, arms from k + 1 on have diverged if the step from arm k is many times as large as the distance
        from the best to arm k, and the cells of the first k arms fill a good part of the cube. They have also diverged if they
        are many times further below the best than the arms in the better half of the cube.
        """
        ran = np.flatnonzero(self._weights[: self.size])
        order = ran[np.argsort(-self._rewards[ran], kind="stable")]
        below = self._rewards[order[0]] - self._rewards[order] if len(order) else np.zeros(0)
        self._diverged, self._floor = set(), -math.inf
        if len(order) > _FEWEST and below[-1] > _FAR * below[_FEWEST - 1]:
            volumes = np.cumsum((self.high[order] - self.low[order]).prod(axis=1))
            half = below[np.searchsorted(volumes, 0.5 * volumes[-1])]
            reach = np.maximum(below, math.sqrt(self._within / max(1.0, self._replicates)))
            apart = (np.diff(below) > _FAR * reach[:-1]) & (volumes[:-1] >= _PART) & (below[:-1] > 0.0)
            apart[: _FEWEST - 1] = False
            kept = int(apart.argmax()) + 1 if apart.any() else len(order)
            if half > 0.0:
                kept = min(kept, int((below <= _FAR * max(half, reach[0])).sum()))
            if kept < len(order):
                self._diverged = set(order[kept:].tolist())
                self._floor = self._rewards.item(order[kept - 1])
        known = self._rewards[order[: len(order) - len(self._diverged)]]
        if len(known):
            self._worst = float(known[-1] if known[-1] < known[0] else known[-1] - abs(known[-1]))
        failed = np.flatnonzero(self._failures[: self.size]).tolist()
        self._failed = self._diverged.union(failed)
        self._void = np.array(sorted(self._diverged.union(arm for arm in failed if not self._weights[arm])), dtype=np.int64)

    def _set_scale(self) -> None:
        """Set scale and level of the prior from the rewards of the first arms."""
        arms = np.flatnonzero(self._pulls[: self._begin if self.scale else self.size])
        means = np.where(np.isin(arms, self._void), self._worst, self._rewards[arms])
        # Equal rewards have no scale; any will do.
        spread = float(means.var(ddof=1)) if len(means) > 1 else 0.0
        scale = next((s for s in (spread, float(np.square(means).max())) if s > _LEAST_SCALE), 1.0)
        self.means[:-1] = 0.0
        self.begin(scale, float(means.mean()))

    def _face_the_best(self) -> None:
        """Set the neighbor of each failed cell, on each side, to the best of its neighbors there."""
        size = self.size
        order = np.argsort(self._shown[:size], kind="stable")
        for side in range(self.facing.shape[1]):
            beyond = self.facing[order, side ^ 1]
            chosen = np.isin(beyond, self._void)
            self.facing[beyond[chosen], side] = order[chosen]  # the last one, which is the best, overwrites the others

    def _refresh(self) -> None:
        """Update the posteriors of all arms if this is due. The first rewards set the scale."""
        if not self.scale:
            if not self._told or self._told + len(self._failed) < self._begin:
                return
            means = self._rewards[np.flatnonzero(self._weights[: self.size])]
            self._distinct = len(means) > 1 and len(set(means.tolist())) == len(means)
            self._pulls[: self.size] += self._failures[: self.size].astype(np.int64)
            self._tries[: self.size] -= self._failures[: self.size]
        elif not self._stale and self._since < _REFRESH * min(self._told, self._clock):
            return
        size, before = self.size, self._diverged
        self._sort_out()
        if not self.scale or any((arm in before) != (arm in self._diverged) for arm in range(self._begin)):
            self._set_scale()
        weights, rewards = self._weights[:size], self._rewards[:size]
        if self._failed:
            failures = self._failures[:size]
            rewards = (weights * rewards + failures * self._worst) / np.maximum(weights + failures, 1e-9)
            weights = weights + failures
            weights[self._void], rewards[self._void] = 0.0, self._worst
        self.sweep(weights, rewards, self._noise, self._told)
        self._since, self._stale, self._index = 0.0, False, None
        self._shown = self.means
        if len(self._void):
            self._shown = self.means.copy()
            self._shown[self._void] = self._worst - self.level
            self._face_the_best()
        # Transposed, since numpy is slow to reduce a short last axis.
        better = np.maximum.reduce(self._shown.take(self.facing[:size].T))
        self._beside = better + np.sqrt(_FACING * self.room.take(self.depth[:size]))

    def indices(self, pending: Mapping[int, int]) -> Floats:
        """Return the index of each arm, float (arms,). `pending`: arm → number of open pulls."""
        size = self.size
        if not self.scale:
            # Nothing is known yet: pull the arms in turn, from the widest cells to the narrowest.
            index: Floats = -(self._pulls[:size] + self._tries[:size]) - self.depth[:size] / (DEEPEST + 1.0)
            for arm, times in pending.items():
                index[arm] -= times
        else:
            if self._index is None or len(self._index) != size or self._tried:
                variances = self.variances[:size]
                if self._tried:
                    variances = variances / (1.0 + variances * self._tries[:size] / self._noise)
                self._index = np.sqrt(_CERTAINTY * variances + self.room.take(self.depth[:size]))
                self._index += self.means[:size]
                if len(self._void):
                    self._index[self._void] = [self._worth(arm, 0) for arm in self._void.tolist()]
                known = self._index[: len(self._beside)]
                np.maximum(known, self._beside, out=known)
            index = self._index.copy()
            for arm, times in pending.items():
                index[arm] = self._index_of(arm, times)
        return index

    def _index_of(self, arm: int, times: int) -> float:
        # `times`, here and below: the open pulls of the arm, which count as if their rewards were known.
        worth = self._worth(arm, times)
        return max(worth, self._beside.item(arm)) if arm < len(self._beside) else worth

    def _worth(self, arm: int, times: int) -> float:
        room = self.room.item(self.depth.item(arm))
        if arm in self._failed and not self._has_run(arm):
            return self._worst - self.level + math.sqrt(room)
        return self.means.item(arm) + math.sqrt(_CERTAINTY * self._variance(arm, times) + room)

    def _has_run(self, arm: int) -> bool:
        return arm not in self._diverged and self._weights.item(arm) > 0.0

    def _variance(self, arm: int, times: int) -> float:
        variance, rewards = self.variances.item(arm), times + self._tries.item(arm)
        return variance / (1.0 + variance * rewards / self._noise) if rewards else variance

    def choose(self, *, lost: int, upper: float | None = None) -> int:
        """Return the next arm; -1 if no cell can hold an arm below `upper`, a bound of the first coordinate.

        Open pulls with an id below `lost` are ignored.
        """
        pending: dict[int, int] = {}
        for id, arm in self.open.items():
            if arm >= 0 and id >= lost:
                pending[arm] = pending.get(arm, 0) + 1
        bound = math.inf if upper is None else upper
        self._asked += 1
        broad = 0  # 0: cells of any depth
        if len(self._void) and self.points.shape[1] > 1 and self._asked % _BROAD == 0:
            broad = 1 + self._asked // _BROAD % int(2.0 * math.log2(self.size))
        for _ in range(_SPLITS):
            self._refresh()
            index = self.indices(pending)
            if broad:
                deep = self.depth[: len(index)] > broad
                if not deep.all():
                    index[deep] = -math.inf
            if upper is not None:
                index[self.low[: len(index), 0] >= upper] = -math.inf
            cell = int(index.argmax())
            if index[cell] == -math.inf or self.points[cell, 0] > bound:
                break
            arm = self._pulled_or_split(cell, index.item(cell), pending)
            while arm in self._failed and index.max() > -math.inf:  # its cell is too narrow to be split
                index[cell] = -math.inf
                cell = int(index.argmax())
                arm = self._pulled_or_split(cell, index.item(cell), pending)
            if self.points[arm, 0] <= bound:
                return arm
        return self._below(index, bound)

    def _pulled_or_split(self, cell: int, index: float, pending: Mapping[int, int]) -> int:
        """Return the arm to pull for a chosen cell: its own arm, a new arm in it, or a better arm next to it."""
        if not self.scale:
            ready = bool(self._pulls[cell] or self._tries[cell]) or cell in pending
            return self._halve(cell) if ready else cell
        if self._beside.item(cell) >= index and self._beside.item(cell) > self._worth(cell, pending.get(cell, 0)):
            sides = self.facing[cell]
            side = int(self._shown[sides].argmax())
            better = int(sides[side])
            return self._halve_towards(cell, side) if self._ripe(better, cell, pending) else better
        return self._halve(cell) if self._ripe(cell, cell, pending) else cell

    def _ripe(self, arm: int, cell: int, pending: Mapping[int, int]) -> bool:
        """Return whether to split a cell instead of pulling `arm` again.

        It is split if the arm failed, or if its posterior variance is below κ times the variation within the cell and
        enough pulls were repeated to estimate the noise.
        """
        if arm in self._failed:
            return True
        within = self.variation.item(self.depth.item(cell) + 1)
        least = max(_REPEATS, 0.0 if self._exact else _REPEATED * self._told)
        return self._variance(arm, pending.get(arm, 0)) < _PATIENCE * within and self._repeats >= least

    def _split(self, cell: int, axis: int, at: float, point: Floats, *, keeps_low: bool | None = None) -> int:
        """Split a cell, and return the new arm, at `point`. `keeps_low`: whether the old arm is below; None: by position."""
        new = self.cut(cell, axis, at, keeps_low=bool(self.points[cell, axis] < at) if keeps_low is None else keeps_low)
        self.points[new] = point
        self._stale = True
        return new

    def _halve(self, cell: int) -> int:
        """Split a cell across its longest side, and return the new arm; its own arm if the cell cannot be split."""
        half = self.halves(cell)
        if half is None or self.full:
            return cell
        axis, cut = half
        low, high = self.low[cell].copy(), self.high[cell].copy()
        (low if self.points[cell, axis] < cut else high)[axis] = cut
        return self._split(cell, axis, cut, self._middle(low, high))

    def _halve_towards(self, cell: int, side: int) -> int:
        """Split off half of a cell at one of its sides, or the part between its arm and that side."""
        axis, above = divmod(side, 2)
        low, high = self.low[cell].copy(), self.high[cell].copy()
        start, at, end = float(low[axis]), float(self.points[cell, axis]), float(high[axis])
        middle = 0.5 * (start + end)
        if self.full or min(end - middle, abs((end if above else start) - at)) < 2.0 * NARROWEST:
            return self._halve(cell)
        between = at >= middle if above else at < middle
        (low if above else high)[axis] = at if between else middle
        point = self._middle(low, high)
        if cell in self._failed:  # take the coordinates of the better arm on the other axes
            better = self.points[self.facing[cell, side]].copy()
            better[axis] = point[axis]
            point = np.clip(better, low, high)
        return self._split(cell, axis, 0.5 * (at + float(point[axis])) if between else middle, point)

    def _below(self, index: Floats, upper: float) -> int:
        """Return the arm with the largest index below a bound, creating one if needed; -1 if no cell has room for it."""
        for arm in np.argsort(-index, kind="stable").tolist():
            if index[arm] == -math.inf:
                break
            if self.points[arm, 0] <= upper:
                return int(arm)
            low, high = self.low[arm].copy(), self.high[arm].copy()
            high[0] = upper
            if self.full or upper - low[0] < 2.0 * NARROWEST or self.points[arm, 0] - upper < NARROWEST:
                continue
            return self._split_between(arm, self._middle(low, high))
        return -1

    def _split_between(self, cell: int, point: Floats) -> int:
        gaps = np.abs(point - self.points[cell])
        axis = int(gaps.argmax())
        return self._split(cell, axis, 0.5 * float(point[axis] + self.points[cell, axis]), point)

    def arm_at(self, point: Floats) -> int:
        """Return the arm at a point of the cube, creating it if needed; without room, the arm of the cell around it."""
        cell = self.find(point)
        if self.full or float(np.abs(point - self.points[cell]).max()) < 2.0 * NARROWEST:
            return cell
        return self._split_between(cell, point)

    def best(self) -> int:
        """Return the index of the first pull of the best arm, by a lower confidence bound."""
        size = self.size
        merit = self.means[:size] - np.sqrt(self.variances[:size]) if self.scale else self._rewards[:size].copy()
        merit[(self._first[:size] < 0) | (self._rewards[:size] < self._floor)] = -math.inf
        return int(self._first[int(merit.argmax())])
