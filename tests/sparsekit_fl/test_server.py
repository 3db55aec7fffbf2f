"""Messages and the server: lossless and counted to the byte; a bad message ends in its documented error and moves no model."""

import json
import math
import pickle
import resource
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import join, mutated, split
from personal import Watching, problem_of, tiny_clients, tiny_config, tiny_problem, tiny_run, watched
from safetensors.torch import save

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client.messages import (
    PARTS,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    request_bytes,
    update_bytes,
)
from sparsekit_fl.methods import registry
from sparsekit_fl.packing import Kept, digest, pack, unpack
from sparsekit_fl.results import ClientScores, RoundScores
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec, answer, by_id


class Masked(fl.Method):
    def assign(self, server, client_id):
        return fl.Task(own_mask=True)


SPEC = RunSpec.build(Masked(), tiny_problem(), tiny_config())
CLIENTS = by_id(tiny_clients())
REQUEST = fl.Request(round=1, client_id=0, state=SPEC.initial, own_mask=True)
MASKS = {
    "none": None,
    "unit": UnitMask({"first": torch.tensor([True, False, True, True, False, False, True, True])}),
    "weight": WeightMask({"last.weight": torch.arange(24).view(3, 8) % 3 == 0}),
}
NAMES = 1500
"""What names, shapes and numbers of a tiny model's message take at most."""


@pytest.fixture
def server():
    return Server(SPEC, CLIENTS)


def good(request=REQUEST, *, mask=None, **changes):
    """A valid update; all its changes are 1."""
    examples = len(CLIENTS[request.client_id].data.train)
    delta = {name: torch.ones_like(tensor) for name, tensor in Kept(SPEC.graph, mask).gather_all(request.state).items()}
    own = {"round": request.round, "client_id": request.client_id, "examples": examples, "delta": delta, "mask": mask}
    return fl.Update(**own | changes)


def reply(update):
    return fl.Reply(client_id=update.client_id, update=update)


def full(mask):
    """With a value in every field."""
    metrics, extra = {"loss": 1 / 3, "accuracy": 0.5}, {"x": torch.tensor([1.0, 2.0])}
    cost = fl.Cost(flops=10**15 + 1, flops_scoring=7, flops_paper=5, wall_seconds=1e-9)
    return good(mask=mask, ratio=0.1 + 0.2, extra=extra, metrics=metrics, cost=cost)


def entry(name, tensor):
    """A fault that puts a tensor into the change."""
    return lambda update: replace(update, delta={**update.delta, name: tensor})


def field(**changes):
    return lambda update: replace(update, **changes)


LARGEST = torch.tensor(3e38)
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
    "dense under a mask": (field(mask=MASKS["unit"]), r"expected torch.float32 \(5, 6\)"),
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
        server.validate(ctx, first, reply(spoil(good(first))))
    assert digest(server.state.model) == before
    server.aggregate(ctx, [server.validate(ctx, second, reply(good(second)))])
    assert digest(server.state.model) != before


def under(update, graph, state, mask):
    """An update with a mask that it may not have, and all entries of that mask."""
    kept = Kept(graph, mask)
    return replace(update, mask=mask, delta={name: torch.zeros_like(kept.gather(name, one)) for name, one in state.items()})


@pytest.mark.parametrize("name", sorted(registry))
def test_what_the_server_decided_is_not_a_claim_of_a_client(name, tmp_path):
    """With another mask or ratio, an update is refused; or, where clients choose, the server computes what is on record."""
    spec = RunSpec.build(registry[name](), problem_of(registry[name]()), replace(tiny_config(), capability_levels=(0.5,)))
    server, memories = Server(spec, CLIENTS), Memories(tmp_path, durable=False)
    ctx = server.context(1)
    for request in server.requests(ctx):
        task, honest = ctx.tasks[request.client_id], answer(spec, CLIENTS[request.client_id], request, memories)
        update, says = honest.update, partial(server.validate, ctx, request)
        good = says(honest)
        assert 0 < good.share <= 1
        full, first = (
            UnitMask.full(spec.graph),
            {name: torch.arange(group.size) < 1 for name, group in spec.graph.groups.items()},
        )
        others = [one for one in (None, full, UnitMask(first)) if one != task.mask]
        if not task.own_mask:
            for lie in (replace(update, ratio=0.99), *(under(update, spec.graph, ctx.state, one) for one in others)):
                with pytest.raises(fl.errors.UpdateError, match=r"has (another mask than|the ratio 0\.99, )"):
                    says(reply(lie))
            continue
        assert says(reply(replace(update, ratio=0.99))).share <= max(good.share, 0.5)
        if task.ratio < 1 and isinstance(update.mask, UnitMask):
            assert says(reply(under(update, spec.graph, ctx.state, UnitMask(first)))).share <= good.share
            with pytest.raises(fl.errors.UpdateError, match="has 1 of the model, its task"):
                says(reply(under(update, spec.graph, ctx.state, full)))


