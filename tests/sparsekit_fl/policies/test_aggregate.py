"""Aggregation on a model of three numbers, exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice
from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit_fl.client.context import rngs_by_kind
from sparsekit_fl.client.kept import Kept
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.policies import Assignment, Mean, ServerContext, Update

INDEX = torch.arange(3).view(3, 1)
GRAPH = UnitGraph(
    groups={"a": UnitGroup("a", 3, "feature", (UnitSlice("w", 0, INDEX, "out", False),))},
    shapes={"w": torch.Size([3]), "n": torch.Size([])},
)
STATE = {"w": torch.tensor([1.0, 2.0, 3.0]), "n": torch.tensor(10)}


def context():
    return ServerContext(
        round=1,
        rounds=1,
        roster={},
        cohort_size=2,
        rngs=rngs_by_kind(np.random.default_rng(0)),
        memory={},
        graph=GRAPH,
        state=STATE,
    )


def update(client_id, delta, *, keep=None, examples=1, count=0):
    mask = None if keep is None else UnitMask({"a": torch.tensor(keep)})
    kept = Kept(GRAPH, mask)
    entries = {"w": kept.gather("w", torch.tensor(delta)), "n": torch.tensor(count)}
    return Update(round=1, client_id=client_id, examples=examples, delta=entries, mask=mask)


def combine(policy, *updates):
    return policy.combine(context(), STATE, [(item, 0) for item in updates])


def test_weighted_mean_weighs_by_examples():
    result = combine(Mean(), update(0, [1.0, 0.0, 4.0], examples=1), update(1, [5.0, 4.0, 0.0], examples=3))
    assert result["w"].tolist() == [5.0, 5.0, 4.0]


def test_uniform_weighting_ignores_examples():
    policy = Mean("uniform")
    result = combine(policy, update(0, [1.0, 0.0, 4.0], examples=1), update(1, [5.0, 4.0, 0.0], examples=3))
    assert result["w"].tolist() == [4.0, 4.0, 5.0]


def test_weighted_mean_refuses_masked_updates():
    masked = update(0, [1.0, 1.0, 1.0], keep=[True, False, True])
    with pytest.raises(UpdateError, match=r'choose Mean\(over="all"\)'):
        Mean().validate(context(), masked, Assignment(round=1, client_id=0, state=STATE))
    for over in ("all", "holders"):
        Mean(over=over).validate(context(), masked, Assignment(round=1, client_id=0, state=STATE))


def test_equal_masks_move_kept_entries_alike_under_both_rules():
    updates = [update(k, [2.0 + k, 8.0, 4.0 - k], keep=[True, False, True]) for k in range(2)]
    delta, coverage = combine(Mean(over="all"), *updates), combine(Mean("uniform", over="holders"), *updates)
    assert delta["w"].tolist() == coverage["w"].tolist() == [3.5, 2.0, 6.5]


def test_disjoint_masks_are_copied_by_coverage_and_halved_by_delta():
    updates = [update(0, [2.0, 0.0, 0.0], keep=[True, False, False]), update(1, [0.0, 4.0, 0.0], keep=[False, True, False])]
    assert combine(Mean("uniform", over="holders"), *updates)["w"].tolist() == [3.0, 6.0, 3.0]
    assert combine(Mean(over="all"), *updates)["w"].tolist() == [2.0, 4.0, 3.0]


def test_an_entry_that_nobody_keeps_is_the_same_bits():
    updates = [update(k, [1.0, 1.0, 1.0], keep=[True, True, False]) for k in range(3)]
    for policy in (Mean(over="all"), Mean("uniform", over="holders"), Mean("examples", over="holders")):
        assert torch.equal(combine(policy, *updates)["w"][2], STATE["w"][2])


def test_coverage_weighs_by_examples_where_asked():
    updates = [
        update(0, [1.0, 3.0, 0.0], keep=[True, True, False], examples=1),
        update(1, [5.0, 0.0, 0.0], keep=[True, False, False], examples=3),
    ]
    assert combine(Mean("examples", over="holders"), *updates)["w"].tolist() == [5.0, 5.0, 3.0]
    # A holder of few examples alone counts in full.
    alone = [update(0, [1.0, 0.0, 0.0], keep=[True, False, False], examples=3)]
    alone += [update(1, [0.0, 4.0, 0.0], keep=[False, True, False], examples=1)]
    assert combine(Mean("examples", over="holders"), *alone)["w"].tolist() == [2.0, 6.0, 3.0]


def test_whole_and_masked_updates_mix():
    updates = [update(0, [2.0, 2.0, 2.0]), update(1, [4.0, 0.0, 0.0], keep=[True, False, False])]
    assert combine(Mean("uniform", over="holders"), *updates)["w"].tolist() == [4.0, 4.0, 5.0]


@pytest.mark.same_bits
def test_a_full_mask_gives_the_bits_of_no_mask():
    deltas = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32).tolist()
    plain = combine(Mean(), *[update(k, delta, examples=7) for k, delta in enumerate(deltas)])
    for policy in (
        Mean(over="all"),
        Mean("uniform", over="all"),
        Mean("uniform", over="holders"),
        Mean("examples", over="holders"),
    ):
        masked = [update(k, delta, keep=[True] * 3, examples=7) for k, delta in enumerate(deltas)]
        assert torch.equal(combine(policy, *masked)["w"], plain["w"])


def test_weight_masks_hold_single_entries():
    mask = WeightMask({"w": torch.tensor([False, True, True])})
    item = Update(round=1, client_id=0, examples=1, mask=mask, delta={"w": torch.tensor([3.0, 5.0]), "n": torch.tensor(0)})
    assert combine(Mean("uniform", over="holders"), item, update(1, [1.0, 1.0, 1.0]))["w"].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(("counts", "expected"), [((1, 2, 2), 12), ((1, 1, 2), 11), ((1, 4), 12), ((3, 4), 14)])
def test_integer_entries_are_rounded_to_the_nearest_and_halves_to_even(counts, expected):
    result = combine(Mean(), *(update(k, [0.0, 0.0, 0.0], count=count) for k, count in enumerate(counts)))
    assert result["n"].item() == expected
    assert result["n"].dtype == torch.int64
