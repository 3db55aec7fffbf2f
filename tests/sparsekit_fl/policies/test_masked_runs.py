"""Policies together: masks of units and entries, of the server, private entries; and how masks of entries are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from personal import watched

import sparsekit_fl as fl
from sparsekit import criteria, load_compact, load_mask, trace_units
from sparsekit.allocation import select
from sparsekit.criteria import View
from sparsekit.graph import UnitMask, WeightMask
from sparsekit_fl import policies
from sparsekit_fl.policies.mask import (
    keep_largest_entries,
    largest_weights,
    layer_densities,
    random_weights,
    weight_count,
)
from sparsekit_fl.testing import MethodContract, TinyNet, tiny_clients, tiny_config, tiny_problem


@dataclass(frozen=True)
class TopHalfOfEntries(policies.MaskPolicy):
    def choose(self, ctx, ratio, state):
        weight = state["first.weight"]
        return WeightMask({"first.weight": weight.abs() > weight.abs().median()})


@dataclass(frozen=True)
class PrefixFromServer(policies.MaskPolicy):
    def propose(self, ctx, client_id, proposal):
        return select(criteria.Ordered(), ctx.graph, proposal, View())


@dataclass(frozen=True)
class UploadFirstEntry(policies.SharePolicy):
    def upload_mask(self, ctx, result):
        keep = torch.zeros(8, dtype=torch.bool)
        keep[0] = True
        return WeightMask({"first.bias": keep})


def half(**other):
    chosen = {
        "ratio": policies.Constant(0.5),
        "mask": policies.UnitCriterion(criteria.Random()),
        "aggregate": policies.Mean(over="all"),
        "personal": policies.LocalModel("best"),
    }
    return fl.Method(name="half", source="", **{**chosen, **other})


CONTRACTS = {
    "half of the units": half,
    "entries": lambda: fl.Method(
        name="entries", source="", mask=TopHalfOfEntries(), aggregate=policies.Mean("uniform", over="holders")
    ),
    "mask from the server": lambda: half(
        ratio=policies.ByCapability(), mask=PrefixFromServer(), aggregate=policies.Mean("uniform", over="holders")
    ),
    "private head": lambda: half(share=policies.PrivateHead(), personal=policies.GlobalModel()),
}


class TestMaskedRuns(MethodContract):
    @pytest.fixture(params=CONTRACTS)
    def make(self, request):
        return CONTRACTS[request.param]


@pytest.mark.same_bits
def test_full_masks_give_the_bits_of_fedavg_under_every_rule():
    clients = tiny_clients(examples=24)[::4]
    config = replace(tiny_config(), cohort=2)
    plain = fl.run(fl.Method(name="fedavg", source=""), tiny_problem(), clients, config)
    for aggregate in (
        policies.Mean(over="all"),
        policies.Mean("uniform", over="holders"),
        policies.Mean("examples", over="holders"),
    ):
        method = fl.Method(name="m", source="", mask=policies.UnitCriterion(criteria.Random()), aggregate=aggregate)
        assert fl.run(method, tiny_problem(), clients, config).final.state_sha256 == plain.final.state_sha256


def test_updates_are_narrow_and_narrow_work_is_cheaper():
    result, updates = watched(half())
    whole, _ = watched(fl.Method(name="whole", source=""))
    assert all(update.delta["first.weight"].shape == (4, 6) for update in updates)
    assert all(update.delta["last.weight"].shape == (3, 4) for update in updates)
    assert all(isinstance(update.mask, UnitMask) and update.ratio == 0.5 for update in updates)
    assert result.cost.flops_compact < result.cost.flops_rowmask < whole.cost.flops_rowmask
    assert result.cost.uplink_bytes < whole.cost.uplink_bytes


def test_a_mask_from_the_server_saves_downlink_bytes():
    sent, _ = watched(half(mask=PrefixFromServer(), ratio=policies.Constant(0.25)))
    chosen, _ = watched(half(mask=policies.UnitCriterion(criteria.Ordered()), ratio=policies.Constant(0.25)))
    assert sent.cost.downlink_bytes < chosen.cost.downlink_bytes
    assert sent.cost.flops_compact == chosen.cost.flops_compact


def test_entries_outside_a_weight_mask_neither_train_nor_travel():
    result, updates = watched(fl.Method(name="m", source="", mask=TopHalfOfEntries(), aggregate=policies.Mean(over="all")))
    assert all(update.delta["first.weight"].shape == (24,) for update in updates)
    whole, _ = watched(fl.Method(name="whole", source=""))
    assert result.cost.flops_compact == whole.cost.flops_compact
    assert result.cost.flops_rowmask < whole.cost.flops_rowmask


def test_private_entries_stay_on_the_client():
    result, updates = watched(half(share=policies.PrivateHead(), personal=policies.GlobalModel()))
    assert all(not name.startswith("last.") for update in updates for name in update.delta)
    untouched, _ = watched(fl.Method(name="m", source="", share=policies.Nothing()))
    assert torch.equal(result.state["last.weight"], untouched.state["last.weight"])
    assert result.final.personal != result.final.shared


def test_the_upload_mask_may_differ_from_the_trained_one():
    method = half(share=UploadFirstEntry(), aggregate=policies.Mean(over="all"))
    _, updates = watched(method)
    assert all(update.delta["first.bias"].shape == (1,) for update in updates)
    assert all(update.delta["first.weight"].shape == (8, 6) for update in updates)


def test_own_models_are_kept_compact_with_mask_and_ratio(tmp_path):
    result, _ = watched(half(), out=tmp_path)
    trained = {client_id for record in result.rounds for client_id in record.cohort}
    path = tmp_path / "models" / f"client-{min(trained)}.safetensors"
    assert load_compact(path, TinyNet).first.weight.shape == (4, 6)
    assert load_mask(path, trace_units(TinyNet(), torch.zeros(2, 6))).counts() == {"first": 4}
    ratios = {score.client_id: score.ratio for score in result.final.per_client}
    assert all(ratios[client_id] == (0.5 if client_id in trained else None) for client_id in ratios)


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
    assert layer_densities({"a": torch.Size((4, 4)), "b": torch.Size((9, 4))}, 0.25, power=0.0) == {"a": 0.25, "b": 0.25}


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


def test_masks_are_weight_masks_of_the_entries_shapes():
    mask = largest_weights(STATE, ["w"], 0.2)
    assert isinstance(mask, WeightMask)
    assert mask.counts() == {"w": 2}