@pytest.mark.parametrize("name", MASKS)
def test_an_update_survives_the_wire_and_the_bytes_of_its_tensors_are_counted(name):
    update = full(MASKS[name])
    again = decode_reply(encode_reply(reply(update)), REQUEST, SPEC.graph).update
    for one in ("round", "client_id", "examples", "ratio", "mask", "metrics", "cost"):
        assert getattr(again, one) == getattr(update, one), one
    assert torch.equal(again.extra["x"], update.extra["x"])
    assert sorted(again.delta) == sorted(update.delta)
    assert all(torch.equal(again.delta[key], update.delta[key]) for key in update.delta)
    assert update_bytes(update) < len(encode_reply(reply(update))) < update_bytes(update) + NAMES
    one = encode_reply(reply(replace(update, cost=fl.Cost(uplink_bytes=1, downlink_bytes=1, simulated_seconds=9.0))))
    assert decode_reply(one, REQUEST, SPEC.graph).update.cost == fl.Cost(), "not believed"


@pytest.mark.parametrize("name", MASKS)
def test_a_request_carries_what_its_mask_keeps(name):
    mask, capability = MASKS[name], fl.Capability(0.25)
    request = replace(REQUEST, mask=mask, ratio=0.3, extra={"y": torch.ones(2)}, capability=capability)
    payload = encode_request(request, SPEC.graph)
    assert request_bytes(request, SPEC.graph) < len(payload) < request_bytes(request, SPEC.graph) + NAMES
    again = decode_request(payload, SPEC.graph)
    assert (again.round, again.client_id, again.ratio, again.mask, again.capability) == (1, 0, 0.3, mask, capability)
    kept = Kept(SPEC.graph, mask)
    for key, tensor in SPEC.initial.items():
        assert torch.equal(kept.gather(key, again.state[key]), kept.gather(key, tensor))
    if mask is not None:
        assert request_bytes(request, SPEC.graph) < request_bytes(replace(request, mask=None), SPEC.graph)


ROUNDED = replace(tiny_config(), upload="bfloat16")


def test_a_change_in_the_type_that_was_not_asked_for_is_refused():
    server = Server(replace(SPEC, config=ROUNDED), CLIENTS)
    ctx = server.context(1)
    first, *_ = server.requests(ctx)
    with pytest.raises(fl.errors.UpdateError, match=r"as torch\.float32"):
        server.validate(ctx, first, reply(good(first)))


@pytest.mark.parametrize("method", ["fedavg", "fedlps", "cs"])
@pytest.mark.same_bits
def test_bytes_up_are_counted_as_sent_and_the_changes_take_half(method):
    plain, rounded = (watched(method, config=replace(config, rounds=1))[1] for config in (tiny_config(), ROUNDED))
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
    drawn = tiny_config().capability_levels
    for clients, levels, expected in ((equal, None, warns), (tiny_clients(), None, False), (equal, drawn, False)):
        caplog.clear()
        notes = tiny_run(method, rounds=1, clients=clients, capability_levels=levels).note.splitlines()
        assert ("Draw them from levels" in caplog.text) == expected
        assert any(note.startswith("Every client has the full capability") for note in notes) == expected
        assert registry[method].note in (*notes, "")


