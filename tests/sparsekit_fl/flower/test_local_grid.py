"""Flower's wire format in this process: the same bits as the default engine, whatever happens to replies and memories."""

import errno
import functools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from engine_contract import EngineContract, Failing
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from local_grid import InProcess, StillClock, gone, over_the_wire, planted, task_of
from own_models import OwnModels
from personal import chain, tiny_clients, tiny_config, tiny_run

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client.messages import encode_reply
from sparsekit_fl.flower.engine import content, read
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.whole_models import Local
from sparsekit_fl.packing import pack, unpack


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
        value = unpack(payload)
        value["update"] |= changes
        return Message(content(pack(value), *others), reply_to=message)

    return fault


def _answered(*parts):
    return lambda message, answer: Message(content(*parts), reply_to=message)


def _failed(message, reason):
    return Message(Error(code=2, reason=reason), reply_to=message)


FAULTS = {
    "no reply": (lambda message, answer: None, "no reply within"),
    "an error of Flower": (gone, "node unavailable"),
    "bytes that are no update": (_answered(b"\x00" * 50), "its answer cannot be used"),
    "no replies": (_answered(), "0 replies to 1 requests"),
    "another update's round": (_changed(round=7), "round 7"),
    "another client's update": (_changed(client_id=7), "client 7"),
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


def test_scores_that_say_they_are_of_another_client_are_not_believed():
    def borrowed(message, answer):
        value = unpack(read(answer)[1][0])
        value["evaluation"]["client_id"] = 2
        return Message(content(pack(value)), reply_to=message)

    result = _run(InProcess(fault=planted(borrowed, "score", clients=[1])))
    assert [client.id for client in result.final.per_client] == [0, 2, 3, 4, 5, 6, 7]
    assert "client 1 was not scored: its answer cannot be used: it sent the scores of client 2" in result.rounds[-1].notes


def test_a_memory_that_is_not_in_the_folder_of_the_run_ends_it():
    def elsewhere(message, answer):
        folder, asked = Path(read(message)[0]), task_of(message)
        (folder / f"{asked['client_id']}-{asked['round']}.state").unlink()
        return answer

    with pytest.raises(DataError, match="must be a folder that all machines share"):
        _run(InProcess(fault=planted(elsewhere)), method=Local())


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


ENGINES = {"processes": fl.Processes, "flower": lambda: InProcess(nodes=3, devices=True)}
asked = []


@dataclass(frozen=True, kw_only=True)
class Flaky(OwnModels):
    """A method that raises on some clients in some rounds, and notes whom it was asked to train."""

    broken: Any = ()

    def train(self, client, task):
        asked.append((client.client.id, client.round))
        if asked[-1] in self.broken:
            raise ArithmeticError("not today")
        return super().train(client, task)


def _flaky(engine=None, broken=(), **options):
    return tiny_run(Flaky(broken=tuple(broken)), config=tiny_config(), engine=engine, **options)


def test_half_of_the_cohort_rounded_up_is_needed_unless_said_otherwise():
    config = tiny_config()
    assert [config.needed_replies(cohort) for cohort in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert [replace(config, min_replies=3).needed_replies(cohort) for cohort in (2, 4)] == [2, 3]
    for wrong in (0, 5):
        with pytest.raises(InvalidValueError, match="min_replies"):
            replace(config, min_replies=wrong)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.same_bits
def test_a_round_with_just_enough_replies_counts_and_one_with_too_few_ends_the_run_and_is_repeated_on_resume(
    engine, tmp_path, monkeypatch
):
    cohorts = [record.cohort for record in _flaky().rounds]
    enough = [(client_id, 2) for client_id in cohorts[1][:2]]
    whole, few = _flaky(broken=enough), [(client_id, 3) for client_id in cohorts[2][1:]]
    assert [client_id for client_id, _ in whole.rounds[1].dropped] == list(cohorts[1][:2])
    asked.clear()
    says = r"round 3: 1 of 4 updates were valid and 2 are needed.*not today.*--resume"
    with monkeypatch.context() as patch:
        patch.setattr(Flaky, "describe", lambda self: {"name": "flaky"})
        with pytest.raises(fl.errors.TooFewRepliesError, match=says):
            _flaky(ENGINES[engine](), [*enough, *few], out=tmp_path)
        assert asked.count(few[0]) == 1, "it is asked once"
        assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2
        assert _flaky(ENGINES[engine](), enough, out=tmp_path, resume=True).final == whole.final


@pytest.mark.same_bits
def test_a_client_that_does_not_answer_when_it_is_scored_is_left_out_and_the_record_says_so():
    whole = _flaky()
    result = _flaky(InProcess(devices=True, fault=planted(gone, "score", clients=[5], times=1)))
    assert result.final == whole.final
    assert result.rounds[1].notes == ("client 5 was not scored: node unavailable (Flower's error 5)",)
    assert result.rounds[1].evaluation != whole.rounds[1].evaluation
    assert all(record.notes == () for record in result.rounds if record.round != 2)


def test_a_run_in_which_no_client_can_be_scored_stops():
    says = "no client could be scored after round 2: client 0 was not scored: node unavailable.*and 3 more clients"
    with pytest.raises(fl.errors.ClientError, match=says):
        _flaky(InProcess(devices=True, fault=planted(gone, "score")))


def test_a_client_whose_memory_cannot_be_kept_is_dropped(monkeypatch):
    victim, write = _flaky().rounds[0].cohort[0], Memories.write

    def full(self, client_id, round, memory):
        if (client_id, round) == (victim, 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, client_id, round, memory)

    monkeypatch.setattr(Memories, "write", full)
    ((client_id, reason),) = _flaky(InProcess(devices=True)).rounds[0].dropped
    assert client_id == victim
    assert "No space left" in reason


class Lose(fl.Callback):
    """Devices lose their memories after the second round."""

    def __init__(self, folder):
        self.folder = folder

    def on_round_end(self, run, record):
        if record.round == 2:
            for path in self.folder.glob("device-*/clients"):
                shutil.rmtree(path)
                path.mkdir()


def test_clients_whose_memory_was_lost_start_afresh_and_the_record_says_so(tmp_path):
    result = _flaky(InProcess(devices=True, folder=tmp_path), callbacks=[Lose(tmp_path)])
    knew, told = {client_id for record in result.rounds[:2] for client_id in record.ratios}, set()
    for record in result.rounds[2:]:
        lost = knew & set(record.cohort)
        knew, told = knew - lost, told | lost
        for client_id in lost:
            assert any(f"client {client_id} of" in note and "it started without memory" in note for note in record.notes)
        assert not record.dropped
    assert told
