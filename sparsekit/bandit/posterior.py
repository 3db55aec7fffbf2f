"""Posterior: what is believed of the mean rewards of some arms together, as one Gaussian that grows, learns and shrinks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsekit.bandit.smoothness import CONSTANT, NUGGET, Floats, Smoothness, correlation, distances
from sparsekit.errors import InvalidValueError

__all__ = ["Posterior"]


class Posterior:
    """The joint Gaussian of the function's values at the arms.

    A reward changes every mean and covariance by one outer product. A new arm needs only the arms that are there: given
    their values, rewards tell nothing more about it. An arm that is taken away leaves behind what the others learned from
    it. Every step costs time of the order of the squared number of arms, which the caller bounds.

    Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, section 2.2.
    """

    def __init__(self, capacity: int, axes: int, *, drifts: bool) -> None:
        """Make room.

        Args:
            capacity: The largest number of arms.
            axes: Of a point.
            drifts: `fade` will be called, for which the prior must be kept.
        """
        self._drifts = drifts
        self.size = 0
        self.means: Floats = np.zeros(capacity)
        self._covariance: Floats = np.zeros((capacity, capacity))
        # The diagonal as a view: one stride over the flat matrix.
        self.variances: Floats = self._covariance.reshape(-1)[:: capacity + 1]
        # Inverse of the prior covariance: how to interpolate between arms.
        self._inverse: Floats = np.zeros((capacity, capacity))
        self._prior: Floats = np.zeros((capacity, capacity))
        self._room: Floats = np.empty(capacity * capacity)
        self.smoothness = Smoothness(0, (0.0,) * axes, 0.0)
        self.signal = 1.0
        self.noise = 1.0
        self.lengths: Floats = np.ones(axes)

    def set_smoothness(self, smoothness: Smoothness, signal: float) -> None:
        """Take over parameters; `rebuild` must follow."""
        self.smoothness = smoothness
        self.signal = signal
        self.noise = math.exp(smoothness.noise) * signal
        self.lengths = np.exp(np.array(smoothness.lengths))

    def rebuild(self, points: Floats, means: Floats, weights: Floats) -> None:
        """Compute everything anew from the rewards.

        Args:
            points: float (arms, axes).
            means: Of the rewards of each arm, any number where there are none, float (arms,).
            weights: How many rewards each mean stands for, float (arms,).
        """
        size = self.size = len(points)
        self._set_prior(points)
        pulled = np.flatnonzero(weights > 0.0)
        prior = self._prior[:size, :size]
        shared = prior[:, pulled]
        system = shared[pulled]
        system.reshape(-1)[:: len(pulled) + 1] += self.noise / weights[pulled]
        gains = np.linalg.solve(system, np.column_stack([shared.T, means[pulled]]))
        covariance = shared @ gains[:, :size]
        covariance += covariance.T
        covariance *= -0.5
        covariance += prior
        self._covariance[:size, :size] = covariance
        self.means[:size] = shared @ gains[:, size]

    def _set_prior(self, points: Floats) -> None:
        size = len(points)
        prior = correlation(distances(points, points, self.lengths), self.smoothness.order)
        prior += CONSTANT
        prior.reshape(-1)[:: size + 1] += NUGGET
        prior *= self.signal
        self._prior[:size, :size] = prior
        inverse = np.linalg.inv(prior)
        inverse += inverse.T
        inverse *= 0.5
        self._inverse[:size, :size] = inverse

    def add(self, points: Floats, point: Floats) -> None:
        """One more arm, of which nothing was told.

        Args:
            points: The arms so far, float (arms, axes).
            point: float (axes,).
        """
        size, signal = self.size, self.signal
        prior = correlation(distances(points, point[None, :], self.lengths)[:, 0], self.smoothness.order)
        prior += CONSTANT
        prior *= signal
        own = signal * (1.0 + CONSTANT + NUGGET)
        inverse, covariance = self._inverse, self._covariance
        weights = inverse[:size, :size] @ prior
        shared = covariance[:size, :size] @ weights
        left = max(own - float(weights @ prior), NUGGET * signal)
        covariance[:size, size] = covariance[size, :size] = shared
        covariance[size, size] = left + float(weights @ shared)
        half = weights / math.sqrt(left)
        inverse[:size, :size] += half[:, None] * half
        inverse[:size, size] = inverse[size, :size] = weights / -left
        inverse[size, size] = 1.0 / left
        if self._drifts:
            self._prior[:size, size] = self._prior[size, :size] = prior
            self._prior[size, size] = own
        self.means[size] = weights @ self.means[:size]
        self.size = size + 1

    def observe(self, arm: int, reward: float, weight: float) -> None:
        """Learn from one reward.

        Args:
            arm: Its place.
            reward: Around the common level.
            weight: How many rewards it stands for.
        """
        size = self.size
        column = self._covariance[:size, arm].copy()
        total = float(column[arm]) + self.noise / weight
        self.means[:size] += column * ((reward - float(self.means[arm])) / total)
        # A factor on each side of the product, so that the matrix stays symmetric to the bit.
        column /= math.sqrt(total)
        # Written to a place of its own: a fresh array of this size costs more than the product.
        product = self._room[: size * size].reshape(size, size)
        np.multiply(column[:, None], column, out=product)
        self._covariance[:size, :size] -= product

    def fade(self, kept: float) -> None:
        """Move towards the prior, as one step of a function that drifts does.

        Args:
            kept: Share of the variance that survives, in (0, 1).

        Source: Bogunovic, Scarlett, Cevher, "Time-Varying Gaussian Process Bandit Optimization", AISTATS 2016, eq. 2.
        """
        size = self.size
        self.means[:size] *= math.sqrt(kept)
        covariance = self._covariance[:size, :size]
        covariance *= kept
        covariance += (1.0 - kept) * self._prior[:size, :size]

    def variances_with(self, pending: Mapping[int, int]) -> Floats:
        """The variances that will be left when open pulls have been told, whatever their rewards.

        Args:
            pending: Arms of open pulls, and how often each is open.

        Source: Desautels, Krause, Burdick, "Parallelizing Exploration-Exploitation Tradeoffs in Gaussian Process Bandit
            Optimization", JMLR 2014.
        """
        covariance = self._covariance[: self.size, : self.size].copy()
        for arm, times in pending.items():
            column = covariance[:, arm].copy()
            covariance -= column[:, None] * (column / (column[arm] + self.noise / times))
        return covariance.diagonal()

    def keep(self, arms: Sequence[int], points: Floats) -> None:
        """Keep these arms alone, in this order.

        Args:
            arms: Their places now.
            points: Of these arms, float (arms, axes).
        """
        size = len(arms)
        self.means[:size] = self.means[arms]
        self._covariance[:size, :size] = self._covariance[np.ix_(arms, arms)]
        self.size = size
        self._set_prior(points)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; the matrices as lower triangles, since they are symmetric to the bit."""
        size = self.size
        return {
            "smoothness": self.smoothness.to_json(),
            "signal": self.signal,
            "means": self.means[:size].tolist(),
            "matrices": [[matrix[row, : row + 1].tolist() for row in range(size)] for matrix in self._matrices()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], capacity: int, axes: int, *, drifts: bool) -> Posterior:
        """The posterior that `state_dict` described, to the bit.

        Raises:
            InvalidValueError: it has too many arms, or a number is not finite.
        """
        made = cls(capacity, axes, drifts=drifts)
        order, lengths, noise = state["smoothness"]
        made.set_smoothness(
            Smoothness(int(order), tuple(float(length) for length in lengths), float(noise)), float(state["signal"])
        )
        made.size = size = len(state["means"])
        if size > capacity or len(lengths) != axes or len(state["matrices"]) != len(made._matrices()):
            raise InvalidValueError(f"a posterior of {size} arms on {len(lengths)} axes does not fit {capacity} on {axes}")
        made.means[:size] = state["means"]
        for matrix, triangle in zip(made._matrices(), state["matrices"], strict=True):
            for row, values in enumerate(triangle):
                matrix[row, : row + 1] = matrix[: row + 1, row] = values
        finite = all(bool(np.isfinite(matrix[:size, :size]).all()) for matrix in made._matrices())
        if not (finite and bool(np.isfinite(made.means[:size]).all()) and math.isfinite(made.noise) and made.noise > 0.0):
            raise InvalidValueError("the numbers of a posterior must be finite, and its noise above 0")
        return made

    def _matrices(self) -> list[Floats]:
        return [self._covariance, self._inverse, *([self._prior] if self._drifts else [])]
