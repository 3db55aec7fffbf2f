"""Messages and the server: lossless, counted to the byte, also in bfloat16; a bad update is refused and changes nothing."""

import math
from dataclasses import replace

import pytest
import torch
from personal import watched

import sparsekit_fl as fl
from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit_fl.client.messages import (
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    request_bytes,
    update_bytes,
)
from sparsekit_fl.client.packing import Kept, digest
from sparsekit_fl.methods import registry
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec, by_id
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


class Masked(fl.Method):
    masked = True


@pytest.fixture(scope="module")
def spec():
    return RunSpec.build(Masked(), tiny_problem(), tiny_config())


@pytest.fixture
def server(spec):
    return Server(spec, by_id(tiny_clients()))


def good(server, request, **other):
    examples = len(server.clients[request.client_id].data.train)
    delta = {name: torch.ones_like(tensor) for name, tensor in request.state.items()}
    return fl.Update(**{"round": request.round, "client_id": request.client_id, "examples": examples, "delta": delta, **other})


def reply(update):
    """The reply that brings an update."""
    return fl.Reply(client_id=update.client_id, update=update)


HALF = UnitMask({"first": torch.tensor([True] * 4 + [False] * 4)})
LARGEST = torch.tensor(3e38)


def entry(name, tensor):
    """A fault that puts a tensor into the change."""
    return lambda update: replace(update, delta={**update.delta, name: tensor})


def field(**changes):
    """A fault that replaces fields of the update."""
    return lambda update: replace(update, **changes)


