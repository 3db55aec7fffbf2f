"""Posterior: against the closed form of a Gaussian process on a few points."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from sparsekit.bandit.posterior import Posterior
from sparsekit.bandit.smoothness import CONSTANT, NUGGET, Floats, Smoothness, correlation, distances

POINTS = np.array([[0.1], [0.4], [0.45], [0.9]])
SMOOTHNESS = Smoothness(1, (math.log(0.3),), math.log(0.2))
SIGNAL = 2.0


def prior(points: Floats) -> Floats:
    matrix = correlation(distances(points, points, np.array([0.3])), 1) + CONSTANT
    matrix[np.diag_indices(len(points))] += NUGGET
    return SIGNAL * matrix


def closed_form(points: Floats, arms: list[int], rewards: list[float]) -> tuple[Floats, Floats]:
    """Mean and covariance at all points after these rewards, by conditioning on all at once."""
    matrix = prior(points)
    noisy = matrix[np.ix_(arms, arms)] + 0.2 * SIGNAL * np.eye(len(arms))
    gains = np.linalg.solve(noisy, matrix[arms]).T
    return gains @ np.array(rewards), matrix - gains @ matrix[arms]


def make(points: Floats, *, drifts: bool = False) -> Posterior:
    posterior = Posterior(8, points.shape[1], drifts=drifts)
    posterior.set_smoothness(SMOOTHNESS, SIGNAL)
    posterior.rebuild(points, np.zeros(len(points)), np.zeros(len(points)))
    return posterior


ARMS, REWARDS = [0, 3, 0, 2], [1.0, -0.5, 0.7, 2.0]


def check(posterior: Posterior, mean: Floats, covariance: Floats) -> None:
    size = posterior.size
    assert posterior.means[:size] == pytest.approx(mean, abs=1e-8)
    assert posterior._covariance[:size, :size] == pytest.approx(covariance, abs=1e-8)
    assert posterior.variances[:size] == pytest.approx(np.diag(covariance), abs=1e-8)


def test_rewards_one_by_one_give_the_closed_form() -> None:
    posterior = make(POINTS)
    for arm, reward in zip(ARMS, REWARDS, strict=True):
        posterior.observe(arm, reward, 1.0)
    check(posterior, *closed_form(POINTS, ARMS, REWARDS))


def test_rebuilding_from_means_and_weights_gives_the_same() -> None:
    posterior = make(POINTS)
    posterior.rebuild(POINTS, np.array([0.85, 9.0, 2.0, -0.5]), np.array([2.0, 0.0, 1.0, 1.0]))
    check(posterior, *closed_form(POINTS, ARMS, REWARDS))


def test_an_arm_added_later_is_as_if_it_had_been_there() -> None:
    posterior = make(POINTS)
    for arm, reward in zip(ARMS, REWARDS, strict=True):
        posterior.observe(arm, reward, 1.0)
    points = np.vstack([POINTS, [[0.6]]])
    posterior.add(POINTS, points[4])
    check(posterior, *closed_form(points, ARMS, REWARDS))
    posterior.observe(4, 1.5, 1.0)
    check(posterior, *closed_form(points, [*ARMS, 4], [*REWARDS, 1.5]))


def test_a_weight_counts_for_so_many_rewards() -> None:
    twice, once = make(POINTS), make(POINTS)
    once.observe(1, 0.5, 2.0)
    for _ in range(2):
        twice.observe(1, 0.5, 1.0)
    check(once, twice.means[:4], twice._covariance[:4, :4])


def test_an_arm_that_is_taken_away_leaves_what_it_taught() -> None:
    posterior = make(POINTS)
    posterior.observe(2, 2.0, 1.0)
    posterior.keep([3, 1], POINTS[[3, 1]])
    mean, covariance = closed_form(POINTS, [2], [2.0])
    check(posterior, mean[[3, 1]], covariance[np.ix_([3, 1], [3, 1])])


def test_open_pulls_shrink_the_variances_as_their_rewards_would() -> None:
    posterior = make(POINTS)
    posterior.observe(0, 1.0, 1.0)
    expected = np.diag(closed_form(POINTS, [0, 1, 1, 3], [0.0] * 4)[1])
    assert posterior.variances_with({1: 2, 3: 1}) == pytest.approx(expected, abs=1e-8)


def test_fading_goes_back_to_the_prior() -> None:
    posterior = make(POINTS, drifts=True)
    posterior.observe(0, 1.0, 1.0)
    for _ in range(200):
        posterior.fade(0.8)
    check(posterior, np.zeros(4), prior(POINTS))


def test_the_covariance_stays_symmetric_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    posterior = make(POINTS)
    posterior.add(POINTS, np.array([0.7]))
    for _ in range(100):
        posterior.observe(int(rng.integers(5)), float(rng.normal()), float(rng.random() + 0.1))
    for matrix in posterior._matrices():
        assert np.array_equal(matrix, matrix.T)


@pytest.mark.parametrize("drifts", [False, True])
def test_a_state_goes_through_json_to_the_bit(drifts: bool) -> None:
    posterior = make(POINTS, drifts=drifts)
    posterior.observe(2, 2.0, 0.3)
    text = json.dumps(posterior.state_dict())
    copy = Posterior.from_state(json.loads(text), 8, 1, drifts=drifts)
    assert json.dumps(copy.state_dict()) == text
    assert np.array_equal(copy._inverse, posterior._inverse)
