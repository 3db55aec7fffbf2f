"""Policies together: masks of units and entries, masks from the server, private entries, own models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from personal import watched

import sparsekit_fl as fl
from sparsekit import criteria, load_compact, load_mask, trace_units
from sparsekit.allocation import select
from sparsekit.criteria import View
from sparsekit.graph import UnitMask, WeightMask
from sparsekit_fl import policies
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
