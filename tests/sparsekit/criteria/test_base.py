"""select() and the only rounding from a ratio to a count."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsekit.criteria import Ordered, PatternView, keep_count, registry, select
from sparsekit.criteria.base import check_ratio, keep_largest
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGroup
from sparsekit.testing.patterns import example_graph


@pytest.mark.parametrize(
    ("ratio", "size", "count"),
    [
        (0.5, 10, 5),
        (0.5, 5, 3),
        (0.1, 10, 1),
        (0.3, 10, 3),
        (0.7, 10, 7),
        (1e-9, 10, 1),
        (1.0, 7, 7),
        (1 / 16, 512, 32),
        (1, 1, 1),
    ],
)
def test_the_count_is_rounded_up_and_at_least_one(ratio: float, size: int, count: int) -> None:
    assert keep_count(ratio, size) == count


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, float("nan"), float("inf"), True, "0.5", None])
def test_a_ratio_outside_the_range_is_refused(ratio: object) -> None:
    with pytest.raises(InvalidValueError, match=r"ratio must be in \(0, 1\], got"):
        check_ratio(ratio)  # type: ignore[arg-type]


def test_a_ratio_in_per_cent_gets_the_right_advice() -> None:
    with pytest.raises(InvalidValueError, match=r"for 30 % pass 0\.3"):
        check_ratio(30)


def test_ties_go_to_the_lower_index() -> None:
    assert keep_largest(torch.tensor([1.0, 2.0, 1.0, 2.0]), 3).tolist() == [True, True, False, True]


def test_a_pattern_that_keeps_another_number_is_named() -> None:
    @dataclass(frozen=True)
    class Greedy:
        def keep(self, group: UnitGroup, count: int, view: PatternView) -> Tensor:
            return torch.ones(group.size, dtype=torch.bool)

    with pytest.raises(InvalidValueError, match="Greedy kept 7"):
        select(Greedy(), example_graph(), 0.5, PatternView())


def test_patterns_are_found_by_name() -> None:
    assert registry["ordered"] is Ordered
    assert {"importance", "magnitude", "ordered", "random", "rolling"} <= set(registry)


def test_a_ratio_may_be_any_real_number() -> None:
    assert check_ratio(np.float32(0.5)) == 0.5
    assert type(check_ratio(np.float64(0.25))) is float
    assert check_ratio(Fraction(1, 4)) == 0.25
