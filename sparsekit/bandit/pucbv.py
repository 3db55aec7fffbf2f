"""P-UCBV: an upper-confidence bandit that splits the interval where it has pulled and can discard one side at once."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from sparsekit.bandit.base import Interval, Side, check_number
from sparsekit.bandit.logged import Arm, ArmBandit, hold, may_split
from sparsekit.errors import InvalidValueError


class PUCBV(ArmBandit):
    """Prompt Upper Confidence Bound Variance: a `Bandit` over an interval.

    The interval is cut into arms, disjoint and ordered. After t rewards and with I arms, an arm with h pulls of mean ḡ
    and variance v̄ has the index

        U = ḡ + sqrt(ρ (v̄ + 2) · max(0, log(ξ ψ ε)) / (4 (h + 1))),   ψ = ξ / I²,   ε = max(decay^t, floor),

    and the arm of largest index is pulled at a value drawn uniformly from it (on the scale of the space). The reward, G in
    the paper, splits the arm at the pulled value: both parts inherit all its rewards and get the new one, and `eliminate` takes
    the part "below" the value, or that from it "above", away for good. FedLPS drops below when the accuracy fell by more
    than Δ: a smaller ratio would hurt more.

    Where the paper is silent or undefined, this is decided:

    | point | decision |
    |---|---|
    | the logarithm turns negative | it counts as 0: after about log(ξ²/I²) / log(1/decay) rewards the rule is greedy |
    | when ε decays | per reward told to this bandit, so that one that is seldom asked keeps its exploration |
    | an unknown horizon (None) | ξ: least power of two above t, at least 2 I₀; ε counts from where ξ last grew |
    | an arm without rewards | has mean and variance 0, so rewards should lie around 0, or below it for what is bad |
    | the variance of h rewards | is their mean squared deviation, divided by h |
    | the first arm, and ties | until the first reward any arm at random, for every open pull; then the lowest |
    | rewards that a part inherits | all of the arm it is cut from, wherever they were pulled, and the new one |
    | the part that is eliminated | the caller says: "below" the value (FedLPS, when accuracy fell) or "above" |
    | the last arm | never goes: elimination takes one part of a split, so at least one arm stands |
    | a pull on a boundary | belongs to the arm above (at the end of the space: the last), which is not split |
    | a part below `min_width` | is not split off; the arm gets the reward whole, and `eliminate` does nothing |
    | a value where arms were dropped | the nearest arm (ties: the lower) gets the reward and is not split |
    | `upper` | only arms that begin below it compete; the draw stops there; if none does, it is proposed itself |
    | another value was executed | the value in the told pull counts, whatever was proposed |
    | several open pulls | are told in any order, each credited to the arm that holds its value by then |
    | a reply that never comes | costs nothing; `forget` closes the pull |
    | a reward of NaN or infinity | is refused, and the pull stays open |
    | `best` | of the arm of largest mean the pull of largest reward, then the first; at dropped values only if all are |

    Source: Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing", ICDE 2025 (arXiv 2412.07216),
    Algorithm 2. Its index is that of Mukherjee, Naveen, Sudarsanam, Ravindran, "Efficient-UCBV: An Almost Optimal Algorithm
    using Variance Estimates", AAAI 2018, whose ε stops at the floor sqrt(e / horizon).
    """

    def __init__(
        self,
        space: Interval,
        *,
        horizon: float | None = None,
        arms: int = 5,
        exploration: float = 1.0,
        rng: np.random.Generator,
        decay: float = 0.5,
        floor: float = 0.0,
        min_width: float = 1e-3,
    ) -> None:
        """Cut the space into equal arms.

        Args:
            space: Where to search.
            horizon: ξ in the paper, about the number of pulls to come; None if it is unknown. FedLPS has one bandit per
                client and sets ξ = R / (K·ϵ), rounds over clients per round.
            arms: Number of arms to begin with; I_0 in the paper.
            exploration: ρ in the paper, at least 0; 0 is greedy.
            rng: Draws the first arm and the values.
            decay: What each reward multiplies ε by, in (0, 1]; the paper halves it.
            floor: The least ε, in [0, 1]; the paper has none.
            min_width: The narrowest part that a split may leave, as a share of the space on its scale, in
                [0, 1/arms].

        Raises:
            InvalidValueError: one of these is not allowed, or the space holds too few numbers for so many arms.
        """
        super().__init__(space, arms=arms, exploration=exploration, rng=rng, min_width=min_width)
        self.horizon = None if horizon is None else check_number(horizon, "horizon")
        self.decay = check_number(decay, "decay")
        self.floor = check_number(floor, "floor")
        if self.horizon is not None and not 0.0 < self.horizon < math.inf:
            raise InvalidValueError(
                f"horizon must be finite and above 0, got {horizon!r}; it is the number of pulls to come, None if unknown"
            )
        if not 0.0 < self.decay <= 1.0:
            raise InvalidValueError(f"decay must be in (0, 1], got {decay!r}; the paper has 0.5, and 1 is no decay")
        if not 0.0 <= self.floor <= 1.0:
            raise InvalidValueError(f"floor must be in [0, 1], got {floor!r}; the paper has none, which is 0")
        self._settings |= {"horizon": self.horizon, "decay": self.decay, "floor": self.floor}
        self._arms = [Arm(low, high) for low, high in pairwise(self._even(arms + 1))]

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms that stand, from low to high."""
        return tuple(self._arms)

    def _schedule(self) -> tuple[float, int]:
        """ξ, and the rewards since which ε decays."""
        told = len(self._told)
        if self.horizon is not None:
            return self.horizon, told
        least = 2 * int(self._settings["arms"])
        if told < least:
            return float(least), told
        grown = 2 ** (told.bit_length() - 1)  # the power of two that t has passed last
        return 2.0 * grown, told - max(grown, least)

    def indices(self) -> tuple[float, ...]:
        """The index U of each arm, in the order of `arms`."""
        horizon, age = self._schedule()
        # log(ξ ψ ε), taken apart so that ε cannot underflow to 0 in a long run.
        epsilon = max(age * math.log(self.decay), math.log(self.floor) if self.floor else -math.inf)
        growth = 2.0 * math.log(horizon / len(self._arms)) + epsilon
        scale = self.exploration * max(0.0, growth) / 4.0
        return tuple(arm.mean + math.sqrt(scale * (arm.variance + 2.0) / (arm.pulls + 1)) for arm in self._arms)

    def _choose(self, bound: float | None) -> float:
        return self._draw_best([(arm.low, arm.high) for arm in self._arms], bound)

    def _learn(self, value: float, reward: float, eliminate: Side | None) -> None:
        position, _ = hold(self._arms, value, self.space)
        arm = self._arms[position].rewarded(reward)
        parts = [arm]
        if may_split(self.space, arm.low, value, arm.high, min_width=self.min_width):
            below, above = replace(arm, high=value), replace(arm, low=value)
            parts = [part for part, side in ((below, "below"), (above, "above")) if side != eliminate]
        self._arms[position : position + 1] = parts

    def _place_of_best(self) -> int:
        def merit(place: int) -> tuple[bool, float, float, int]:
            pull, reward = self._told[place]
            position, inside = hold(self._arms, pull.value, self.space)
            return inside, self._arms[position].mean, reward, -pull.id

        return max(range(len(self._told)), key=merit)
