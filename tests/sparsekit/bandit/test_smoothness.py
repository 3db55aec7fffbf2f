"""Smoothness: correlations, the score of parameters against the density it stands for, and the walk over them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparsekit.bandit.smoothness import (
    CONSTANT,
    NUGGET,
    Evidence,
    Floats,
    Prior,
    Smoothness,
    correlation,
    distances,
    first,
    redraw,
    squared_gaps,
)

PRIOR = Prior()


def evidence(points: Floats, rewards: Floats, *, within: float = 0.0, replicates: float = 0.0) -> Evidence:
    rewards = rewards - rewards.mean()
    return Evidence(squared_gaps(points), rewards, np.ones(len(rewards)), within, replicates, float(rewards.var()))


@pytest.mark.parametrize(("order", "at_one"), [(0, 0.36788), (1, 0.48336), (2, 0.52399)])
def test_correlations_are_those_of_matern(order: int, at_one: float) -> None:
    found = correlation(np.array([0.0, 1.0, 50.0]), order)
    assert found == pytest.approx([1.0, at_one, 0.0], abs=1e-5)


def test_distances_divide_each_axis_by_its_length() -> None:
    points, others = np.array([[0.0, 0.0]]), np.array([[0.3, 0.4], [0.0, 1.0]])
    assert distances(points, others, np.array([0.1, 0.1])).tolist() == [[pytest.approx(5.0), pytest.approx(10.0)]]
    assert distances(np.array([[0.2]]), np.array([[0.7]]), np.array([0.25])).tolist() == [[pytest.approx(2.0)]]


def test_the_score_differs_between_parameters_as_the_density_of_the_rewards_does() -> None:
    points, rng = np.array([[0.1], [0.2], [0.6], [0.9]]), np.random.default_rng(0)
    told = evidence(points, rng.normal(size=4), within=0.3, replicates=2.0)
    # Without a prior of its own the signal variance is at its maximum, and the score is the profile density.
    flat = Prior(length_spread=1e9, axis_spread=1e9, noise_spread=1e9, strength=0.0)

    def density(smoothness: Smoothness, signal: float) -> float:
        ratio = math.exp(smoothness.noise)
        matrix = correlation(distances(points, points, np.exp(smoothness.lengths)), smoothness.order) + CONSTANT
        matrix[np.diag_indices(4)] += ratio + NUGGET
        matrix *= signal
        squares = float(told.means @ np.linalg.solve(matrix, told.means)) + told.within / (signal * ratio)
        return -0.5 * (float(np.linalg.slogdet(matrix)[1]) + 2.0 * math.log(signal * ratio) + squares)

    found = []
    for smoothness in (Smoothness(0, (math.log(0.2),), math.log(0.1)), Smoothness(2, (math.log(0.5),), math.log(0.3))):
        score, signal = told.score(smoothness, flat)
        assert density(smoothness, signal) > max(density(smoothness, 0.9 * signal), density(smoothness, 1.1 * signal))
        found.append(score - density(smoothness, signal))
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def draws(told: Evidence, count: int, *, seed: int = 0) -> list[Smoothness]:
    rng, here, found = np.random.default_rng(seed), first(told, PRIOR), []
    for _ in range(count):
        here, _ = redraw(here, told, PRIOR, moves=4, rng=rng)
        found.append(here)
    return found


def test_the_walk_tells_a_smooth_function_from_a_jagged_one() -> None:
    points = np.linspace(0.0, 1.0, 24)[:, None]
    smooth = evidence(points, np.sin(3.0 * points[:, 0]), within=0.002, replicates=20.0)
    jagged = evidence(points, np.sin(1e4 * points[:, 0]), within=0.002, replicates=20.0)
    lengths = [float(np.mean([draw.lengths[0] for draw in draws(told, 60)[20:]])) for told in (smooth, jagged)]
    assert lengths[0] > math.log(0.3)
    assert lengths[1] < math.log(0.1)


def test_the_walk_finds_the_noise_from_replicates() -> None:
    points = np.linspace(0.0, 1.0, 12)[:, None]
    told = evidence(points, np.sin(3.0 * points[:, 0]), within=100 * 0.3**2, replicates=100.0)
    found = []
    for draw in draws(told, 60)[20:]:
        found.append(math.sqrt(math.exp(draw.noise) * told.score(draw, PRIOR)[1]))
    assert np.mean(found) == pytest.approx(0.3, rel=0.15)


def test_the_walk_finds_the_axis_that_matters() -> None:
    rng = np.random.default_rng(1)
    points = rng.random((40, 2))
    told = evidence(points, np.sin(9.0 * points[:, 1]), within=0.01, replicates=10.0)
    ratio = np.mean([draw.lengths[0] - draw.lengths[1] for draw in draws(told, 120)[40:]])
    assert ratio > 0.3


def test_without_moves_nothing_changes() -> None:
    told = evidence(np.array([[0.1], [0.7]]), np.array([0.0, 1.0]))
    here = first(told, PRIOR)
    assert redraw(here, told, PRIOR, moves=0, rng=np.random.default_rng(0))[0] is here
