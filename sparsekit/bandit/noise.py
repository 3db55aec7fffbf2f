"""Noise: the variance of a reward around the mean of its arm, learned from points that are pulled again."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sparsekit.bandit.rule import Rule
from sparsekit.errors import InvalidValueError

__all__ = ["Noise"]

_SUMS = ("within", "replicates", "repeats")
# The noise is taken for no less than this share of the scale, so that nothing is divided by 0.
_LEAST = 1e-14
# What a repeated reward that is equal to the last bit leaves of the noise that is expected before any is repeated.
_EXACT = 0.01


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
            weight: Of the reward.
            faded: Whether rewards lose weight as time passes.
        """
        self.within += surprise**2 * had * weight / (had + weight)
        # A mean that has faded is no better for it than it was, so its deviation tells less than its weight says.
        self.replicates += 1.0 if not faded else min(1.0, 2.0 * had / (had + weight))

    def fade(self, discount: float) -> None:
        """Let that share of what is known survive."""
        self.within *= discount
        self.replicates *= discount

    def sums(self) -> dict[str, float]:
        """What was counted, by name."""
        return {name: getattr(self, name) for name in _SUMS}

    def load(self, sums: Mapping[str, float], *, distinct: bool) -> None:
        """Take over what `sums` gave.

        Raises:
            InvalidValueError: a number is negative or not finite.
        """
        for name in _SUMS:
            value = float(sums[name])
            if not 0.0 <= value < math.inf:
                raise InvalidValueError(f"{name} of a state must be finite and at least 0, got {sums[name]!r}")
            setattr(self, name, value)
        self.distinct = distinct
