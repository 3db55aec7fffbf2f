"""Choosing single weights: exact counts, exact ties, densities that add up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekit_fl.methods.masks import keep_largest_entries, largest_weights, weight_count
from sparsekit_fl.methods.personal_masks import layer_densities, random_weights

STATE = {"w": torch.tensor([[1.0, -3.0, 2.0], [0.5, 3.0, -2.0]]), "b": torch.tensor([9.0, 9.0])}


def test_the_largest_stay_and_ties_go_to_the_lower_place():
    assert largest_weights(STATE, ["w"], 0.5)["w"].tolist() == [[False, True, True], [False, True, False]]
    assert list(largest_weights(STATE, ["w"], 0.5)) == ["w"]


def test_pruning_again_stays_within_what_is_left():
    first = largest_weights(STATE, ["w"], 0.5)
    changed = {"w": torch.tensor([[8.0, 1.0, 2.0], [8.0, 3.0, 8.0]])}
    assert largest_weights(changed, ["w"], 0.3, within=first)["w"].tolist() == [[False, False, True], [False, True, False]]
    # No more can stay than are alive.
    assert largest_weights(changed, ["w"], 1.0, within=first)["w"].tolist() == first["w"].tolist()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0.001, 1.0))
def test_exactly_the_count_stays_and_nothing_larger_is_dropped(values, ratio):
    scores = torch.tensor(values, dtype=torch.float32)
    count = weight_count(ratio, len(values))
    keep = keep_largest_entries(scores, count)
    assert int(keep.sum()) == count
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    assert set(keep.nonzero().flatten().tolist()) == set(order.tolist())


def test_counts_are_rounded_up_and_at_least_one():
    assert [weight_count(r, 10) for r in (0.1, 0.11, 1e-9, 1.0, 0.0)] == [1, 2, 1, 10, 0]


def test_random_masks_have_exact_counts_and_come_from_the_generator_alone():
    shapes = {"w": torch.Size((4, 5)), "v": torch.Size((3, 3))}
    first, second = (
        random_weights(shapes, dict.fromkeys(shapes, 0.5), generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert first == second
    assert first.counts() == {"w": 10, "v": 5}
    assert first != random_weights(shapes, dict.fromkeys(shapes, 0.5), generator=torch.Generator().manual_seed(2))


def test_densities_by_hand():
    # (2 + 2) / 4 = 1 and (10 + 10) / 100 = 0.2: at one half of 104 weights the small layer is whole.
    shares = layer_densities({"small": torch.Size((2, 2)), "large": torch.Size((10, 10))}, 0.5)
    assert shares == {"small": 1.0, "large": pytest.approx(0.48)}


@given(
    st.dictionaries(st.text("abcdef", min_size=1), st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
)
def test_densities_add_up_and_never_exceed_one(sizes, density):
    shapes = {name: torch.Size(size) for name, size in sizes.items()}
    shares = layer_densities(shapes, density)
    assert all(0.0 <= share <= 1.0 + 1e-12 for share in shares.values())
    total = sum(math.prod(shape) for shape in shapes.values())
    kept = sum(shares[name] * math.prod(shape) for name, shape in shapes.items())
    # Layers that are whole may alone exceed what was asked for.
    assert kept == pytest.approx(density * total) or any(share == 1.0 for share in shares.values())
    assert kept >= density * total - 1e-6
