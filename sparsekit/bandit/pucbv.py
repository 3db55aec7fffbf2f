"""P-UCBV: an upper-confidence bandit that splits the interval at each pull and can discard one side at once."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from sparsekit.bandit.base import Interval, Pull, Side, check_number
from sparsekit.bandit.logged import Arm, LoggedBandit
from sparsekit.errors import InvalidValueError


def _hold(arms: Sequence[Arm], value: float, space: Interval) -> tuple[int, bool]:
    """Return the index of the arm that contains `value`, and True; or of the nearest one on the space's scale, and False."""
    at = bisect_right(arms, value, key=lambda arm: arm.low) - 1
    if at >= 0:
        high = arms[at].high
        if value < high or value == high == space.high:
            return at, True
    if at < 0 or at + 1 == len(arms):
        return max(at, 0), False
    here = space.to_unit(value)
    down = here - space.to_unit(arms[at].high)
    up = space.to_unit(arms[at + 1].low) - here
    return (at if down <= up else at + 1), False


class PUCBV(LoggedBandit):
    """Searches an interval with P-UCBV, the bandit of the FedLPS paper. On most functions, random search finds better values.

    Use it to reproduce the paper (Prompt Upper Confidence Bound with Variance), or if a trial can rule out one side of its
    value. For anything else, take `SplitUCBV`.

    The interval is divided into arms. The next value is drawn uniformly from the arm with the largest upper bound U. Its reward
    (G in the paper) splits the arm there: both parts inherit all rewards of the arm and get the new one. `eliminate` removes
    the part "below" or "above" the value for good. FedLPS eliminates below if the accuracy fell by more than Δ, because smaller
    submodels would be less accurate still. After t rewards and with I arms, an arm with h rewards of mean ḡ and variance v̄ has

        U = ḡ + sqrt(ρ (v̄ + 2) · max(0, log(ξ ψ ε)) / (4 (h + 1))),   ψ = ξ / I²,   ε = decay^t.

    Decisions about points that the paper leaves open or undefined:

    | point | decision |
    |---|---|
    | the logarithm is negative | it counts as 0, so the search is greedy after about log(ξ²/I²) / log(1/decay) rewards |
    | when ε decays | with each reward of this bandit, so a bandit that is seldom asked keeps exploring |
    | an unknown horizon (None) | ξ: least power of two above t, at least 2 I₀; ε counts from the last growth of ξ |
    | an arm without rewards | has mean and variance 0, so scale rewards to be around 0, and negative for bad values |
    | the variance of h rewards | is their mean squared deviation, divided by h |
    | the first arm, and ties | a random arm until the first reward; after that, ties go to the lowest arm |
    | rewards that a part inherits | all rewards of the arm, for all their values, and the new one |
    | the eliminated part | the caller decides: "below" the value (FedLPS, when accuracy fell) or "above" |
    | the last arm | is never removed: elimination takes one part of a split, so one part is left |
    | a value on a boundary | belongs to the arm above it (the last arm, at the end of the space), which is not split |
    | a part narrower than `min_width` | is not split off; the whole arm gets the reward, and `eliminate` has no effect |
    | a value in an eliminated part | the nearest arm (ties: the lower) gets the reward and is not split |
    | `upper` | only arms that begin below it compete, cut off at it; without any, `upper` itself is proposed |
    | another value was tried | the value passed to `tell` counts, not the proposed one |
    | several open pulls | are told in any order; a reward goes to the arm that contains its value at that time |
    | a pull that is never told | changes nothing |
    | a pull that failed | `forget` credits it with the worst reward known, then or as soon as there is one; ε stays |
    | a reward of NaN or infinity | is refused, and the pull stays open |
    | `best` | the pull with the largest reward in the arm with the largest mean; ties: the first one |

    Source: Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing", ICDE 2025 (arXiv 2412.07216),
        Algorithm 2. Its index is from Mukherjee, Naveen, Sudarsanam, Ravindran, "Efficient-UCBV: An Almost Optimal Algorithm
        using Variance Estimates", AAAI 2018, where ε stops at sqrt(e / horizon); the paper has no such floor.
    """

    space: Interval

    def __init__(
        self,
        space: Interval,
        *,
        horizon: float | None = None,
        arms: int = 5,
        exploration: float = 1.0,
        rng: np.random.Generator,
        decay: float = 0.5,
        min_width: float = 1e-3,
    ) -> None:
        """Divide the space into equal arms.

        Args:
            space: The interval to search.
            horizon: ξ in the paper, the approximate number of pulls; None if it is unknown. FedLPS has one bandit per client
                and sets ξ = R / (K·ϵ), rounds over clients per round.
            arms: Initial number of arms; I_0 in the paper.
            exploration: ρ in the paper, at least 0; 0 is greedy.
            rng: Draws the first arm and the values.
            decay: Factor of ε after each reward, in (0, 1]; the paper halves it.
            min_width: The narrowest part that a split may leave, as a share of the space on its scale, in [0, 1/arms].

        Raises:
            InvalidValueError: one of these is not allowed, or the space holds too few numbers for so many arms.
        """
        if not isinstance(space, Interval):
            raise InvalidValueError(f"space must be an Interval, got {space!r}; pass Interval(low, high)")
        if isinstance(arms, bool) or not isinstance(arms, (int, np.integer)) or arms < 1:
            raise InvalidValueError(f"arms must be an integer >= 1, got {arms!r}")
        self.exploration = check_number(exploration, "exploration")
        if not 0.0 <= self.exploration < math.inf:
            raise InvalidValueError(f"exploration must be finite and at least 0, got {exploration!r}; 0 is greedy")
        self.min_width = check_number(min_width, "min_width")
        if not 0.0 <= self.min_width <= 1.0 / arms:
            raise InvalidValueError(f"min_width must be in [0, 1/arms] = [0, {1 / arms:g}], got {min_width!r}")
        self.horizon = None if horizon is None else check_number(horizon, "horizon")
        self.decay = check_number(decay, "decay")
        if self.horizon is not None and not 0.0 < self.horizon < math.inf:
            raise InvalidValueError(
                f"horizon must be finite and above 0, got {horizon!r}; it is the number of pulls to come, None if unknown"
            )
        if not 0.0 < self.decay <= 1.0:
            raise InvalidValueError(f"decay must be in (0, 1], got {decay!r}; the paper has 0.5, and 1 means no decay")
        settings = {"arms": int(arms), "exploration": self.exploration, "min_width": self.min_width}
        super().__init__(space, settings | {"horizon": self.horizon, "decay": self.decay}, rng)
        edges = [space.from_unit(i / arms) for i in range(arms + 1)]
        if any(low >= high for low, high in pairwise(edges)):
            raise InvalidValueError(f"{space!r} holds too few numbers for so many arms; take fewer, or a wider space")
        self._arms = [Arm(low, high) for low, high in pairwise(edges)]
        self._failures: list[float] = []  # values that failed before any reward was told

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The present arms, from low to high."""
        return tuple(self._arms)

    def _schedule(self) -> tuple[float, int]:
        """Return ξ, and for how many rewards ε has decayed."""
        told = len(self._told)
        if self.horizon is not None:
            return self.horizon, told
        least = 2 * int(self._settings["arms"])
        if told < least:
            return float(least), told
        grown = 2 ** (told.bit_length() - 1)
        return 2.0 * grown, told - max(grown, least)

    def indices(self) -> tuple[float, ...]:
        """Return the index U of each arm, in the order of `arms`."""
        horizon, age = self._schedule()
        # Add the logarithms of ξ, ψ and ε: in a long run, ε itself would underflow to 0.
        growth = 2.0 * math.log(horizon / len(self._arms)) + age * math.log(self.decay)
        scale = self.exploration * max(0.0, growth) / 4.0
        return tuple(arm.mean + math.sqrt(scale * (arm.variance + 2.0) / (arm.pulls + 1)) for arm in self._arms)

    def _choose(self, bound: float | None) -> float:
        # An arm that begins at the bound would be pulled at one point forever, since it cannot be split there.
        limit = self.space.high if bound is None else bound
        count = sum(arm.low < limit for arm in self._arms)
        if count == 0:
            return limit
        if self._told:
            indices = self.indices()[:count]
            chosen = indices.index(max(indices))
        else:
            chosen = int(self._rng.integers(count))
        low, high = self._arms[chosen].low, self._arms[chosen].high
        start, end = self.space.to_unit(low), self.space.to_unit(min(high, limit))
        value = self.space.from_unit(min(start + (end - start) * self._rng.random(), 1.0))
        # Conversion to the unit interval and back may round across an edge.
        last = limit if limit < high else math.nextafter(high, low)
        return min(max(value, low), last)

    def tell(self, pull: Pull, reward: float, *, eliminate: Side | None = None) -> None:
        """Credit a reward to the arm of the executed value; see `Bandit.tell`."""
        value, reward, _ = self._take(pull, reward, eliminate)
        failures, self._failures = self._failures, []
        for failed in failures:
            self._credit(failed, reward)
        self._credit(value, reward, eliminate)

    def forget(self, pull: Pull) -> None:
        value, _ = self._close(pull)
        if self._told:
            self._credit(value, min(reward for _, reward in self._told))
        else:
            self._failures.append(value)

    def _credit(self, value: float, reward: float, eliminate: Side | None = None) -> None:
        position, _ = _hold(self._arms, value, self.space)
        arm = self._arms[position].rewarded(reward)
        parts, (left, here, right) = [arm], map(self.space.to_unit, (arm.low, value, arm.high))
        if arm.low < value < arm.high and min(here - left, right - here) >= self.min_width:
            below, above = replace(arm, high=value), replace(arm, low=value)
            parts = [part for part, side in ((below, "below"), (above, "above")) if side != eliminate]
        self._arms[position : position + 1] = parts

    def _place_of_best(self) -> int:
        def merit(place: int) -> tuple[bool, float, float, int]:
            pull, reward = self._told[place]
            position, inside = _hold(self._arms, pull.value, self.space)
            return inside, self._arms[position].mean, reward, -pull.id

        return max(range(len(self._told)), key=merit)
