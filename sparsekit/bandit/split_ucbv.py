"""SplitUCBV: an anytime bandit over an interval or a box that splits cells and learns how far the function varies in them."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np

from sparsekit.bandit.base import Box, BoxPull, Interval, Pull, Side, check_number
from sparsekit.bandit.field import Field
from sparsekit.bandit.logged import Arm, LoggedBandit, Trial
from sparsekit.errors import InvalidValueError

# A pull that is still open after so many others counts as lost: until then its arm is taken for better known than it is.
_LOST_AFTER = 64


class SplitUCBV(LoggedBandit[Trial]):
    """Optimism over a tree of cells, with the variation at each depth learned.

    The space is cut into cells, each with one arm: a fixed point. A cell is split in two; the part with the arm keeps it
    with all that is known of it, and the other part gets an arm of its own. For the mean reward f

        f(new arm) - f(arm that it was split from) ~ N(0, D[h]),   h = how often the cell had been split,

    from which each arm has a posterior mean μ and variance v, given its own rewards, its parent's posterior and its
    children's rewards. D comes from the arms themselves: at each depth the squared difference between a new arm's rewards
    and its parent's posterior, of which noise has the share that its variance has, shrunk to r D[h - 1]. The noise σ² comes
    from rewards of one and the same point, never from the variation between points. The cell of largest index

        U = max(μ + sqrt(p v + B[h]), M + sqrt(φ B[h])),   B[h] = D[h + 1] (a + b q[h] + c levels),

    is next, where M is the largest mean of an arm that the cell faces (on an interval, its two neighbours): right next to a
    better arm a cell may be good though its own arm is not, as at the edge of a cliff. `levels` counts how much deeper the
    best cell is. q is ν/2 (t^(2 / (ν + 1)) - 1) after t rewards: log t where many arms have shown what the variation
    is, ν → ∞, but growing faster at depths where few have, so that a narrow peak in a wide cell is found in the end. The arm
    of that cell (or the better one that it faces) is pulled until v < κ D[h + 1]; then the cell is split across its longest
    side (or towards that arm), and the new arm is pulled.

    All is relative to the first rewards, so that adding to all of them or scaling them changes no proposal (but for rounding),
    and the horizon is not needed. All arms learn from one another when a new one has its first reward, and else when the
    number of rewards has grown by a twenty-fifth: the time for a step hardly grows. At most 2048 cells are made. Where repeated
    rewards are equal to the last bit, hardly a point is tried again.

    | point | decision |
    |---|---|
    | several open pulls | each open one counts as told with the reward that was expected, until 64 more were proposed |
    | another value was executed | becomes an arm of its own, in a cell split off from the one that contains it |
    | `upper` | cells that begin below compete; if the arm of the chosen one is above, it gets a new one below |
    | `eliminate` | the part of the cell on that side of the value is never proposed again |
    | `cost` | the reward of a pull is gain / cost and counts with weight cost, so that Σ gain / Σ cost is maximised |
    | `discount` | f drifts: each reward told lets the share `discount` of what is known survive |
    | no `discount` | a cumulative sum looks for falling rewards; arms then keep a twentieth of a reward each |
    | NaN or infinity | is refused, and the pull stays open |
    | `best` | the first told pull of the arm of largest posterior mean less one deviation |

    Source: ours. After Bubeck, Munos, Stoltz, Szepesvári, "X-Armed Bandits", JMLR 2011 (optimism over a tree of cells, with a
    bound for the variation within); Azar, Lazaric, Brunskill, "Online Stochastic Optimization under Correlated Bandit
    Feedback", ICML 2014 (HCT: a cell is split when its arm is known better than it varies); Li, Wang, Cheng, Song,
    "Optimum-statistical Collaboration Towards General and Efficient Black-box Optimization", TMLR 2023 (VHCT: the noise is
    learned too); Chipman, McCulloch, "Hierarchical Priors for Bayesian CART Shrinkage", Statistics and Computing 2000 (a
    Gaussian model over a tree of boxes, each shrunk towards its parent).
    """

    @overload
    def __init__(self: SplitUCBV[Pull], space: Interval, *, rng: np.random.Generator, discount: float | None = ...) -> None: ...
    @overload
    def __init__(self: SplitUCBV[BoxPull], space: Box, *, rng: np.random.Generator, discount: float | None = ...) -> None: ...
    def __init__(self, space: Interval | Box, *, rng: np.random.Generator, discount: float | None = None) -> None:
        """Cut the space into a few equal cells.

        Args:
            space: Where to search: an interval, whose pulls have a number as value, or a box, whose pulls map names to numbers.
            rng: Draws the arms within their cells.
            discount: What each reward multiplies the knowledge of all earlier ones by, in (0, 1]; 1 if f stays as it is. As a
                rule of thumb, 1 - 1 / (number of rewards over which f changes). `None`: nothing is forgotten until repeated
                rewards fall below earlier ones of the same arm by more than chance; then, nearly all of them.

        Raises:
            InvalidValueError: one of these is not allowed.
        """
        if not isinstance(space, (Interval, Box)):
            raise InvalidValueError(f"space must be an Interval or a Box, got {space!r}; pass Interval(low, high)")
        self.discount = None if discount is None else check_number(discount, "discount")
        if self.discount is not None and not 0.0 < self.discount <= 1.0:
            raise InvalidValueError(
                f"discount must be in (0, 1], got {discount!r}; 1 forgets nothing, None only when rewards fall"
            )
        super().__init__(space, {"discount": self.discount}, rng)
        self._field = Field(1 if isinstance(space, Interval) else len(space.intervals), discount=self.discount, rng=rng)
        self._unit_cost: float | None = None
        # What arms are called in the space, of those proposed so far.
        self._values: dict[int, Any] = {}

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
        # The way through the unit interval may round across the bound.
        return value if bound is None else min(value, bound)

    def _point(self, value: Any) -> tuple[float, ...]:
        return (self.space.to_unit(value),) if isinstance(self.space, Interval) else self.space.to_unit(value)

    def tell(self, pull: Trial, reward: float, *, cost: float = 1.0, eliminate: Side | None = None) -> None:
        """Report what came of a pull.

        Args:
            pull: What `ask` gave, or the same id with the value that was tried in its place.
            reward: Larger is better.
            cost: What the pull took, above 0, in any unit. With it `reward` is a gain, and gain per cost is maximised.
            eliminate: Never propose the part of the cell "below" or "above" the value again; for an `Interval` alone.

        Raises:
            InvalidValueError: the pull is not open, its value is outside the space, the reward is NaN or infinite, the cost is
                not above 0, or `eliminate` is neither of them; nothing has changed then and the pull stays open.
        """
        price = cost if type(cost) is float else check_number(cost, "cost")
        weight = price / (self._unit_cost or price) if price > 0.0 else 0.0
        if not (price < math.inf and 0.0 < weight < math.inf):
            raise InvalidValueError(f"cost must be finite and above 0, got {cost!r}; leave it out if every pull costs the same")
        value, number, elsewhere = self._take(pull, reward, eliminate, cost=price)
        self._unit_cost = price / weight
        field = self._field
        arm = field.open.pop(pull.id)
        if arm < 0 or elsewhere:
            if arm >= 0:
                field.miss(arm, weight)
            arm = field.arm_at(np.array(self._point(value)))
        field.learn(arm, number / price, weight, len(self._told) - 1)
        if eliminate is not None:
            field.eliminate_side(arm, eliminate)

    def forget(self, pull: Trial) -> None:
        super().forget(pull)  # type: ignore[arg-type]  # which mypy takes for one of any kind
        del self._field.open[pull.id]

    def _place_of_best(self) -> int:
        return self._field.best()

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The cells over an `Interval`, from low to high, with what is believed of their arms; empty for a `Box`.

        The mean is that of the posterior, and `variance / pulls` its variance: the squared standard error of the mean.
        Cells that were dropped are left out.
        """
        space = self.space
        if not isinstance(space, Interval):
            return ()
        return tuple(
            Arm(space.from_unit(low), space.from_unit(high), pulls, mean, variance * pulls)
            for low, high, pulls, mean, variance, _ in self._field.rows()
        )

    def indices(self) -> tuple[float, ...]:
        """Return the index U of each arm, in the order of `arms`; infinite until there are enough rewards to learn from."""
        return tuple(row[-1] for row in self._field.rows()) if isinstance(self.space, Interval) else ()
