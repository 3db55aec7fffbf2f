"""What points that are pulled again tell: Noise, the variance of a reward around its arm's mean; Watch, that arms fall."""

from __future__ import annotations

import math

# The first guess of the noise, as a share of the variance of the first rewards, and how many repeated rewards it counts for.
_GUESS, _GUESS_WEIGHT = 0.2, 3.0
# Cells are split from so many repeated rewards on, if these are at least this share of all, unless rewards have no noise.
_REPEATS, _REPEATED = 2, 0.2
# The noise is taken for no less than this share of the scale, so that nothing is divided by 0.
_LEAST = 1e-14
# What a repeated reward that is equal to the last bit leaves of the noise that is expected before any is repeated.
_EXACT = 0.01
# k: a fall by less than so many deviations is none; h: the sum of falls from which on they are no chance.
_ALLOWANCE, _ALARM = 0.5, 9.0
# Deviations beyond this count as this: one outlier is no change.
_LARGEST = 3.0


class Noise:
    """Squared deviations of repeated rewards, and a first guess that they outweigh.

    It never comes from differences between points: noise that is taken for variation has every cell split and no point
    repeated, and so is never found out.
    """

    def __init__(self) -> None:
        # Squared deviations of repeated rewards from the mean before them, how many count, and how many there were.
        self.within = self.replicates = self.repeats = 0.0
        # Whether the first arms differ in their rewards, as they do where rewards are no counts or classes.
        self.distinct = False

    @property
    def exact(self) -> bool:
        """Whether rewards seem to have no noise: two of one point are never equal by chance, but for counts and classes."""
        return self.distinct and self.within == 0.0

    def ripe(self, told: float) -> bool:
        """Whether enough is known to split cells, after so many rewards."""
        return self.repeats >= max(_REPEATS, 0.0 if self.exact else _REPEATED * told)

    def variance(self, scale: float) -> float:
        """Variance of a reward; `scale` is that of the first rewards."""
        expected = _GUESS_WEIGHT * _GUESS * scale
        if self.exact:
            expected *= _EXACT**self.replicates
        return max((expected + self.within) / (_GUESS_WEIGHT + self.replicates), _LEAST * scale)

    def saw(self, surprise: float, had: float, weight: float, *, faded: bool) -> None:
        """Take in a repeated reward.

        Args:
            surprise: The reward less the mean of the earlier ones of its arm.
            had: Weight of those.
            weight: Weight of the reward.
            faded: Whether rewards lose weight as time passes.
        """
        self.within += surprise**2 * had * weight / (had + weight)
        # A mean that has faded is no better for it than it was, so its deviation tells less than its weight says.
        self.replicates += 1.0 if not faded else min(1.0, 2.0 * had / (had + weight))

    def fade(self, discount: float) -> None:
        self.within *= discount
        self.replicates *= discount


class Watch:
    """A cumulative sum of how far repeated rewards lie below the mean of earlier ones of the same arm, in deviations.

        S ← max(0, S - z - k),   z = (reward - mean) / sqrt(σ² (1/w + 1/n)) within ±3;   alarm where S > h,

    with w the weight of the reward and n that of the earlier ones. Only a fall is looked for: an arm that rises is pulled
    anyway, and another one that rises past it is found when this one falls.

    Source: Page, "Continuous Inspection Schemes", Biometrika 1954 (the sum); Liu, Lee, Shroff, "A Change-Detection Based
    Framework for Piecewise-Stationary Multi-Armed Bandit Problem", AAAI 2018 (restarting a bandit on it).
    """

    def __init__(self) -> None:
        self.fall = 0.0

    def sees(self, surprise: float, variance: float) -> bool:
        """Take in a repeated reward; whether arms have fallen. If so, the sum begins anew.

        Args:
            surprise: Reward less the mean of the earlier ones.
            variance: Variance of the surprise where nothing has changed; above 0.
        """
        deviations = max(-_LARGEST, min(_LARGEST, surprise / math.sqrt(variance)))
        self.fall = max(0.0, self.fall - deviations - _ALLOWANCE)
        if self.fall <= _ALARM:
            return False
        self.fall = 0.0
        return True
