"""SplitUCBV: an anytime bandit over an interval or a box that splits cells and learns how far the function varies in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from sparsekit.bandit.arms import Arm
from sparsekit.bandit.base import Drop, Interval, Pull, check_generator, check_number
from sparsekit.bandit.field import Field
from sparsekit.bandit.moves import arm_at, choose, drop_side
from sparsekit.bandit.pulls import (
    bandit_summary,
    check_pull,
    check_settings,
    generator_from_state,
    generator_state,
    reading_state,
)
from sparsekit.bandit.space import Box, BoxPull
from sparsekit.errors import InvalidValueError

__all__ = ["SplitUCBV"]

Trial = TypeVar("Trial", Pull, BoxPull)

# Sums of squares of larger rewards overflow.
_LARGEST_REWARD = 1e100
# A pull that is still open after so many others counts as lost: until then its arm is taken for better known than it is.
_LOST_AFTER = 64


class SplitUCBV(Generic[Trial]):
    """Optimism over a tree of cells, with the variation at each depth learned.

    The space is cut into cells, each with one arm: a fixed point. A cell is split in two; the part with the arm keeps it
    with all that is known of it, and the other part gets an arm of its own. For the mean reward f

        f(new arm) - f(arm that it was split from) ~ N(0, D[h]),   h = how often the cell had been split,

    from which each arm has a posterior mean μ and variance v, given its own rewards, its parent's posterior and its
    children's rewards. D comes from the arms themselves: at each depth the squared difference between a new arm's rewards
    and its parent's posterior, of which noise has the share that its variance has, shrunk to r D[h - 1]. The noise σ² comes
    from rewards of one and the same point, never from the variation between points. The cell of largest index

        U = max(μ + sqrt(p v + B[h]), M + sqrt(φ B[h])),   B[h] = D[h + 1] (a + b q[h] + c levels),

    is next, where M is the largest mean of an arm that the cell faces (on an interval, its two neighbours): right beside a
    better arm a cell may be good though its own arm is not, as at the edge of a cliff. `levels` counts how much deeper the
    best cell lies. q is ν/2 (t^(2 / (ν + 1)) - 1) after t rewards: log t where many arms have shown what the variation
    is, ν → ∞, but growing faster at depths where few have, so that a narrow peak in a wide cell is found in the end. The arm
    of that cell (or the better one that it faces) is pulled until v < κ D[h + 1]; then the cell is split across its longest
    side (or towards that arm), and the new arm is pulled.

    Now and then a pull is a probe: of 64 points drawn in the space, those at least half as far from every arm as the farthest
    one count, and the one beside the best arm becomes an arm. It finds what the model rules out, such as a narrow plateau far
    from the hill that is being climbed. A probe that loses l deviations of the noise, by the mean of the arm that it lies
    beside, costs l³/9, but 1/2 to 10; together they may cost 6 log(t / 100) by the t-th reward, so that there are many where
    they lose little. After a fall of rewards t is counted anew, with 10 in place of 100.

    All is relative to the first rewards, so that adding to all of them or scaling them changes no proposal (but for rounding),
    and the horizon is not needed. All arms learn from one another when a new one has its first reward, and else when the
    number of rewards has grown by a twenty-fifth: the time for a step hardly grows. At most 2048 cells are made. Where repeated
    rewards are equal to the last bit, hardly a point is tried again.

    | point | decision |
    |---|---|
    | several open pulls | each open one counts as told with the reward that was expected, until 64 more were proposed |
    | another value was executed | becomes an arm of its own, in a cell split off from the one that it lies in |
    | `upper` | cells that begin below compete; if the arm of the chosen one lies above, it gets a new one below |
    | `drop` | the part of the cell on that side of the value is never proposed again |
    | `cost` | the reward of a pull is gain / cost and counts with weight cost, so that Σ gain / Σ cost is maximised |
    | `discount` | f drifts: each reward told lets the share `discount` of what is known survive |
    | no `discount` | a `Watch` looks for falling rewards; arms then keep a twentieth of a reward each |
    | NaN or infinity | is refused, and the pull stays open |

    Source: ours. After Bubeck, Munos, Stoltz, Szepesvári, "X-Armed Bandits", JMLR 2011 (optimism over a tree of cells, with a
    bound for the variation within); Azar, Lazaric, Brunskill, "Online Stochastic Optimization under Correlated Bandit
    Feedback", ICML 2014 (HCT: a cell is split when its arm is known better than it varies); Li, Wang, Cheng, Song,
    "Optimum-statistical Collaboration Towards General and Efficient Black-box Optimization", TMLR 2023 (VHCT: the noise is
    learned too); Chipman, McCulloch, "Hierarchical Priors for Bayesian CART Shrinkage", Statistics and Computing 2000 (a
    Gaussian model over a tree of boxes, each shrunk towards its parent); Johnson, Moore, Ylvisaker, "Minimax and Maximin
    Distance Designs", Journal of Statistical Planning and Inference 1990 (points far from all others).
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
        self.space = space
        self.discount = None if discount is None else check_number(discount, "discount")
        if self.discount is not None and not 0.0 < self.discount <= 1.0:
            raise InvalidValueError(
                f"discount must be in (0, 1], got {discount!r}; 1 forgets nothing, None only when rewards fall"
            )
        self._rng = check_generator(rng)
        self._settings: dict[str, Any] = {"space": asdict(space), "discount": self.discount}
        self._axes = 1 if isinstance(space, Interval) else len(space.intervals)
        self._field = Field(self._axes, discount=self.discount, rng=self._rng)
        self._next = 0
        self._unit_cost: float | None = None
        self._told: list[tuple[int, Any, float]] = []
        self._open: dict[int, Any] = {}
        # What arms are called in the space, of those proposed so far.
        self._values: dict[int, Any] = {}

    def __repr__(self) -> str:
        return bandit_summary(self, told=len(self._told), waiting=len(self._open))

    # --- asking ---

    def ask(self, *, upper: float | None = None) -> Trial:
        """Propose a value.

        Args:
            upper: The proposal does not exceed it; for an `Interval` alone. `None` or more than its end: no bound.

        Returns:
            An open pull. Several may be open at once; one that is never told costs nothing in the end.

        Raises:
            InvalidValueError: `upper` is below the interval, NaN, or given for a `Box`.
        """
        lost = self._next - _LOST_AFTER
        if upper is None:
            return self._propose(choose(self._field, lost=lost, rng=self._rng))
        if not isinstance(self.space, Interval):
            raise InvalidValueError("upper bounds the one value of an Interval; for a Box, narrow its intervals")
        bound = check_number(upper, "upper")
        if bound < self.space.low:
            raise InvalidValueError(
                f"upper must be at least {self.space.low!r}, the lowest value of the space, got {upper!r};"
                " widen the space, or ask without a bound and execute another value"
            )
        if bound >= self.space.high:
            return self._propose(choose(self._field, lost=lost, rng=self._rng))
        return self._propose(choose(self._field, lost=lost, upper=self.space.to_unit(bound), rng=self._rng), bound)

    def _propose(self, arm: int, bound: float = math.inf) -> Trial:
        id, self._next = self._next, self._next + 1
        value: Any = bound if arm < 0 else self._values.get(arm)
        if value is None:
            value = self._values[arm] = self._value(self._field.points[arm].tolist())
        made: Pull | BoxPull
        if isinstance(self.space, Interval):
            # The way through the unit interval may round across the bound.
            made = Pull(id, min(value, bound))
        else:
            made = BoxPull(id, dict(value))
        self._open[id] = made.value
        self._field.open[id] = arm
        return cast("Trial", made)

    # --- telling ---

    def tell(self, pull: Trial, reward: float, *, cost: float = 1.0, drop: Drop | None = None) -> None:
        """Report what came of a pull.

        Args:
            pull: What `ask` gave, or the same id with the value that was tried in its place.
            reward: Larger is better.
            cost: What the pull took, above 0, in any unit. With it `reward` is a gain, and gain per cost is maximised.
            drop: Never propose the part of the cell "below" or "above" the value again; for an `Interval` alone.

        Raises:
            InvalidValueError: the pull is not open, its value is outside the space, the reward is NaN or infinite, the cost is
                not above 0, or `drop` is no such word; nothing has changed then and the pull stays open.
        """
        self._check_open(pull)
        proposed = self._open[pull.id]
        value = proposed if pull.value == proposed else self._check_value(pull.value)
        number = reward if type(reward) is float else check_number(reward, "reward")
        price = cost if type(cost) is float else check_number(cost, "cost")
        if not 0.0 < price < math.inf:
            raise InvalidValueError(f"cost must be finite and above 0, got {cost!r}; leave it out if every pull costs the same")
        weight = price / (self._unit_cost or price)
        rate = number / price
        if not max(abs(rate), abs(number)) <= _LARGEST_REWARD or not 0.0 < weight < math.inf:
            raise InvalidValueError(
                f"reward and reward / cost must be finite and at most {_LARGEST_REWARD:g} in magnitude, got {reward!r} at cost"
                f" {cost!r}; tell a small finite number for a failed trial, or forget the pull"
            )
        if drop not in (None, "below", "above"):
            raise InvalidValueError(f"drop must be 'below', 'above' or None, got {drop!r}")
        if drop is not None and not isinstance(self.space, Interval):
            raise InvalidValueError("drop rules out one side of a value of an Interval; a Box has no sides")
        self._unit_cost = price / weight
        field = self._field
        arm = self._close(pull)
        if arm < 0 or value is not proposed:
            if arm >= 0:
                field.miss(arm, weight)
            arm = arm_at(field, np.array(self._point(value)))
        self._told.append((pull.id, value, rate))
        field.learn(arm, rate, weight, len(self._told) - 1)
        if drop is not None:
            drop_side(field, arm, drop)

    def _close(self, pull: Trial) -> int:
        """The arm of an open pull, -1 if it stands no more."""
        del self._open[pull.id]
        return self._field.open.pop(pull.id)

    def _value(self, point: list[float]) -> Any:
        return self.space.from_unit(point[0]) if isinstance(self.space, Interval) else self.space.from_unit(point)

    def _point(self, value: Any) -> tuple[float, ...]:
        return (self.space.to_unit(value),) if isinstance(self.space, Interval) else self.space.to_unit(value)

    def _check_open(self, pull: Trial) -> None:
        check_pull(pull)
        if pull.id in self._open:
            return
        known = isinstance(pull.id, int) and 0 <= pull.id < self._next
        told = any(pull.id == id for id, _, _ in self._told)
        what = "has already been told" if told else "was forgotten" if known else "was never proposed"
        raise InvalidValueError(f"pull {pull.id!r} {what}; open are {sorted(self._open)[:10] or 'none'}; ask() gives a new one")

    def _check_value(self, value: Any) -> Any:
        """The executed value in plain numbers."""
        if not isinstance(self.space, Interval):
            return self.space.check(value)
        number = check_number(value, "the value of a pull")
        if number not in self.space:
            raise InvalidValueError(
                f"the value of a pull must be in [{self.space.low!r}, {self.space.high!r}], got {value!r};"
                " tell the nearest value inside, or widen the space"
            )
        return number

    def forget(self, pull: Trial) -> None:
        """Close a pull of which nothing will be told, such as a failed trial.

        Raises:
            InvalidValueError: the pull is not open.
        """
        self._check_open(pull)
        self._close(pull)

    # --- what is known ---

    def best(self) -> Trial:
        """The first told pull of the arm that is best with some confidence: of largest posterior mean less one deviation.

        Raises:
            InvalidValueError: nothing has been told.
        """
        if not self._told:
            raise InvalidValueError("no reward has been told yet, so no pull is best; tell() one first")
        id, value, _ = self._told[self._field.best()]
        return cast("Trial", Pull(id, value) if isinstance(self.space, Interval) else BoxPull(id, dict(value)))

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The cells over an `Interval`, from low to high, with what is believed of their arms; empty for a `Box`.

        The mean is that of the posterior, and `variance / pulls` its variance: the squared standard error of the mean.
        Cells that were dropped are left out.
        """
        space = self.space
        return (
            ()
            if not isinstance(space, Interval)
            else tuple(
                Arm(space.from_unit(low), space.from_unit(high), pulls, mean, variance * pulls)
                for low, high, pulls, mean, variance, _ in self._field.rows()
            )
        )

    def indices(self) -> tuple[float, ...]:
        """The index U of each arm, in the order of `arms`; infinite until there are enough rewards to learn from."""
        return tuple(row[-1] for row in self._field.rows()) if isinstance(self.space, Interval) else ()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """All that it takes to go on: settings, cells, posterior, pulls and the generator, as plain JSON values."""
        return {
            "settings": {"space": asdict(self.space), "discount": self.discount},
            "pulls": {
                "next": self._next,
                "open": [[id, _copied(value)] for id, value in self._open.items()],
                "told": [[id, _copied(value), reward] for id, value, reward in self._told],
            },
            "unit_cost": self._unit_cost,
            "field": self._field.state_dict(),
            "generator": generator_state(self._rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same bits.

        The generator passed to the constructor is left alone from here on: the bandit gets one of its own.

        Args:
            state: From a `SplitUCBV` with the same settings.

        Raises:
            InvalidValueError: the settings differ, or the state is malformed; nothing has changed then.
        """
        with reading_state("SplitUCBV"):
            check_settings(self._settings, state)
            following = int(state["pulls"]["next"])
            open_: dict[int, Any] = {int(id): self._check_value(value) for id, value in state["pulls"]["open"]}
            told: list[tuple[int, Any, float]] = [
                (int(id), self._check_value(value), check_number(rate, "reward")) for id, value, rate in state["pulls"]["told"]
            ]
            ids = [*open_, *(id for id, _, _ in told)]
            if len(set(ids)) < len(ids) or not all(0 <= id < following for id in ids):
                raise InvalidValueError("a pull stands twice in the state, or has an id that was never given out")
            unit_cost = None if state["unit_cost"] is None else check_number(state["unit_cost"], "unit_cost")
            field = Field.from_state(state["field"], self._axes, discount=self.discount)
            if field.open.keys() != open_.keys() or not field.knows(len(told)):
                raise InvalidValueError("the pulls of the state are not those of its arms")
            rng = generator_from_state(state["generator"])
        self._next, self._open, self._told, self._unit_cost = following, open_, told, unit_cost
        self._field, self._rng, self._values = field, rng, {}


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
