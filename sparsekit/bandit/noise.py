"""What points that are pulled again tell: Noise, the variance of a reward around its arm's mean; Watch, that arms fall."""

from __future__ import annotations

import math

from sparsekit.bandit.rule import Rule

# The noise is taken for no less than this share of the scale, so that nothing is divided by 0.
_LEAST = 1e-14
# What a repeated reward that is equal to the last bit leaves of the noise that is expected before any is repeated.
_EXACT = 0.01
# Deviations beyond this count as this: one outlier is no change.
_LARGEST = 3.0


class Noise:
    """Squared deviations of repeated rewards, and a first guess that they outweigh.

    It never comes from differences between points: noise that is taken for variation has every cell split and no point
    repeated, and so is never found out.
    """

    def __init__(self, rule: Rule) -> None:
        """Begin with no reward repeated.

        Args:
            rule: Has the first guess, and how many repeated rewards it counts for.
        """
        self._rule = rule
        # Squared deviations of repeated rewards from the mean before them, how many count, and how many there were.
        self.within = 0.0
        self.replicates = 0.0
        self.repeats = 0.0
        # Whether the first arms differ in their rewards, as they do where rewards are no counts or classes.
        self.distinct = False

    @property
    def exact(self) -> bool:
        """Whether rewards seem to have no noise: two of one point are never equal by chance, but for counts and classes."""
        return self.distinct and self.within == 0.0

    def ripe(self, told: float) -> bool:
        """Whether enough is known to split cells, after so many rewards."""
        return self.repeats >= max(self._rule.repeats, 0.0 if self.exact else self._rule.repeated * told)

    def variance(self, scale: float) -> float:
        """Of a reward.

        Args:
            scale: Variance of the first rewards, of which the first guess is a share.
        """
        rule = self._rule
        expected = rule.noise_weight * rule.noise * scale
        if self.exact:
            expected *= _EXACT**self.replicates
        return max((expected + self.within) / (rule.noise_weight + self.replicates), _LEAST * scale)

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
        """Let that share of what is known survive."""
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

    def __init__(self, rule: Rule) -> None:
        """Begin with no fall seen.

        Args:
            rule: Has k as `allowance` and h as `alarm`.
        """
        self.fall = 0.0
        self._rule = rule

    def sees(self, surprise: float, variance: float) -> bool:
        """Take in a repeated reward; whether arms have fallen. If so, the sum begins anew.

        Args:
            surprise: Reward less the mean of the earlier ones.
            variance: Variance of the surprise where nothing has changed; above 0.
        """
        deviations = max(-_LARGEST, min(_LARGEST, surprise / math.sqrt(variance)))
        self.fall = max(0.0, self.fall - deviations - self._rule.allowance)
        if self.fall <= self._rule.alarm:
            return False
        self.fall = 0.0
        return True
