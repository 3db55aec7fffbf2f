"""Messages: lossless, counted to the byte, and hostile bytes end in one kind of error."""

from dataclasses import replace

import pytest
import torch

import sparsekit_fl as fl
from sparsekit.graph import UnitMask, WeightMask
from sparsekit_fl.client.messages import (
    Reply,
    Request,
    Update,
    WorkCost,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    request_bytes,
    update_bytes,
)
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import tiny_config, tiny_problem


@pytest.fixture(scope="module")
def spec():
    return RunSpec.build(fl.Method(), tiny_problem(), tiny_config())


MASKS = {
    "none": None,
    "unit": UnitMask({"first": torch.tensor([True, False, True, True, False, False, True, True])}),
    "weight": WeightMask({"last.weight": torch.arange(24).view(3, 8) % 3 == 0}),
}


def make_update(spec, mask, scoring=0):
    return Update(
        round=3,
        client_id=5,
        examples=17,
        delta=Kept(spec.graph, mask).gather_all(spec.initial),
        mask=mask,
        ratio=0.1 + 0.2,
        extra={"x": torch.tensor([1, 2])},
        metrics={"loss": 1 / 3, "accuracy": 0.5},
        cost=WorkCost(
            flops=10**15 + 1,
            uplink_bytes=5,
            seconds=0.1,
            wall_seconds=1e-9,
            flops_scoring=scoring,
            scoring_seconds=scoring / fl.Capability().flops_per_second,
        ),
    )


def sent(update):
    return encode_reply(Reply(client_id=5, update=update))


@pytest.mark.parametrize("name", MASKS)
def test_an_update_survives_the_wire_and_its_bytes_are_counted_exactly_whatever_its_cost(spec, name):
    update = make_update(spec, MASKS[name], scoring=7 if name == "unit" else 0)
    again = decode_reply(sent(update), Request(round=3, client_id=5, state={}), spec.graph).update
    assert (again.round, again.client_id, again.examples, again.ratio) == (3, 5, 17, 0.1 + 0.2)
    assert again.mask == update.mask
    assert again.metrics == update.metrics
    assert again.cost == update.cost
    assert torch.equal(again.extra["x"], update.extra["x"])
    assert sorted(again.delta) == sorted(update.delta)
    assert all(torch.equal(again.delta[key], update.delta[key]) for key in update.delta)
    scoring = update.cost.flops_scoring
    for cost in (
        WorkCost(flops_scoring=scoring),
        WorkCost(flops=10**17, uplink_bytes=123, seconds=1 / 3, flops_scoring=scoring),
    ):
        other = replace(update, cost=cost)
        assert update_bytes(other) == update_bytes(update)
        # What is counted leaves out what a reply says beside its update.
        assert update_bytes(update) < len(sent(other)) == len(sent(update)) < update_bytes(update) + 150


@pytest.mark.parametrize("name", MASKS)
def test_a_request_carries_what_its_mask_keeps(spec, name):
    mask = MASKS[name]
    request = Request(
        round=2,
        client_id=1,
        state=spec.initial,
        mask=mask,
        ratio=0.3,
        extra={"y": torch.ones(2)},
        capability=fl.Capability(0.25),
    )
    payload = encode_request(request, spec.graph)
    # What is counted leaves out which task it is, and where the client's memory is.
    assert request_bytes(request, spec.graph) < len(payload) < request_bytes(request, spec.graph) + 120
    again = decode_request(payload, spec.graph)
    assert (again.round, again.client_id, again.ratio, again.mask) == (2, 1, 0.3, mask)
    assert again.capability == fl.Capability(0.25)
    kept = Kept(spec.graph, mask)
    for key, tensor in spec.initial.items():
        assert torch.equal(kept.gather(key, again.state[key]), kept.gather(key, tensor))
    if mask is not None:
        assert len(payload) < request_bytes(Request(round=2, client_id=1, state=spec.initial), spec.graph) + 600
