"""Smoothness: how fast an unknown function may vary, as the parameters of a Gaussian process; drawn given rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "CONSTANT",
    "NUGGET",
    "Evidence",
    "Floats",
    "Prior",
    "Smoothness",
    "correlation",
    "distances",
    "first",
    "redraw",
    "squared_gaps",
]

Floats = npt.NDArray[np.float64]

CONSTANT = 5.0
"""Variance of the unknown level of the function, as a multiple of the variance of the function around it."""
NUGGET = 1e-5
"""Variance that belongs to each arm alone, as the same multiple; it keeps the matrices invertible."""

_ROOT3, _ROOT5 = math.sqrt(3.0), math.sqrt(5.0)
_ORDERS = 3


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is believed of the smoothness before any reward, and the steps of the walk over it.

    Args:
        length: Median correlation length, as a share of the space.
        length_spread: Standard deviation of its logarithm.
        axis_spread: The same for the ratio of one axis to the others.
        noise: Median of noise variance / signal variance.
        noise_spread: Standard deviation of its logarithm.
        length_step: Of the walk, on the logarithm.
        noise_step: Of the walk, on the logarithm.
        strength: Rewards that the prior of the signal variance counts for.
    """

    length: float = 0.17
    length_spread: float = 0.55
    axis_spread: float = 0.4
    noise: float = 0.1
    noise_spread: float = 1.2
    length_step: float = 0.9
    noise_step: float = 0.6
    strength: float = 2.0


@dataclass(frozen=True)
class Smoothness:
    """Parameters of a Matérn process plus noise, up to the unit of the reward.

    Args:
        order: 0, 1 or 2 for Matérn 1/2 (continuous), 3/2 (once differentiable), 5/2 (twice).
        lengths: Logarithms of the correlation lengths, one per axis of the unit cube.
        noise: Logarithm of noise variance / signal variance.
    """

    order: int
    lengths: tuple[float, ...]
    noise: float

    def to_json(self) -> list[Any]:
        """Plain JSON values."""
        return [self.order, list(self.lengths), self.noise]


def correlation(distance: Floats, order: int) -> Floats:
    """Matérn correlation at scaled distances, elementwise.

    Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, eq. 4.16.
    """
    if order == 0:
        return np.exp(-distance)
    if order == 1:
        scaled = _ROOT3 * distance
        return (1.0 + scaled) * np.exp(-scaled)
    scaled = _ROOT5 * distance
    return (1.0 + scaled + scaled * scaled / 3.0) * np.exp(-scaled)


def distances(points: Floats, others: Floats, lengths: Floats) -> Floats:
    """Scaled Euclidean distances, float (points, others).

    Args:
        points: float (points, axes).
        others: float (others, axes).
        lengths: float (axes,), what each axis is divided by.
    """
    if len(lengths) == 1:
        length = lengths[0]
        steps: Floats = points / length - others.T / length
        return np.abs(steps)
    steps = (points / lengths)[:, None, :] - (others / lengths)[None, :, :]
    squares: Floats = np.einsum("ijk,ijk->ij", steps, steps)
    return np.sqrt(squares)


def squared_gaps(points: Floats) -> Floats:
    """Squared differences of all pairs of points (points, axes) along each axis, float (axes, points * points)."""
    steps = points.T[:, :, None] - points.T[:, None, :]
    squares: Floats = np.square(steps).reshape(points.shape[1], -1)
    return squares


