"""Flower's wire format in this process: the same bits as the default engine, whatever happens to the replies."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from engine_contract import EngineContract, Failing
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from local_grid import Fault, InProcess, StillClock, gone, over_the_wire, planted, task_of
from personal import chain, tiny_run

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.client.messages import encode_reply
from sparsekit_fl.flower.engine import content, read
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.whole_models import Local
from sparsekit_fl.packing import pack, unpack
from sparsekit_fl.testing import tiny_clients, tiny_config


class TestInProcess(EngineContract):
    @pytest.fixture
    def engine(self):
        return InProcess()


class TestDevices(EngineContract):
    @pytest.fixture
    def engine(self):
        return InProcess(nodes=3, devices=True, twice=True)


def _run(engine=None, method=None, rounds=2):
    return tiny_run(method or fl.Method(), rounds=rounds, engine=engine)


def _changed(**changes):
    """A fault that changes what the first reply of an answer says of itself."""

    def fault(message, answer):
        _, (payload, *others) = read(answer)
        tensors, meta = unpack(payload)
        return Message(content(pack(tensors, {**meta, **changes}), *others), reply_to=message)

    return fault


def _answered(*parts):
    return lambda message, answer: Message(content(*parts), reply_to=message)


def _failed(message, reason):
    return Message(Error(code=2, reason=reason), reply_to=message)


FAULTS: dict[str, tuple[Fault, str]] = {
    "no reply": (lambda message, answer: None, "no reply within"),
    "an error of Flower": (gone, "node unavailable"),
    "bytes that are no update": (_answered(b"\x00" * 50), "its answer cannot be used"),
    "no replies": (_answered(), "0 replies to 1 requests"),
    "another update's round": (_changed(round=7), "round 7"),
    "another client's update": (_changed(client=7), "client 7"),
    "an error that ends a simulation": (lambda message, _: _failed(message, "ActorDiedError"), "ActorDiedError"),
    "a reason of a megabyte": (lambda message, _: _failed(message, "x" * 10**6), "xxxx"),
    "an error of a megabyte": (_answered(encode_reply(fl.Reply(client_id=0, error="x" * 10**6))), "xxxx"),
    "a million payloads": (_answered(*[b""] * 10**6), "1000000 replies to 1 requests"),
}


@functools.cache
def _without_its_victim():
    """A client of the first round, and the run where it fails by itself."""
    victim = _run().rounds[0].cohort[0]
    return victim, _run(method=Failing(clients=(victim,)))


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.same_bits
def test_a_faulty_reply_is_dropped_with_its_reason_and_the_round_goes_on_as_if_it_had_failed(name, monkeypatch):
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", StillClock())
    change, reason = FAULTS[name]
    victim, others = _without_its_victim()
    result = _run(InProcess(devices=True, fault=planted(change, clients=[victim]), timeout_seconds=30.0))
    record = result.rounds[0]
    assert [client_id for client_id, _ in record.dropped] == [victim]
    assert reason in record.dropped[0][1][:4000] == record.dropped[0][1]
    # What the victim was sent counts all the same.
    assert record.cost.downlink_bytes == _run().rounds[0].cost.downlink_bytes
    assert set(record.ratios) == set(record.cohort) - {victim}
    # The model is what the others alone make of it.
    assert result.final.state_sha256 == others.final.state_sha256


@pytest.mark.parametrize(("looks", "late"), [(40, False), (60, True)])
@pytest.mark.same_bits
def test_a_reply_counts_if_it_is_there_before_the_deadline_and_one_after_it_does_not(looks, late, monkeypatch):
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", StillClock())
    victim, others = _without_its_victim()

    def delay(message):
        task = task_of(message)
        return looks if (task["task"], task["client_id"]) == ("train", victim) else 0

    # The server looks 50 times a second.
    result = _run(InProcess(delay=delay, timeout_seconds=1.0))
    assert result.final.state_sha256 == (others if late else _run()).final.state_sha256
    assert [client_id for client_id, _ in result.rounds[0].dropped] == [victim] * late


KEEPS = Local()


def test_scores_that_say_they_are_of_another_client_are_not_believed():
    def borrowed(message, answer):
        tensors, meta = unpack(read(answer)[1][0])
        meta["reply"]["evaluation"]["client_id"] = 2
        return Message(content(pack(tensors, meta)), reply_to=message)

    result = _run(InProcess(fault=planted(borrowed, "score", clients=[1])))
    assert [client.id for client in result.final.per_client] == [0, 2, 3, 4, 5, 6, 7]
    assert "client 1 was not scored: its answer cannot be used: it sent the scores of client 2" in result.rounds[-1].notes


def test_a_memory_that_is_not_in_the_folder_of_the_run_ends_it():
    def elsewhere(message, answer):
        folder, asked = Path(read(message)[0]), task_of(message)
        (folder / f"{asked['client_id']}-{asked['round']}.state").unlink()
        return answer

    with pytest.raises(DataError, match="must be a folder that all machines share"):
        _run(InProcess(fault=planted(elsewhere)), method=KEEPS)


def test_a_process_of_the_simulation_that_died_ends_the_run():
    def killed(message, _):
        return Message(Error(code=0, reason="ray.exceptions.ActorDiedError: The actor died"), reply_to=message)

    with pytest.raises(fl.errors.WorkerDiedError, match=r"a process that trains clients failed.*round 0 of 2 was the last"):
        _run(InProcess(fault=planted(killed, times=1)))


def message(record):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return Message(record, 7, "train")


def raw(sizes):
    array = Array(dtype="uint8", shape=(3,), stype="sparsekit.raw", data=b"abc")
    return RecordDict({"about": ConfigRecord({"sizes": sizes, "run": ""}), "body": ArrayRecord({"body": array})})


FOREIGN = {
    "no records": RecordDict(),
    "an empty body": RecordDict({"about": raw([0])["about"], "body": ArrayRecord()}),
    "no sizes": RecordDict({"about": ConfigRecord(), "body": raw([3])["body"]}),
    "records swapped": RecordDict({"about": ArrayRecord(), "body": ConfigRecord({"sizes": [3]})}),
    "texts for sizes": raw(["3"]),
    "a negative size": raw([-1, 4]),
    "too long a body": raw([2]),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_a_message_of_ours_is_refused(name):
    with pytest.raises(DataError, match="not a message of this package"):
        read(over_the_wire(message(FOREIGN[name])))


@given(st.lists(st.binary(max_size=20), max_size=5), st.text(alphabet="0123456789abcdef", max_size=16))
def test_payloads_come_back_as_they_were(parts, run):
    assert read(over_the_wire(message(content(*parts, run=run)))) == (run, parts)


def _serialized(message):
    """The length of all objects that Flower makes of a message, each as it is sent."""
    return sum(len(found.deflate()) for found in get_all_nested_objects(message).values())


# Units, single entries, and layers with what goes beside them; the others send one of these, or whole models.
@pytest.mark.parametrize("name", ["fedlps", "cs", "fedp3"])
def test_a_methods_reported_bytes_are_those_on_flowers_wire(name):
    down, up = [], []

    def watch(message, reply):
        if message.metadata.message_type == "train":  # a run's scoring is not part of its reported bytes
            down.append(_serialized(message))
            up.append(_serialized(reply))
        return reply

    problem = chain(6, 400, 240, 3)  # so large that headers do not count
    # Of devices, whose memories do not travel.
    engine = InProcess(devices=True, fault=watch)
    result = fl.run(registry[name](), problem, tiny_clients(), tiny_config(rounds=2), engine=engine)
    assert len(up) == len(down) == sum(len(record.cohort) for record in result.rounds)
    # Flower's share of a message: its types, its ids and our header; about 1,300 bytes.
    assert result.cost.uplink_bytes <= sum(up) <= 1.03 * result.cost.uplink_bytes
    assert sum(down) <= 1.03 * result.cost.downlink_bytes, "clients of one node may share a copy"
    dense = sum(tensor.nbytes for tensor in result.state.values())
    assert all(size <= 1.03 * dense + 30_000 for size in down), "one copy of the state for all clients of a node"
