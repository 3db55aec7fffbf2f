"""Pace: exploration costs what it may, and less where it brings nothing."""

from __future__ import annotations

import torch

from sparsekit.training.pace import Pace
from sparsekit.training.swap import choose_swaps

STEPS = 1000


def _spent(fruitful: list[bool | None], *, steps: int | None = STEPS) -> float:
    """Extra work after all steps of a training whose rounds, of ten explored steps each, end with these findings."""
    pace = Pace(0.1, steps, 0.75, 40)
    for _ in range(STEPS):
        if pace.next_group({"a": 1.0}) is not None:
            pace.saw("a", 1.0)
        pace.step += 1
        if pace.complete(["a"], 10):
            pace.next_round(fruitful[min(pace.round, len(fruitful) - 1)])
    return pace.spent


def test_exploration_that_brings_something_costs_its_share_and_no_more() -> None:
    assert 0.098 * STEPS < _spent([True]) <= 0.1 * STEPS
    assert 0.098 * STEPS < _spent([None]) <= 0.1 * STEPS


def test_rounds_that_bring_nothing_halve_what_may_be_spent() -> None:
    assert 10 <= _spent([False]) < 0.03 * STEPS
    assert _spent([None, False]) < 0.055 * STEPS


def test_a_round_that_brings_something_gives_back_what_was_held_back() -> None:
    assert _spent([False]) < _spent([False, True]) <= 0.1 * STEPS


def test_where_the_length_is_not_known_the_share_stays_as_it_is() -> None:
    assert _spent([False], steps=None) == _spent([True], steps=None)


def test_units_that_differ_by_rounding_alone_are_taken_in_order() -> None:
    keep = torch.tensor([True, True, False, False, False])
    for rounding in (-1e-15, 1e-15):
        gain = torch.tensor([0.0, 0.0, 1 / 6, 1 / 6 + rounding, 0.1], dtype=torch.float64)
        cost = torch.tensor([0.01 + rounding, 0.01, torch.inf, torch.inf, torch.inf], dtype=torch.float64)
        leaving, entering = choose_swaps(keep, cost, gain, 1)
        assert (leaving.tolist(), entering.tolist()) == ([0], [2])
