"""Posterior: what arms of a tree learn from their own rewards and from one another."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparsekit.bandit.cells import Cells, grid
from sparsekit.bandit.posterior import Posterior
from sparsekit.bandit.rule import Rule


def tree() -> tuple[Cells, Posterior]:
    """Two halves, the first of them split once more; nothing has been told."""
    cells = Cells(grid(2, 1))
    cells.reserve(8)
    posterior = Posterior(1.0, 0.0, 1, Rule())
    posterior.reserve(9)
    cells.split(0, 0, 0.25, keeps_low=True)
    posterior.settle(0, 2, 1)
    return cells, posterior


def test_variation_shrinks_with_the_depth_where_nothing_is_known() -> None:
    _, posterior = tree()
    assert posterior.variation[:4].tolist() == pytest.approx([0.49**depth for depth in range(4)])


def test_a_new_arm_is_believed_like_the_one_it_was_split_from_with_more_doubt() -> None:
    _, posterior = tree()
    assert (posterior.means[2], posterior.variances[2]) == (0.0, 1.49)


def test_a_reward_is_weighed_by_its_noise() -> None:
    _, posterior = tree()
    posterior.observe(0, 2.0, 1.0)
    assert (posterior.means[0], posterior.variances[0]) == (1.0, 0.5)


def test_arms_learn_from_parents_and_children() -> None:
    cells, posterior = tree()
    for _ in range(3):
        posterior.sweep(cells, np.array([4.0, 4.0, 0.0]), np.array([1.0, -1.0, 0.0]), 0.1, 8.0)
    assert posterior.means[2] == pytest.approx(posterior.means[0])
    assert 0.9 < posterior.means[0] < 1.0
    for _ in range(3):
        posterior.sweep(cells, np.array([0.0, 4.0, 4.0]), np.array([0.0, -1.0, 1.0]), 0.1, 8.0)
    assert 0.3 < posterior.means[0] < posterior.means[2] < 1.0


def test_an_arm_far_from_its_parent_raises_the_variation_at_its_depth_and_below() -> None:
    cells, posterior = tree()
    before = posterior.variation[:3].copy()
    posterior.sweep(cells, np.array([50.0, 50.0, 50.0]), np.array([0.0, 0.0, 5.0]), 0.1, 150.0)
    assert posterior.variation[0] == before[0]
    # The share that is not noise or doubt about the parent, and three arms' worth of what was thought before.
    share = 0.49 / (0.49 + 0.1 / 50.0 + 1.0)
    assert posterior.variation[1] == pytest.approx((3.0 * 0.49 + (5.0 * share) ** 2) / (3.0 + share))
    assert posterior.variation[2] == pytest.approx(0.49 * posterior.variation[1])


def test_room_grows_with_the_rewards_and_shrinks_with_the_depth() -> None:
    cells, posterior = tree()
    rooms = []
    for told in (10.0, 1000.0):
        posterior.sweep(cells, np.ones(3), np.zeros(3), 0.1, told)
        rooms.append(posterior.room[:2].tolist())
    assert rooms[0][0] > rooms[0][1]
    assert rooms[1][0] > rooms[0][0]
    assert rooms[1][1] > rooms[0][1]


def test_no_arm_lies_below_all_others() -> None:
    _, posterior = tree()
    assert posterior.means[-1] == -math.inf