@dataclass(frozen=True)
class Evidence:
    """The rewards, as far as they tell of the smoothness.

    Args:
        gaps: Squared differences along each axis between the arms that were pulled, float (axes, arms * arms).
        means: Of their rewards around the common level, float (arms,).
        weights: How many rewards each mean stands for, float (arms,).
        within: Sum of squared deviations of the rewards from the means of their arms.
        replicates: How many rewards beyond the first of each arm stand behind `within`.
        spread: A variance of the size of the signal, above 0: the centre of its prior.
    """

    gaps: Floats
    means: Floats
    weights: Floats
    within: float
    replicates: float
    spread: float

    def score(self, smoothness: Smoothness, prior: Prior) -> tuple[float, float]:
        """Logarithm of the posterior density of a smoothness up to a constant, and the signal variance that goes with it.

        With C the correlations plus the constant level and Λ the noise ratio, the means are N(0, a (C + Λ/n)) and the
        deviations within arms have variance aΛ; the signal variance a is put at its posterior mode.
        """
        noise, arms = math.exp(smoothness.noise), len(self.means)
        scales = np.exp(-2.0 * np.array(smoothness.lengths))
        cov = correlation(np.sqrt(scales @ self.gaps), smoothness.order).reshape(arms, arms)
        own = noise / self.weights + NUGGET
        # Bordered by the means, so that one factorisation gives the determinant and, in its last row, the whitened means.
        # The corner is as large as it takes for the whole to stay positive definite.
        framed = np.empty((arms + 1, arms + 1))
        framed[:arms, :arms] = cov
        framed[:arms, :arms] += CONSTANT
        framed.reshape(-1)[: -1 : arms + 2] += own
        framed[arms, :arms] = framed[:arms, arms] = self.means
        framed[arms, arms] = 2.0 * float(self.means @ (self.means / own)) + self.spread
        try:
            root = np.linalg.cholesky(framed)
        except np.linalg.LinAlgError:
            return -math.inf, self.spread
        white = root[arms, :arms]
        rewards = arms + self.replicates
        squares = float(white @ white) + self.within / noise + prior.strength * self.spread
        signal = squares / (rewards + prior.strength)
        score = -float(np.log(root.diagonal()[:arms]).sum()) - 0.5 * (
            self.replicates * smoothness.noise + rewards * math.log(signal)
        )
        return score + _log_prior(smoothness, prior), signal


def _log_prior(smoothness: Smoothness, prior: Prior) -> float:
    axes = len(smoothness.lengths)
    # Points in a cube lie farther apart the more axes it has.
    centre = math.log(prior.length) + 0.5 * math.log(axes)
    mean = sum(smoothness.lengths) / axes
    ratios = sum((length - mean) ** 2 for length in smoothness.lengths)
    squares = ((mean - centre) / prior.length_spread) ** 2 + ratios / prior.axis_spread**2
    return -0.5 * (squares + ((smoothness.noise - math.log(prior.noise)) / prior.noise_spread) ** 2)


def first(evidence: Evidence, prior: Prior) -> Smoothness:
    """The smoothness of largest posterior density on a coarse grid: where the walk begins."""
    axes = len(evidence.gaps)
    grid = [
        Smoothness(order, (math.log(prior.length * length),) * axes, math.log(prior.noise * noise))
        for order in range(_ORDERS)
        for length in (0.2, 0.6, 2.0, 6.0)
        for noise in (0.1, 1.0, 10.0)
    ]
    return max(grid, key=lambda smoothness: evidence.score(smoothness, prior)[0])


def redraw(
    smoothness: Smoothness, evidence: Evidence, prior: Prior, *, moves: int, rng: np.random.Generator
) -> tuple[Smoothness, float]:
    """A few steps of a random walk whose long-run distribution is the posterior given the rewards.

    A smoothness drawn at random and redrawn now and then explores by itself: while several explain the rewards, the rough
    ones get their turn. The one of largest density alone is often too smooth, and then an optimum is never looked for.

    Returns:
        Where the walk has come to, and the signal variance there.

    Source: Metropolis et al., "Equation of State Calculations by Fast Computing Machines", 1953; Snoek, Larochelle, Adams,
        "Practical Bayesian Optimization of Machine Learning Algorithms", 2012, for averaging over these parameters.
    """
    axes = len(smoothness.lengths)
    score, signal = evidence.score(smoothness, prior)
    for _ in range(moves):
        turn, chance = rng.random(2).tolist()
        all_axes, noise, *each = rng.normal(size=2 + axes).tolist()
        order = smoothness.order if turn < 2 / 3 else (smoothness.order + (1 if turn < 5 / 6 else 2)) % _ORDERS
        step = prior.length_step
        tilts = [0.5 * step * tilt if axes > 1 else 0.0 for tilt in each]
        lengths = tuple(length + step * all_axes + tilt for length, tilt in zip(smoothness.lengths, tilts, strict=True))
        proposed = Smoothness(order, lengths, smoothness.noise + prior.noise_step * noise)
        other, other_signal = evidence.score(proposed, prior)
        if other >= score or chance < math.exp(other - score):
            smoothness, score, signal = proposed, other, other_signal
    return smoothness, signal
