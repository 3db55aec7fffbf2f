"""Messages and the server: lossless, counted to the byte, also in bfloat16; a bad update is refused and changes nothing."""

import math
from dataclasses import replace

import pytest
import torch
from personal import watched

import sparsekit_fl as fl
from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit_fl.client.messages import decode_reply, decode_request, encode_reply, encode_request, request_bytes, update_bytes
from sparsekit_fl.methods import registry
from sparsekit_fl.packing import Kept, digest
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec, by_id
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


class Masked(fl.Method):
    def assign(self, server, client_id):
        return fl.Task(partial=True)


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
    "a negative cost": (field(cost=fl.Cost(flops=-1)), "a cost that is negative"),
    "work that nobody asked for": (field(cost=fl.Cost(flops=10**9)), r"reports 1e\+09 FLOPs, and .* Task\(work=...\)"),
    "paper's work that nobody asked for": (field(cost=fl.Cost(flops_paper=10**9)), r"reports 1e\+09 FLOPs"),
    "seconds without end": (field(cost=fl.Cost(simulated_seconds=math.inf)), "without end"),
    "seconds that are none": (field(cost=fl.Cost(wall_seconds=math.nan)), "without end"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_update_is_refused_and_a_good_one_counts(server, name):
    spoil, message = FAULTS[name]
    server.state.model["first.bias"] = LARGEST.repeat(8)
    ctx = server.context(1)
    first, second, *_ = server.requests(ctx)
    before = digest(server.state.model)
    with pytest.raises(fl.errors.UpdateError, match=message):
        server.validate(ctx, first, reply(spoil(good(server, first))))
    assert digest(server.state.model) == before
    server.aggregate(ctx, [server.validate(ctx, second, reply(good(server, second)))])
    assert digest(server.state.model) != before


NAMES = 1500
"""What names, shapes and numbers of a tiny model's message take at most."""

MASKS = {
    "none": None,
    "unit": UnitMask({"first": torch.tensor([True, False, True, True, False, False, True, True])}),
    "weight": WeightMask({"last.weight": torch.arange(24).view(3, 8) % 3 == 0}),
}


@pytest.mark.parametrize("name", MASKS)
def test_an_update_survives_the_wire_and_the_bytes_of_its_tensors_are_counted(spec, name):
    update = fl.Update(
        round=3,
        client_id=5,
        examples=17,
        delta=Kept(spec.graph, MASKS[name]).gather_all(spec.initial),
        mask=MASKS[name],
        ratio=0.1 + 0.2,
        extra={"x": torch.tensor([1, 2])},
        metrics={"loss": 1 / 3, "accuracy": 0.5},
        cost=fl.Cost(flops=10**15 + 1, flops_scoring=7, flops_paper=5, wall_seconds=1e-9),
    )
    again = decode_reply(encode_reply(reply(update)), fl.Request(round=3, client_id=5, state={}), spec.graph).update
    for one in ("round", "client_id", "examples", "ratio", "mask", "metrics", "cost"):
        assert getattr(again, one) == getattr(update, one), one
    assert torch.equal(again.extra["x"], update.extra["x"])
    assert sorted(again.delta) == sorted(update.delta)
    assert all(torch.equal(again.delta[key], update.delta[key]) for key in update.delta)
    assert update_bytes(update) < len(encode_reply(reply(update))) < update_bytes(update) + NAMES
    one = encode_reply(reply(replace(update, cost=fl.Cost(uplink_bytes=1, downlink_bytes=1, simulated_seconds=9.0))))
    assert decode_reply(one, fl.Request(round=3, client_id=5, state={}), spec.graph).update.cost == fl.Cost(), "not believed"


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
    assert request_bytes(request, spec.graph) < len(payload) < request_bytes(request, spec.graph) + NAMES
    again = decode_request(payload, spec.graph)
    assert (again.round, again.client_id, again.ratio, again.mask) == (2, 1, 0.3, mask)
    assert again.capability == fl.Capability(0.25)
    kept = Kept(spec.graph, mask)
    for key, tensor in spec.initial.items():
        assert torch.equal(kept.gather(key, again.state[key]), kept.gather(key, tensor))
    if mask is not None:
        assert request_bytes(request, spec.graph) < request_bytes(replace(request, mask=None), spec.graph)


def test_a_change_in_the_type_that_was_not_asked_for_is_refused(spec):
    server = Server(replace(spec, config=replace(spec.config, upload="bfloat16")), by_id(tiny_clients()))
    ctx = server.context(1)
    first, *_ = server.requests(ctx)
    with pytest.raises(fl.errors.UpdateError, match=r"as torch\.float32"):
        server.validate(ctx, first, reply(good(server, first)))


ROUNDED = replace(tiny_config(), upload="bfloat16")


@pytest.mark.parametrize("method", ["fedavg", "fedlps", "cs"])
@pytest.mark.same_bits
def test_bytes_up_are_counted_as_sent_and_the_changes_take_half(method):
    plain, rounded = (watched(registry[method](), config=replace(config, rounds=1))[1] for config in (tiny_config(), ROUNDED))
    for before, after in zip(plain, rounded, strict=True):
        floats = sum(t.numel() for t in before.delta.values() if t.is_floating_point())
        assert update_bytes(before) - update_bytes(after) == 2 * floats
        for name, delta in before.delta.items():
            expected = delta.to(torch.bfloat16) if delta.is_floating_point() else delta
            assert torch.equal(after.delta[name], expected)
            assert after.delta[name].dtype == expected.dtype


@pytest.mark.parametrize(("method", "warns"), [("heterofl", True), ("fedlps", True), ("depthfl", True), ("fedavg", False)])
def test_a_method_that_goes_by_capability_says_so_where_every_device_is_a_full_one(method, warns, caplog):
    equal = [replace(client, capability=fl.Capability()) for client in tiny_clients()]
    config = replace(tiny_config(), capability_levels=None)
    for clients, given, expected in ((equal, config, warns), (tiny_clients(), config, False), (equal, tiny_config(), False)):
        caplog.clear()
        made = Server(RunSpec.build(registry[method](), tiny_problem(), given), by_id(clients))
        made.requests(made.context(1))
        assert ("Draw them from levels" in caplog.text) == expected
        assert made.note.startswith("Every client has the full capability") == expected


def test_bytes_and_seconds_are_the_servers_own_whatever_a_client_says(server):
    first, *_ = server.requests(server.context(1))
    lies = fl.Cost(uplink_bytes=1, downlink_bytes=2, simulated_seconds=1e9, simulated_seconds_scoring=3.0)
    honest, lying = (server.priced(first, reply(good(server, first, cost=cost))).update.cost for cost in (fl.Cost(), lies))
    assert honest == lying
    assert (honest.uplink_bytes, honest.downlink_bytes) == (sum(tensor.nbytes for tensor in first.state.values()),) * 2
    assert honest.simulated_seconds > 0, "also of a client that says that it did nothing"
