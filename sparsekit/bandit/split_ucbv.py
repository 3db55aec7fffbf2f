"""SplitUCBV: an anytime bandit over an interval or a box that splits cells and learns how far the function varies in them.

The space is cut into cells, each with one arm, which is a fixed point. A cell is split in two; the part with the arm keeps it
and its rewards, and the other part gets a new arm. For the mean reward f

    f(new arm) - f(arm from which it was split) ~ N(0, D[h]),   h = number of earlier splits of the cell.

Each arm therefore has a posterior mean μ and variance v, given its own rewards, its parent's posterior and its children's
rewards. Failed trials, and rewards many times further below the best than the others, as from a diverging loss, count as the
worst reward, and only in the index of their own arm. D is learned: at each depth it is the squared difference between a new
arm's rewards and its parent's posterior, minus the share of noise, shrunk towards r D[h - 1]. The noise σ² comes from
repeated rewards of one point only. The next cell has the largest index

    U = max(μ + sqrt(p v + B[h]), M + sqrt(φ B[h])),   B[h] = D[h + 1] (a + b q[h] + c levels).

M is the largest mean of an arm that the cell faces; on an interval, these are its two neighbors. A cell next to a better arm
may be good even if its own arm is not, as at the edge of a cliff. `levels` counts how much deeper the best cell is. After t
rewards, q is ν/2 (t^(2 / (ν + 1)) - 1). If many arms have shown the variation, ν → ∞ and q is log t. At depths where few arms
have, q grows faster, so that a narrow peak in a wide cell is found in the end. The arm of the chosen cell, or the better one
that it faces, is pulled until v < κ D[h + 1]. Then the cell is split across its longest side, or towards that arm.

Rewards are taken relative to the first ones, so shifting or scaling them changes no proposal except for rounding. The
posteriors of all arms are updated when a new arm has its first reward, and whenever the number of rewards has grown by 4 %, so
the time per step hardly grows. In a box with failures, every third proposal is limited to cells above some depth. At most 2048
cells are created.

Source: ours. After Bubeck, Munos, Stoltz, Szepesvári, "X-Armed Bandits", JMLR 2011 (optimism over a tree of cells, with a bound
    for the variation within); Azar, Lazaric, Brunskill, "Online Stochastic Optimization under Correlated Bandit Feedback", ICML
    2014 (HCT: a cell is split when its arm is known better than it varies); Li, Wang, Cheng, Song, "Optimum-statistical
    Collaboration Towards General and Efficient Black-box Optimization", TMLR 2023 (VHCT: the noise is learned too); Chipman,
    McCulloch, "Hierarchical Priors for Bayesian CART Shrinkage", Statistics and Computing 2000 (a Gaussian model over a tree of
    boxes, each shrunk towards its parent).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsekit.bandit.base import Box, Interval, Pull, Side
from sparsekit.bandit.field import Field
from sparsekit.bandit.logged import LoggedBandit
from sparsekit.errors import InvalidValueError

_LOST_AFTER = 64


class SplitUCBV(LoggedBandit):
    """Finds the value of largest mean reward from noisy trials, in an interval or a box.

    Use it if each trial is expensive and its reward counts: it searches the best regions more and more finely, and needs
    neither a horizon nor a scale of the rewards. It adapts when rewards fall. A diverged loss counts like a failure, however
    large it is.

    ```python
    bandit = SplitUCBV(Interval(1e-4, 1.0, scale="log"), rng=np.random.default_rng(0))
    for _ in range(40):
        pull = bandit.ask()
        bandit.tell(pull, reward=-abs(np.log10(pull.value) + 2))
    print(bandit.best().value)  # near 0.01
    ```

    - Several pulls may be open. Each counts as told with its expected reward, until 64 more were proposed.
    - If you tried another value than the proposed one, tell that value: it becomes a separate arm.
    - `ask(upper=…)` proposes no value above the bound.
    - A reward that is NaN or infinite is refused, and the pull stays open. `forget` is for a trial that failed: its point
      gets the worst reward known.
    - `best()` returns the first told pull at the point with the largest mean minus one standard deviation.

    How it chooses is described at the top of `sparsekit/bandit/split_ucbv.py`.
    """

    def __init__(self, space: Interval | Box, *, rng: np.random.Generator) -> None:
        """Start a search.

        Args:
            space: The interval or box to search. Pulls of an `Interval` have a number as value, pulls of a `Box` a dict of
                numbers.
            rng: Draws the points within their cells; the same generator gives the same proposals.

        Raises:
            InvalidValueError: `space` is neither.
        """
        if not isinstance(space, (Interval, Box)):
            raise InvalidValueError(f"space must be an Interval or a Box, got {space!r}; pass Interval(low, high)")
        super().__init__(space, {}, rng)
        self._field = Field(1 if isinstance(space, Interval) else len(space.intervals), rng)
        self._values: dict[int, Any] = {}  # arm → value, of arms proposed so far

    def _choose(self, bound: float | None) -> Any:
        upper = None if bound is None else self._point(bound)[0]
        arm = self._field.choose(lost=self._next - _LOST_AFTER, upper=upper)
        self._field.open[self._next] = arm
        if arm < 0:
            return bound
        value: Any = self._values.get(arm)
        if value is None:
            point = self._field.points[arm].tolist()
            value = self.space.from_unit(point[0]) if isinstance(self.space, Interval) else self.space.from_unit(point)
            self._values[arm] = value
        # Conversion to the unit interval and back may round across the bound.
        return value if bound is None else min(value, bound)

    def _point(self, value: Any) -> tuple[float, ...]:
        return (self.space.to_unit(value),) if isinstance(self.space, Interval) else self.space.to_unit(value)

    def tell(self, pull: Pull, reward: float, *, eliminate: Side | None = None) -> None:
        """Report the reward of a pull; see `Bandit.tell`. `eliminate` has no effect."""
        value, number, elsewhere = self._take(pull, reward, eliminate)
        self._field.learn(self._executed(pull.id, value, elsewhere=elsewhere), number, len(self._told) - 1)

    def forget(self, pull: Pull) -> None:
        value, elsewhere = self._close(pull)
        self._field.fail(self._executed(pull.id, value, elsewhere=elsewhere))

    def _executed(self, id: int, value: Any, *, elsewhere: bool) -> int:
        """Close a pull of the field; return the arm at the executed value."""
        arm = self._field.open.pop(id)
        if arm >= 0 and not elsewhere:
            return arm
        if arm >= 0:
            self._field.miss(arm)
        return self._field.arm_at(np.array(self._point(value)))

    def _place_of_best(self) -> int:
        return self._field.best()
