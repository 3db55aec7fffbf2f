"""Uniform: the only rounding from a ratio to a count."""

from collections.abc import Callable

import pytest

from sparsekit.allocation import ratio_counts
from sparsekit.allocation.shares import check_ratio, keep_count
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup


@pytest.mark.parametrize(
    ("ratio", "size", "count"),
    [
        (0.5, 5, 3),
        (0.7, 10, 7),
        (1e-9, 10, 1),
        (1, 7, 7),
        (1 / 16, 512, 32),
    ],
)
def test_the_count_is_rounded_up_and_at_least_one(ratio: float, size: int, count: int) -> None:
    assert keep_count(ratio, size) == count
    assert ratio_counts(UnitGraph({"only": UnitGroup("only", size, "feature", ())}, {}), ratio) == {"only": count}


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, float("nan"), float("inf"), True, "0.5", None])
@pytest.mark.parametrize("check", [check_ratio, lambda ratio: ratio_counts(UnitGraph({}, {}), ratio)])
def test_a_ratio_outside_the_range_is_refused(ratio: object, check: Callable[[object], object]) -> None:
    with pytest.raises(InvalidValueError, match=r"ratio must be in \(0, 1\], got"):
        check(ratio)


def test_groups_tied_in_a_chain_take_the_least_of_their_counts() -> None:
    groups = {name: UnitGroup(name, size, "feature", ()) for name, size in (("a", 9), ("b", 8), ("c", 6), ("d", 9))}
    graph = UnitGraph(groups, {}, ties=(("a", "b"), ("b", "c")))
    assert ratio_counts(graph, 0.5) == {"a": 3, "b": 3, "c": 3, "d": 5}
