"""choose() and select(): how scores and counts become a mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsekit.allocation import Uniform, choose
from sparsekit.errors import InvalidValueError
from sparsekit.testing.allocations import example_tied_graph
from sparsekit.testing.criteria import example_graph

SIZES = {name: group.size for name, group in example_graph().groups.items()}
FEW = {"first": 3, "second": 1, "third": 8}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def _scores(**given: Tensor) -> dict[str, Tensor]:
    return {**{name: torch.zeros(size) for name, size in SIZES.items()}, **given}


def _kept(keep: Tensor) -> list[int]:
    return [int(unit) for unit in keep.nonzero().flatten()]


def test_ties_go_to_the_lower_index() -> None:
    mask = choose(example_graph(), _scores(first=torch.tensor([1.0, 2, 1, 2, 0, 1, 0])), {**FEW, "first": 4})
    assert _kept(mask["first"]) == [0, 1, 2, 3]


@given(st.data())
def test_exactly_the_count_stays_and_whoever_stays_beats_whoever_goes(data: st.DataObject) -> None:
    values = {name: data.draw(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.5, 2.0, float("inf")]), min_size=n, max_size=n))
              for name, n in SIZES.items()}  # fmt: skip
    counts = {name: data.draw(st.integers(1, size)) for name, size in SIZES.items()}
    dtype = data.draw(st.sampled_from(FLOATS))
    mask = choose(example_graph(), {name: torch.tensor(v, dtype=dtype) for name, v in values.items()}, counts)
    assert mask.counts() == counts
    for name, keep in mask.items():
        order = sorted(range(SIZES[name]), key=lambda unit: (-values[name][unit], unit))
        assert _kept(keep) == sorted(order[: counts[name]])


@given(st.floats(min_value=0.001, max_value=1.0), st.integers(0, 99))
def test_tied_groups_keep_equal_numbers(ratio: float, seed: int) -> None:
    graph, generator = example_tied_graph(), torch.Generator().manual_seed(seed)
    scores = {name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()}
    mask = choose(graph, scores, Uniform(ratio).counts(graph, scores))
    mask.check(graph)
    assert mask.counts()["lower"] == mask.counts()["upper"]


def test_scores_that_differ_in_double_precision_only_are_told_apart() -> None:
    scores = torch.full((7,), 1.0, dtype=torch.float64)
    scores[5] += 1e-12
    assert _kept(choose(example_graph(), _scores(first=scores), {**FEW, "first": 1})["first"]) == [5]


def test_nan_names_its_source_its_group_and_its_unit() -> None:
    bad = torch.tensor([0.0, 1, float("nan"), 0, 0, 0, 0])
    with pytest.raises(InvalidValueError, match="magic of group 'first' hold NaN, for unit 2 first"):
        choose(example_graph(), _scores(first=bad), FEW, source="magic")
