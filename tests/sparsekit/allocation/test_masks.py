"""mask_from_scores() and make_mask(): how scores and counts become a mask."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsekit.allocation import mask_from_scores
from sparsekit.testing.criteria import example_graph

SIZES = {name: group.size for name, group in example_graph().groups.items()}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def _kept(keep: Tensor) -> list[int]:
    return [int(unit) for unit in keep.nonzero().flatten()]


@given(st.data())
def test_exactly_the_count_stays_and_whoever_stays_beats_whoever_goes(data: st.DataObject) -> None:
    values = {name: data.draw(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.5, 2.0, float("inf")]), min_size=n, max_size=n))
              for name, n in SIZES.items()}  # fmt: skip
    counts = {name: data.draw(st.integers(1, size)) for name, size in SIZES.items()}
    dtype = data.draw(st.sampled_from(FLOATS))
    mask = mask_from_scores(example_graph(), {name: torch.tensor(v, dtype=dtype) for name, v in values.items()}, counts)
    assert mask.counts() == counts
    for name, keep in mask.items():
        order = sorted(range(SIZES[name]), key=lambda unit: (-values[name][unit], unit))
        assert _kept(keep) == sorted(order[: counts[name]])


def test_scores_that_differ_in_double_precision_only_are_told_apart() -> None:
    scores = {name: torch.ones(size, dtype=torch.float64) for name, size in SIZES.items()}
    scores["first"][5] += 1e-12
    assert _kept(mask_from_scores(example_graph(), scores, dict.fromkeys(SIZES, 1))["first"]) == [5]
