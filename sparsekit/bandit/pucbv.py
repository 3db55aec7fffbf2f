"""P-UCBV: an upper-confidence bandit that splits the interval where it has pulled and can drop one side at once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from sparsekit.bandit.base import Drop, Interval, Pull, check_generator, check_number
from sparsekit.bandit.ledger import Ledger, generator_from_state, generator_state
from sparsekit.errors import InvalidValueError

__all__ = ["PUCBV", "Arm"]


@dataclass(frozen=True)
class Arm:
    """One part of the interval, and what was learned of it.

    Args:
        low: The smallest value that belongs to it.
        high: Its end, which belongs to the next arm (to this one where the space ends).
        pulls: Rewards credited, those inherited from the arms it was split from included; h in the paper.
        mean: Of these rewards; 0 if there are none.
        variance: Of these rewards, divided by `pulls`; 0 if there are none.
    """

    low: float
    high: float
    pulls: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def rewarded(self, reward: float) -> Arm:
        """This arm after one more reward (Welford's update: no sum of squares that could cancel)."""
        pulls = self.pulls + 1
        step = reward - self.mean
        mean = self.mean + step / pulls
        variance = (self.variance * self.pulls + step * (reward - mean)) / pulls
        return replace(self, pulls=pulls, mean=mean, variance=variance)


class PUCBV:
    """Prompt Upper Confidence Bound Variance: a `Bandit` over an interval.

    The interval is cut into arms, disjoint and ordered. After t rewards and with I arms, an arm with h pulls of mean ḡ
    and variance v̄ has the index

        U = ḡ + sqrt(ρ (v̄ + 2) · max(0, log(ξ ψ ε)) / (4 (h + 1))),   ψ = ξ / I²,   ε = decay^t,

    and the arm of largest index is pulled at a value drawn uniformly from it (on the scale of the space). The reward
    splits the arm at the pulled value: both parts inherit all its rewards and get the new one, and `drop` takes one of
    them away for good.

    Where the paper is silent or undefined:
    - the logarithm is clamped at 0: it turns negative after about log(ξ²/I²) / log(1/decay) rewards, and from then on
      the rule is greedy on the means (raise `decay` towards 1 to explore for longer);
    - an arm without rewards has mean and variance 0, so rewards should lie around 0, or below it for what is bad;
    - until the first reward the arm is drawn at random, for every open pull; later, ties go to the lowest arm;
    - an arm is not split where a part would be narrower than `min_width`; it gets the reward whole, and `drop` does
      nothing. So at least one arm always stands;
    - the value that counts is the one in the told pull. If it lies where all arms have been dropped, the nearest arm gets
      the reward and is not split;
    - with `upper`, only arms that begin below it compete, and the draw stops there. If none does, `upper` itself is
      proposed.

    Source: Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing", ICDE 2025 (arXiv 2412.07216),
    Algorithm 2.
    """

    def __init__(
        self,
        space: Interval,
        *,
        horizon: float,
        arms: int = 5,
        exploration: float = 1.0,
        rng: np.random.Generator,
        decay: float = 0.5,
        min_width: float = 1e-3,
    ) -> None:
        """Cut the space into equal arms.

        Args:
            space: Where to search.
            horizon: ξ in the paper, about the number of pulls to come. FedLPS has one bandit per client and sets
                ξ = R / (K·ϵ), rounds over clients per round.
            arms: How many to begin with; I_0 in the paper.
            exploration: ρ in the paper, at least 0; 0 is greedy.
            rng: Draws the first arm and the values.
            decay: What each reward multiplies ε by, in (0, 1]; the paper halves it.
            min_width: The narrowest part that a split may leave, as a share of the space on its scale, in
                [0, 1/arms].

        Raises:
            InvalidValueError: one of these is not allowed, or the space holds too few numbers for so many arms.
        """
        if not isinstance(space, Interval):
            raise InvalidValueError(f"space must be an Interval, got {space!r}; pass Interval(low, high)")
        if isinstance(arms, bool) or not isinstance(arms, (int, np.integer)) or arms < 1:
            raise InvalidValueError(f"arms must be an integer >= 1, got {arms!r}")
        self.space = space
        self.horizon = check_number(horizon, "horizon")
        self.exploration = check_number(exploration, "exploration")
        self.decay = check_number(decay, "decay")
        self.min_width = check_number(min_width, "min_width")
        if not 0.0 < self.horizon < math.inf:
            raise InvalidValueError(f"horizon must be finite and above 0, got {horizon!r}; it is the number of pulls to come")
        if not 0.0 <= self.exploration < math.inf:
            raise InvalidValueError(f"exploration must be finite and at least 0, got {exploration!r}; 0 is greedy")
        if not 0.0 < self.decay <= 1.0:
            raise InvalidValueError(f"decay must be in (0, 1], got {decay!r}; the paper has 0.5, and 1 is no decay")
        if not 0.0 <= self.min_width <= 1.0 / arms:
            raise InvalidValueError(f"min_width must be in [0, 1/arms] = [0, {1 / arms:g}], got {min_width!r}")
        edges = [space.from_unit(i / arms) for i in range(int(arms) + 1)]
        if any(a >= b for a, b in pairwise(edges)):
            raise InvalidValueError(f"{space!r} holds too few numbers for {arms} arms; take fewer arms or a wider space")
        self._settings: dict[str, Any] = {
            "space": asdict(space),
            "horizon": self.horizon,
            "arms": int(arms),
            "exploration": self.exploration,
            "decay": self.decay,
            "min_width": self.min_width,
        }
        self._arms = [Arm(low, high) for low, high in pairwise(edges)]
        self._rng = check_generator(rng)
        self._ledger = Ledger(space)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms that stand, from low to high."""
        return tuple(self._arms)

    def indices(self) -> tuple[float, ...]:
        """The index U of each arm, in the order of `arms`."""
        # log(ξ ψ ε), taken apart so that ε cannot underflow to 0 in a long run.
        growth = 2.0 * math.log(self.horizon / len(self._arms)) + len(self._ledger.told) * math.log(self.decay)
        scale = self.exploration * max(0.0, growth) / 4.0
        return tuple(arm.mean + math.sqrt(scale * (arm.variance + 2.0) / (arm.pulls + 1)) for arm in self._arms)

    def ask(self, *, upper: float | None = None) -> Pull:
        """Propose a value from the arm of largest index.

        Args:
            upper: The proposal does not exceed it; only arms that begin below it compete, and if there is none, `upper`
                itself is proposed. `None` or more than `space.high`: no bound.

        Returns:
            An open pull. Several may be open at once; one that is never told costs nothing.

        Raises:
            InvalidValueError: `upper` is below `space.low`, or NaN.
        """
        bound = self._ledger.check_upper(upper)
        # Not <=: an arm that begins at the bound would be pulled at one point for ever, since it cannot be split there.
        count = sum(arm.low < bound for arm in self._arms)
        if count == 0:
            return self._ledger.propose(bound)
        if self._ledger.told:
            indices = self.indices()[:count]
            chosen = indices.index(max(indices))
        else:
            chosen = int(self._rng.integers(count))
        return self._ledger.propose(self._sample(self._arms[chosen], bound))

    def _sample(self, arm: Arm, bound: float) -> float:
        start, end = self.space.to_unit(arm.low), self.space.to_unit(min(arm.high, bound))
        value = self.space.from_unit(min(start + (end - start) * self._rng.random(), 1.0))
        # The way through the unit interval may round across an edge.
        last = bound if bound < arm.high else math.nextafter(arm.high, arm.low)
        return min(max(value, arm.low), last)

    def tell(self, pull: Pull, reward: float, *, drop: Drop | None = None) -> None:
        """Credit a reward to the arm that holds the executed value, and split the arm there.

        Args:
            pull: What `ask` gave, or `Pull(pull.id, executed)` if another value was executed.
            reward: Larger is better; G in the paper.
            drop: After the split, take away the part "below" the value or the part from it "above". FedLPS drops below
                when the accuracy fell by more than Δ: a smaller ratio would hurt more.

        Raises:
            InvalidValueError: the pull is not open, its value is outside the space, the reward is NaN or infinite, or
                `drop` is no such word; nothing has changed then and the pull stays open.
        """
        value, gain = self._ledger.settle(pull, reward, drop)
        position, _ = self._locate(value)
        arm = self._arms[position].rewarded(gain)
        parts = [arm]
        if self._splits(arm, value):
            below, above = replace(arm, high=value), replace(arm, low=value)
            parts = [part for part, side in ((below, "below"), (above, "above")) if side != drop]
        self._arms[position : position + 1] = parts

    def _locate(self, value: float) -> tuple[int, bool]:
        """The position of the arm that holds `value`, True; or of the nearest (ties: the lower), False."""
        at = bisect_right(self._arms, value, key=lambda arm: arm.low) - 1
        if at >= 0:
            high = self._arms[at].high
            if value < high or value == high == self.space.high:
                return at, True
        if at < 0 or at + 1 == len(self._arms):
            return max(at, 0), False
        here = self.space.to_unit(value)
        down = here - self.space.to_unit(self._arms[at].high)
        up = self.space.to_unit(self._arms[at + 1].low) - here
        return (at if down <= up else at + 1), False

    def _splits(self, arm: Arm, value: float) -> bool:
        low, here, high = (self.space.to_unit(edge) for edge in (arm.low, value, arm.high))
        return arm.low < value < arm.high and min(here - low, high - here) >= self.min_width

    def best(self) -> Pull:
        """The told pull that lies in the arm of largest mean; within an arm, the one of largest reward, then the first.

        A mean of several rewards is trusted more than one lucky reward. Pulls at dropped values count only if all are.

        Returns:
            The pull with the value that was executed.

        Raises:
            InvalidValueError: nothing has been told.
        """
        if not self._ledger.told:
            raise InvalidValueError("no reward has been told yet, so no pull is best; tell() one first")

        def merit(entry: tuple[Pull, float]) -> tuple[bool, float, float, int]:
            pull, reward = entry
            position, inside = self._locate(pull.value)
            return inside, self._arms[position].mean, reward, -pull.id

        return max(self._ledger.told, key=merit)[0]

    def state_dict(self) -> dict[str, Any]:
        """All that it takes to go on: settings, arms, pulls and the generator, as plain JSON values."""
        return {
            "settings": {**self._settings, "space": dict(self._settings["space"])},
            "arms": [list(astuple(arm)) for arm in self._arms],
            "pulls": self._ledger.state_dict(),
            "generator": generator_state(self._rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same bits.

        The generator passed to the constructor is left alone from here on: the bandit gets one of its own.

        Args:
            state: From a `PUCBV` with the same settings.

        Raises:
            InvalidValueError: the settings differ, or the state is malformed; nothing has changed then.
        """
        try:
            theirs = dict(state["settings"])
            differing = [key for key in self._settings if theirs.get(key) != self._settings[key]]
            if differing:
                shown = ", ".join(f"{key} {theirs.get(key)!r} (here {self._settings[key]!r})" for key in differing)
                raise InvalidValueError(f"the state comes from a bandit with other settings: {shown}; build one with these")
            arms = [
                Arm(float(low), float(high), int(pulls), float(mean), float(variance))
                for low, high, pulls, mean, variance in state["arms"]
            ]
            self._check_arms(arms)
            ledger = Ledger.from_state(state["pulls"], self.space)
            rng = generator_from_state(state["generator"])
        except InvalidValueError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidValueError(f"not a state of PUCBV: {error!r}; pass what state_dict() gave") from error
        self._arms, self._ledger, self._rng = arms, ledger, rng

    def _check_arms(self, arms: list[Arm]) -> None:
        edges = [edge for arm in arms for edge in (arm.low, arm.high)]
        widths = all(arm.low < arm.high for arm in arms)
        if not arms or not widths or edges != sorted(edges) or not all(edge in self.space for edge in edges):
            raise InvalidValueError(f"the arms of a state must be disjoint, ordered and within the space, got {arms!r}")
        if not all(arm.pulls >= 0 and math.isfinite(arm.mean) and 0.0 <= arm.variance < math.inf for arm in arms):
            raise InvalidValueError(f"the arms of a state need pulls >= 0, a finite mean and a variance >= 0, got {arms!r}")