FAULTS = {
    "another round": (field(round=7), "is for round 7, expected round 1"),
    "a stranger": (field(client_id=99), "the update of client 99 is for round 1, expected round 1 of client"),
    "a million examples": (field(examples=10**6), "claims 1000000 training examples"),
    "a missing key": (lambda u: replace(u, delta={"first.bias": u.delta["first.bias"]}), "missing or unknown"),
    "an unknown key": (entry("evil", torch.ones(1)), "missing or unknown: .'evil'"),
    "a wrong shape": (entry("first.bias", torch.ones(9)), r"'first.bias' as torch.float32 \(9,\), expected"),
    "a shorter dtype": (entry("first.bias", torch.ones(8).bfloat16()), "as torch.bfloat16"),
    "not a number": (entry("first.bias", torch.full((8,), math.nan)), "'first.bias' that are not finite"),
    "a model beyond floats": (entry("first.bias", LARGEST.repeat(8)), "beyond the largest"),
    "too large a count": (entry("norm.num_batches_tracked", torch.tensor(2**63 - 1)), "changes the integers"),
    "too small a count": (entry("norm.num_batches_tracked", torch.tensor(-(2**63))), "changes the integers"),
    "infinity in extra": (field(extra={"x": torch.tensor([math.inf])}), "'x' that are not finite"),
    "loss is nan": (field(metrics={"loss": math.nan}), "reports loss = nan"),
    "a ratio of two": (field(ratio=2.0), "wrong ratio or mask"),
    "a mask of another size": (field(mask=UnitMask({"first": torch.ones(9, dtype=torch.bool)})), "wrong ratio or"),
    "an empty mask": (field(mask=UnitMask({"first": torch.zeros(8, dtype=torch.bool)})), "keeps no unit"),
    "dense under a mask": (field(mask=HALF), r"expected torch.float32 \(4, 6\)"),
    "a weight mask of an unknown key": (field(mask=WeightMask({"x": torch.ones(1).bool()})), "wrong ratio or mask"),
    "a negative cost": (field(cost=fl.WorkCost(flops=-1)), "a cost that is negative"),
    "seconds without end": (field(cost=fl.WorkCost(seconds=math.inf)), "without end"),
    "seconds that are none": (field(cost=fl.WorkCost(wall_seconds=math.nan)), "without end"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_update_is_refused_and_a_good_one_counts(server, name):
    spoil, message = FAULTS[name]
    server.state.model["first.bias"] = LARGEST.repeat(8)
    first, second, *_ = server.requests(1)
    before = digest(server.state.model)
    with pytest.raises(fl.errors.UpdateError, match=message):
        server.validate(first, reply(spoil(good(server, first))))
    assert digest(server.state.model) == before
    server.aggregate([server.validate(second, reply(good(server, second)))])
    assert digest(server.state.model) != before


MASKS = {
    "none": None,
    "unit": UnitMask({"first": torch.tensor([True, False, True, True, False, False, True, True])}),
    "weight": WeightMask({"last.weight": torch.arange(24).view(3, 8) % 3 == 0}),
}


@pytest.mark.parametrize("name", MASKS)
def test_an_update_survives_the_wire_and_its_bytes_are_counted_exactly_whatever_its_cost(spec, name):
    scoring = 7 if name == "unit" else 0
    work = fl.WorkCost(
        flops=10**15 + 1,
        uplink_bytes=5,
        seconds=0.1,
        wall_seconds=1e-9,
        flops_scoring=scoring,
        scoring_seconds=scoring / fl.Capability().flops_per_second,
    )
    update = fl.Update(
        round=3,
        client_id=5,
        examples=17,
        delta=Kept(spec.graph, MASKS[name]).gather_all(spec.initial),
        mask=MASKS[name],
        ratio=0.1 + 0.2,
        extra={"x": torch.tensor([1, 2])},
        metrics={"loss": 1 / 3, "accuracy": 0.5},
        cost=work,
    )
    again = decode_reply(encode_reply(reply(update)), fl.Request(round=3, client_id=5, state={}), spec.graph).update
    for one in ("round", "client_id", "examples", "ratio", "mask", "metrics", "cost"):
        assert getattr(again, one) == getattr(update, one), one
    assert torch.equal(again.extra["x"], update.extra["x"])
    assert sorted(again.delta) == sorted(update.delta)
    assert all(torch.equal(again.delta[key], update.delta[key]) for key in update.delta)
    size = len(encode_reply(reply(update)))
    assert update_bytes(update) < size < update_bytes(update) + 150, "what a reply says beside its update is not counted"
    for cost in (fl.WorkCost(), fl.WorkCost(flops=10**17, uplink_bytes=123, seconds=1 / 3)):
        other = replace(update, cost=replace(cost, flops_scoring=scoring))
        assert (update_bytes(other), len(encode_reply(reply(other)))) == (update_bytes(update), size)


@pytest.mark.parametrize("name", MASKS)
def test_a_request_carries_what_its_mask_keeps(spec, name):
    mask = MASKS[name]
    request = fl.Request(
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
        assert len(payload) < request_bytes(fl.Request(round=2, client_id=1, state=spec.initial), spec.graph) + 600


def test_a_change_in_the_type_that_was_not_asked_for_is_refused(spec):
    server = Server(replace(spec, config=replace(spec.config, upload="bfloat16")), by_id(tiny_clients()))
    first, *_ = server.requests(1)
    with pytest.raises(fl.errors.UpdateError, match=r"as torch\.float32"):
        server.validate(first, reply(good(server, first)))


ROUNDED = replace(tiny_config(), upload="bfloat16")


@pytest.mark.parametrize("method", ["fedavg", "fedlps", "cs"])
@pytest.mark.same_bits
def test_bytes_up_are_counted_as_sent_and_the_changes_take_half(method):
    plain, rounded = (watched(registry[method](), config=replace(config, rounds=1))[1] for config in (tiny_config(), ROUNDED))
    for before, after in zip(plain, rounded, strict=True):
        assert after.cost.uplink_bytes == update_bytes(after)
        floats = sum(t.numel() for t in before.delta.values() if t.is_floating_point())
        # Two bytes less for each number; the header, which is padded to eight bytes, says "BF16" where it said "F32".
        assert 2 * floats - 64 <= before.cost.uplink_bytes - after.cost.uplink_bytes <= 2 * floats
        for name, delta in before.delta.items():
            expected = delta.to(torch.bfloat16) if delta.is_floating_point() else delta
            assert torch.equal(after.delta[name], expected)
            assert after.delta[name].dtype == expected.dtype


@pytest.mark.parametrize(("method", "warns"), [("heterofl", True), ("fedlps", True), ("depthfl", True), ("fedavg", False)])
def test_a_method_that_goes_by_capability_says_so_where_every_device_is_a_full_one(method, warns, caplog):
    equal = [replace(client, capability=fl.Capability()) for client in tiny_clients()]
    config = replace(tiny_config(), capability_levels=None)
    for clients, given, expected in (
        (equal, config, warns),
        (tiny_clients(), config, False),
        (equal, tiny_config(), False),
    ):
        caplog.clear()
        Server(RunSpec.build(registry[method](), tiny_problem(), given), by_id(clients)).requests(1)
        assert ("give levels to draw them from" in caplog.text) == expected
