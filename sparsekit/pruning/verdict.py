"""Which of several finished cuts is better: their losses on held-out examples, and the noise of these."""

import itertools
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_LUCK = 0.16
"""Probability that noise lets the first of several cuts lose, though it is the best: that of more than a standard error."""


@dataclass(frozen=True)
class Losses:
    """Losses of a model on the held-out examples, one for each example or for each part of `counts` examples."""

    values: Sequence[float]
    counts: Sequence[int]

    @property
    def mean(self) -> float:
        """The mean over examples."""
        return sum(value * count for value, count in zip(self.values, self.counts)) / max(1, sum(self.counts))

    def _up_to(self, ends: Container[int]) -> "Losses":
        """Return means of the parts between these numbers of examples, so that models with different parts can be compared."""
        found, part, seen = Losses([], []), Losses([], []), 0
        for value, count in zip(self.values, self.counts):
            part, seen = Losses([*part.values, value], [*part.counts, count]), seen + count
            if seen in ends:
                found = Losses([*found.values, part.mean], [*found.counts, sum(part.counts)])
                part = Losses([], [])
        return found

    def is_clearly_below(self, other: "Losses", rivals: int) -> bool:
        """Return whether the mean is lower by more than noise: a standard error of the difference, more if the best of several.

        Source: Breiman et al., Classification and Regression Trees, 1984, for the rule of one standard error; Bonferroni for
        several `rivals`, each of which then has a part of the 16 % that such a rule errs.
        """
        ends = {*itertools.accumulate(self.counts)} & {*itertools.accumulate(other.counts)}
        own, others = self._up_to(ends), other._up_to(ends)
        gains = Losses([b - a for a, b in zip(own.values, others.values, strict=True)], own.counts)
        mean = gains.mean
        squares = Losses([(gain - mean) * (gain - mean) for gain in gains.values], own.counts)
        error = math.sqrt(squares.mean / max(1, len(gains.values) - 1))
        return mean > error * NormalDist().inv_cdf(1.0 - _LUCK / rivals)


@dataclass(frozen=True)
class Verdict:
    """The losses of a finished cut, and its score if a metric chooses."""

    losses: Losses
    score: float | None

    @property
    def told(self) -> str:
        """Why the losses cannot be compared; empty if they can."""
        return "" if self.losses.mean == self.losses.mean else "the loss on held-out examples is NaN"

    def beats(self, best: "Verdict", *, rivals: int) -> bool:
        """Return whether this cut is better than `best`: by score if both have one, else by loss.

        Args:
            best: The best cut so far.
            rivals: Number of candidates besides the first, if `best` is the first one: its loss must then be beaten by more
                than noise, since it was the preferred candidate before any comparison. 0 if `best` is another candidate.
        """
        if self.score is not None and best.score is not None:
            return self.score > best.score
        if self.told or best.told:
            return bool(best.told) and not self.told
        return self.losses.is_clearly_below(best.losses, rivals) if rivals else self.losses.mean < best.losses.mean
