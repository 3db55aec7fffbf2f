"""The server: a bad update is refused with its reason and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit.graph.state import digest
from sparsekit_fl.client.messages import Update, WorkCost
from sparsekit_fl.engines.spec import RunSpec, by_id
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import Mean, SamplingPolicy
from sparsekit_fl.server.server import Server
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


@pytest.fixture(scope="module")
def spec():
    return RunSpec.build(Method(name="m", source="", aggregate=Mean(over="all")), tiny_problem(), tiny_config())


@pytest.fixture
def server(spec):
    return Server(spec, by_id(tiny_clients()))


def good(server, assignment, **other):
    examples = len(server._clients[assignment.client_id].data.train)
    delta = {name: torch.ones_like(tensor) for name, tensor in assignment.state.items()}
    return Update(
        **{"round": assignment.round, "client_id": assignment.client_id, "examples": examples, "delta": delta, **other}
    )


def changed(update, name, tensor):
    return replace(update, delta={**update.delta, name: tensor})


HALF = UnitMask({"first": torch.tensor([True] * 4 + [False] * 4)})
FAULTS = {
    "another round": (lambda u: replace(u, round=7), "is for round 7, expected round 1"),
    "a stranger": (lambda u: replace(u, client_id=99), "client 99 has no assignment"),
    "a million examples": (lambda u: replace(u, examples=10**6), "claims 1000000 training examples"),
    "no examples": (lambda u: replace(u, examples=0), "claims 0 training examples"),
    "a missing key": (lambda u: replace(u, delta={"first.bias": u.delta["first.bias"]}), "missing or unknown"),
    "an unknown key": (lambda u: changed(u, "evil", torch.ones(1)), "missing or unknown: .'evil'"),
    "a wrong shape": (lambda u: changed(u, "first.bias", torch.ones(9)), r"'first.bias' as torch.float32 \(9,\), expected"),
    "a wrong dtype": (lambda u: changed(u, "first.bias", torch.ones(8).double()), "torch.float64"),
    "not a number": (lambda u: changed(u, "first.bias", torch.full((8,), float("nan"))), "'first.bias' that are not finite"),
    "infinity in extra": (lambda u: replace(u, extra={"x": torch.tensor([float("inf")])}), "'x' that are not finite"),
    "loss is nan": (lambda u: replace(u, metrics={"loss": float("nan")}), "reports loss = nan"),
    "a ratio of two": (lambda u: replace(u, ratio=2.0), "wrong ratio or mask"),
    "a mask of another size": (
        lambda u: replace(u, mask=UnitMask({"first": torch.ones(9, dtype=torch.bool)})),
        "wrong ratio or",
    ),
    "an empty mask": (lambda u: replace(u, mask=UnitMask({"first": torch.zeros(8, dtype=torch.bool)})), "keeps no unit"),
    "dense under a mask": (lambda u: replace(u, mask=HALF), r"expected torch.float32 \(4, 6\)"),
    "a weight mask of an unknown key": (
        lambda u: replace(u, mask=WeightMask({"x": torch.ones(1).bool()})),
        "wrong ratio or mask",
    ),
    "a negative cost": (lambda u: replace(u, cost=WorkCost(flops_compact=-1)), "negative cost"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.same_bits
def test_a_bad_update_is_refused_and_the_rest_counts(server, name):
    spoil, message = FAULTS[name]
    first, second, *_ = server.assign(1)
    alone = Server(server.spec, by_id(tiny_clients()))
    alone.assign(1)
    alone.aggregate([good(alone, second)])
    aggregated = server.aggregate([spoil(good(server, first)), good(server, second)])
    assert [update.client_id for update in aggregated.updates] == [second.client_id]
    ((_, error),) = aggregated.refused
    with pytest.raises(type(error), match=message):
        raise error
    assert digest(server.state.state) == digest(alone.state.state)


def test_what_is_said_of_a_bad_update_does_not_depend_on_the_order_of_its_entries(server):
    (first, *_) = server.assign(1)
    update = good(server, first)
    bad = {
        name: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor
        for name, tensor in update.delta.items()
    }
    reasons = []
    for names in (list(bad), list(reversed(bad))):
        extra = {name: torch.ones(1) for name in names}
        aggregated = server.aggregate([replace(update, delta={name: bad[name] for name in names}, extra=extra)])
        reasons += [str(error) for _, error in aggregated.refused]
    assert len(reasons) == 2
    assert reasons[0] == reasons[1]


def test_without_a_valid_update_nothing_changes(server):
    first, *_ = server.assign(1)
    before = digest(server.state.state)
    aggregated = server.aggregate([replace(good(server, first), round=5)])
    assert aggregated.updates == ()
    assert digest(server.state.state) == before
    assert server.state.round == 0


def test_assignments_depend_on_seed_and_round_alone(spec):
    clients = by_id(tiny_clients())
    one, other = Server(spec, clients), Server(spec, clients)
    one.assign(1)
    assert [(a.client_id, a.capability) for a in one.assign(5)] == [(a.client_id, a.capability) for a in other.assign(5)]
    cohorts = {tuple(a.client_id for a in one.assign(round)) for round in range(1, 9)}
    assert len(cohorts) > 3


@dataclass(frozen=True)
class Late(SamplingPolicy):
    """Holds every update back for a round."""

    def arrivals(self, ctx, updates):
        kept = ctx.memory.get("late", [])
        ctx.memory["late"] = [{"delta": dict(u.delta), "client": u.client_id, "examples": u.examples} for u in updates]
        return [(Update(round=ctx.round - 1, client_id=k["client"], examples=k["examples"], delta=k["delta"]), 1) for k in kept]


def test_a_sampling_policy_may_keep_late_updates_for_the_next_round(spec):
    server = Server(replace(spec, method=replace(spec.method, sampling=Late())), by_id(tiny_clients()))
    before = server.state.state["first.bias"]
    server.aggregate([good(server, a) for a in server.assign(1)])
    assert torch.equal(server.state.state["first.bias"], before)
    server.aggregate([good(server, a) for a in server.assign(2)])
    assert torch.allclose(server.state.state["first.bias"], before + 1)
