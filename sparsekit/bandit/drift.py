"""Watch: notices that the rewards of arms fall, so that what is known of them should be forgotten."""

from __future__ import annotations

import math

from sparsekit.bandit.rule import Rule

__all__ = ["Watch"]

# Deviations beyond this count as this: one outlier is no change.
_LARGEST = 3.0


class Watch:
    """A cumulative sum of how far repeated rewards lie below the mean of earlier ones of the same arm, in deviations.

        S ← max(0, S - z - k),   z = (reward - mean) / sqrt(σ² (1/w + 1/n)) within ±3;   alarm where S > h,

    with w the weight of the reward and n that of the earlier ones. Only a fall is looked for: an arm that rises is pulled
    anyway, and another one that rises past it is found when this one falls.

    Source: Page, "Continuous Inspection Schemes", Biometrika 1954 (the sum); Liu, Lee, Shroff, "A Change-Detection Based
    Framework for Piecewise-Stationary Multi-Armed Bandit Problem", AAAI 2018 (restarting a bandit on it).
    """

    def __init__(self, rule: Rule, fall: float = 0.0) -> None:
        """Begin with no fall seen.

        Args:
            rule: Has k as `allowance` and h as `alarm`.
            fall: S.
        """
        self.fall = fall
        self._rule = rule

    def sees(self, surprise: float, variance: float) -> bool:
        """Take in a repeated reward; whether arms have fallen. If so, the sum begins anew.

        Args:
            surprise: Reward less the mean of the earlier ones.
            variance: Of this, if nothing changed; above 0.
        """
        deviations = max(-_LARGEST, min(_LARGEST, surprise / math.sqrt(variance)))
        self.fall = max(0.0, self.fall - deviations - self._rule.allowance)
        if self.fall <= self._rule.alarm:
            return False
        self.fall = 0.0
        return True
