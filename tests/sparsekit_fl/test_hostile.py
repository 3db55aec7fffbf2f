"""Hostile messages: whatever a client sends ends in the documented error, quickly, unpickles nothing, and moves no model."""

import json
import math
import pickle
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import join, mutated, split
from personal import Watching, tiny_run
from safetensors.torch import save

from sparsekit.errors import DataError
from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit_fl.client.messages import Cost, Evaluation, Reply, Request, Update, decode_reply, encode_reply
from sparsekit_fl.errors import ClientError, UpdateError
from sparsekit_fl.methods.base import Method, Task
from sparsekit_fl.packing import Kept, digest, pack
from sparsekit_fl.results import ClientScores, RoundRecord, RoundScores
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec, by_id
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


class Masked(Method):
    def assign(self, server, client_id):
        return Task(partial=True)


SETUP = RunSpec.build(Masked(), tiny_problem(), tiny_config())
CLIENTS = by_id(tiny_clients())
MASK = UnitMask({"first": torch.tensor([True, False, True, True, False, False, True, True])})


def honest(client_id, mask=MASK):
    return Update(
        round=1,
        client_id=client_id,
        examples=len(CLIENTS[client_id].data.train),
        delta={name: torch.ones_like(tensor) for name, tensor in Kept(SETUP.graph, mask).gather_all(SETUP.initial).items()},
        mask=mask,
        ratio=0.5,
        extra={"x": torch.tensor([1.0, 2.0])},
        metrics={"loss": 1.0, "accuracy": 0.5},
        cost=Cost(flops=10, uplink_bytes=10, simulated_seconds=1.0),
    )


REQUEST = Request(round=1, client_id=0, state=SETUP.initial)


def sent(update):
    return encode_reply(Reply(client_id=0, update=update))


PLAIN = sent(honest(0, None))
MASKED = sent(honest(0))
BY_ENTRY = sent(honest(0, WeightMask({"last.weight": torch.arange(24).view(3, 8) % 3 == 0})))


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize(
    "original",
    [pytest.param(PLAIN, marks=pytest.mark.slow), MASKED, pytest.param(BY_ENTRY, marks=pytest.mark.slow)],
    ids=["whole", "units", "entries"],
)
def test_no_bytes_crash_the_decoder_or_move_the_model_beyond_a_valid_update(original):
    before = digest(SETUP.initial)
    counts = {"unreadable": 0, "refused": 0, "valid": 0}

    rng = np.random.default_rng(0)
    for _ in range(600):
        try:
            reply = decode_reply(mutated(original, rng), REQUEST, SETUP.graph)
        except DataError:
            counts["unreadable"] += 1
            continue
        server = Server(SETUP, CLIENTS)
        ctx = server.context(1)
        server.requests(ctx)
        try:
            valid = server.validate(ctx, REQUEST, server.priced(REQUEST, reply))
        except (ClientError, UpdateError):
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


def meta_payload(**changes):
    header, body = split(MASKED)
    header["__metadata__"]["meta"] = json.dumps({**json.loads(header["__metadata__"]["meta"]), **changes})
    return join(header, body)


BOMBS = {
    "a mask of a terabyte in ten bytes": meta_payload(mask={"kind": "weight", "shapes": [["first.weight", [10**6, 10**6], 0]]}),
    "a mask of another shape": meta_payload(mask={"kind": "unit", "shapes": [["first", [10**9]]]}),
    "a round without end": meta_payload(round=math.inf),
    "metrics that are no names": meta_payload(metrics=[["loss"], {}]),
    "metrics that are no numbers": meta_payload(metrics={"loss": "many"}),
    "a header longer than the message": (2**40).to_bytes(8, "little") + MASKED[8:],
    "nested JSON": join({"__metadata__": {"meta": "[" * 10**5}}, b""),
    "nested header": join(b'{"a":' * 10**5, b""),
    "a pickle": pickle.dumps({"delta": [1, 2, 3]}),
    "a file of torch": b"PK\x03\x04" + b"\x00" * 200,
    "no metadata": save({"delta:x": torch.ones(3)}),
    "metadata that is a list": pack({}, {}).replace(b'"meta":"{}"', b'"meta":"[]"'),
    "no reply": pack({}, {}),
    "costs of another form": meta_payload(cost=[1, 2]),
    "FLOPs without end": meta_payload(cost={"flops": 10**400, "flops_scoring": 0, "flops_paper": 0, "wall_seconds": 0.0}),
    "negative FLOPs": meta_payload(cost={"flops": -1, "flops_scoring": 0, "flops_paper": 0, "wall_seconds": 0.0}),
    "nothing": b"",
}


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_without_room_being_made_for_it(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError):
        decode_reply(BOMBS[name], REQUEST, SETUP.graph)
    # In KiB on Linux: no more than a few MiB were needed.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@given(st.lists(st.floats(), min_size=1, max_size=5), st.lists(st.sampled_from([0.0, 1.0, 3.5, 1e308]), min_size=5, max_size=5))
@example([math.inf, -math.inf], [1.0] * 5)
@example([1.7e308, 1.7e308], [1.0] * 5)
def test_no_scores_that_clients_send_stop_a_run(sums, weights):
    evaluations = [
        Evaluation(client_id=id, examples=1, personal={"loss": pair}, validation={"loss": pair}, shared={"loss": pair})
        for id, pair in enumerate(zip(sums, weights, strict=False))
    ]
    scores = RoundScores.of([ClientScores.read(one, {"accuracy", "loss"}) for one in evaluations], lower={"loss"})
    record = RoundRecord(round=1, cohort=(), cost=Cost(), seconds=0.0, evaluation=scores)
    json.dumps(record.to_dict(), allow_nan=False)


def invented(request, reply):
    """Client 0 scores itself by metrics that nobody asked for."""
    if reply.evaluation is not None and request.client_id == 0:
        more = {f"m{number}": (1.0, 1.0) for number in range(1000)}
        scores = {part: {**getattr(reply.evaluation, part), **more} for part in ("personal", "validation")}
        reply = replace(reply, evaluation=replace(reply.evaluation, **scores, shared=scores["personal"]))
    return decode_reply(encode_reply(reply), request, SETUP.graph)


def test_metrics_that_the_problem_does_not_have_enter_no_record_and_no_table(tmp_path):
    result = tiny_run(engine=Watching(change=invented), rounds=2, out=tmp_path)
    names = {"accuracy", "loss"}
    for scores in (
        *(record.evaluation for record in result.rounds if record.evaluation),
        result.final,
        *result.final.per_client,
    ):
        assert set(scores.personal) == set(scores.validation) == set(scores.shared or names) == names
    for name in ("rounds.jsonl", "result.json"):
        assert "m999" not in (tmp_path / name).read_text()