class Wide(torch.nn.Sequential):
    """Two groups of a group norm: the least submodel is one of them."""

    def __init__(self):
        super().__init__(torch.nn.Linear(6, 8), torch.nn.GroupNorm(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("method", ["heterofl", "fedlps", "fjord"])
def test_what_ran_is_on_record_and_devices_that_are_too_small_are_noted_once_or_skipped(method, caplog):
    problem = fl.Problem(model=Wide, example_inputs=(torch.zeros(2, 6),))
    clients = [
        replace(one, capability=fl.Capability(ratio))
        for one, ratio in zip(tiny_clients(4), (1.0, 1.0, 1 / 8, 1 / 16), strict=True)
    ]
    given = {"problem": problem, "clients": clients, "capability_levels": None, "rounds": 2}
    result, updates = watched(method, **given)
    costs = RunSpec.build(fl.Method(), problem, tiny_config()).costs
    for record in result.rounds:
        for update in (one for one in updates if one.round == record.round):
            ran = costs.forward_flops(update.mask) / costs.forward_flops(None)
            assert record.ratios[update.client_id] == pytest.approx(ran)
        assert record.ratios[2] == record.ratios[3] > 0.4
    note = "The least submodel has 0.5 of the FLOPs; 2 of 4 clients can train 0.062 to 0.12 only, and train that"
    assert note in result.note
    assert caplog.text.count("uses the capabilities of clients") == 1
    skipped = tiny_run(method, too_small="skip", **given)
    assert [one.cohort for one in skipped.rounds] == [(0, 1)] * 2
    assert all("clients 2-3 are too small, and were not asked" in one.notes for one in skipped.rounds)
    assert "are not asked" in skipped.note
    with pytest.raises(InvalidValueError, match="too_small='note'"):
        tiny_run(method, **given | {"clients": clients[2:]}, cohort=2, too_small="skip")


def test_bytes_and_seconds_are_the_servers_own_whatever_a_client_says(server):
    first, *_ = server.requests(server.context(1))
    lies = fl.Cost(uplink_bytes=1, downlink_bytes=2, simulated_seconds=1e9, simulated_seconds_scoring=3.0)
    honest, lying = (server.priced(first, reply(good(first, cost=cost))).update.cost for cost in (fl.Cost(), lies))
    assert honest == lying
    assert (honest.uplink_bytes, honest.downlink_bytes) == (sum(tensor.nbytes for tensor in first.state.values()),) * 2
    assert honest.simulated_seconds > 0, "also of a client that says that it did nothing"


WHOLE, BY_UNIT, BY_ENTRY = (encode_reply(reply(replace(full(mask), cost=fl.Cost(flops=10)))) for mask in MASKS.values())


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize(
    "original",
    [pytest.param(WHOLE, marks=pytest.mark.slow), BY_UNIT, pytest.param(BY_ENTRY, marks=pytest.mark.slow)],
    ids=["whole", "units", "entries"],
)
def test_no_bytes_crash_the_decoder_or_move_the_model_beyond_a_valid_update(original):
    before, rng = digest(SPEC.initial), np.random.default_rng(0)
    counts = {"unreadable": 0, "refused": 0, "valid": 0}
    for _ in range(600):
        try:
            found = decode_reply(mutated(original, rng), REQUEST, SPEC.graph)
        except DataError:
            counts["unreadable"] += 1
            continue
        server = Server(SPEC, CLIENTS)
        ctx = server.context(1)
        server.requests(ctx)
        try:
            valid = server.validate(ctx, REQUEST, server.priced(REQUEST, found))
        except (fl.errors.ClientError, fl.errors.UpdateError):
            counts["refused"] += 1
            assert digest(server.state.model) == before
            assert server.state.memory.get("aggregate", {}) == {}
            continue
        # What is left valid after a mutation is an update as a client may send it: right shapes, finite numbers.
        counts["valid"] += 1
        server.aggregate(ctx, [valid])
        assert all(bool(torch.isfinite(tensor).all()) for tensor in server.state.model.values())
    # The fuzzer reaches every gate; if it did not, it would prove nothing.
    assert min(counts.values()) > 5, counts


def told(**changes):
    """An update that says something else about itself."""
    value = unpack(BY_UNIT)
    value["update"] |= changes
    return pack(value)


def masked(name, shape, some):
    """An update whose mask has the bits of nine positions, and the description of another one."""
    header, body = split(told(mask=WeightMask({"first.weight": torch.ones(9) > 0})))
    text, before = header["__metadata__"]["value"], '["first.weight",[9],true]'
    assert before in text
    header["__metadata__"]["value"] = text.replace(before, json.dumps([name, shape, some]))
    return join(header, body)


BOMBS = {
    "a mask of a terabyte in ten bytes": masked("first.weight", [10**6, 10**6], False),
    "a mask of another shape": masked("first.weight", [10**9], True),
    "a round without end": told(round=math.inf),
    "metrics that are no names": told(metrics=[["loss"], {}]),
    "metrics that are no numbers": told(metrics={"loss": "many"}),
    "a header longer than the message": (2**40).to_bytes(8, "little") + BY_UNIT[8:],
    "nested JSON": join({"__metadata__": {"value": "[" * 10**5}}, b""),
    "nested header": join(b'{"a":' * 10**5, b""),
    "a pickle": pickle.dumps({"delta": [1, 2, 3]}),
    "a file of torch": b"PK\x03\x04" + b"\x00" * 200,
    "no metadata": save({"delta:x": torch.ones(3)}),
    "a list": pack([]),
    "no reply": pack({}),
    "a reply of nothing": pack(vars(fl.Reply(client_id=0))),
    "an unknown kind": join({"__metadata__": {"value": '{"set":[]}'}}, b""),
    "costs of another form": told(cost=[1, 2]),
    "FLOPs without end": told(cost={"flops": 10**400, "flops_scoring": 0, "flops_paper": 0, "wall_seconds": 0.0}),
    "negative FLOPs": told(cost={"flops": -1, "flops_scoring": 0, "flops_paper": 0, "wall_seconds": 0.0}),
    "nothing": b"",
}


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_without_room_being_made_for_it(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError):
        decode_reply(BOMBS[name], REQUEST, SPEC.graph)
    # In KiB on Linux: no more than a few MiB were needed.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@given(st.lists(st.floats(), min_size=1, max_size=5), st.lists(st.sampled_from([0.0, 1.0, 3.5, 1e308]), min_size=5, max_size=5))
@example([math.inf, -math.inf], [1.0] * 5)
@example([1.7e308, 1.7e308], [1.0] * 5)
def test_no_scores_that_clients_send_stop_a_run(sums, weights):
    evaluations = [
        fl.Evaluation(client_id=id, examples=1, scores={part: {"loss": pair} for part in PARTS})
        for id, pair in enumerate(zip(sums, weights, strict=False))
    ]
    scores = RoundScores.of([ClientScores.read(one, {"accuracy", "loss"}) for one in evaluations], lower={"loss"})
    record = fl.RoundRecord(round=1, cohort=(), cost=fl.Cost(), seconds=0.0, evaluation=scores)
    json.dumps(record.to_dict(), allow_nan=False)


def invented(request, answer):
    """Client 0 scores itself by metrics that nobody asked for."""
    if answer.evaluation is not None and request.client_id == 0:
        more = {f"m{number}": (1.0, 1.0) for number in range(1000)}
        scores = {part: {**answer.evaluation.scores["personal"], **more} for part in (*PARTS, "a part of its own")}
        answer = replace(answer, evaluation=replace(answer.evaluation, scores=scores))
    return decode_reply(encode_reply(answer), request, SPEC.graph)


def test_metrics_that_the_problem_does_not_have_enter_no_record_and_no_table(tmp_path):
    result, names = tiny_run(engine=Watching(change=invented), rounds=2, out=tmp_path), {"accuracy", "loss"}
    curve = [record.evaluation for record in result.rounds if record.evaluation]
    for scores in (*curve, result.final, *result.final.per_client):
        assert set(scores.personal) == set(scores.validation) == set(scores.shared or names) == names
    for name in ("rounds.jsonl", "result.json"):
        assert "m999" not in (tmp_path / name).read_text()
