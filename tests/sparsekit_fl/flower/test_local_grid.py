"""Flower's wire format in this process: the same bits as the default engine, whatever happens to the replies."""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from engine_contract import EngineContract, Failing
from flwr.app import Error, Message
from local_grid import Fault, InProcess, gone, planted, task_of
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client.messages import encode_reply
from sparsekit_fl.client.packing import pack, unpack
from sparsekit_fl.flower.engine import content, read, run_of
from sparsekit_fl.methods.whole_models import Local
from sparsekit_fl.spec import RunSpec, by_id
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


class TestInProcess(EngineContract):
    @pytest.fixture
    def engine(self) -> fl.Engine:
        return InProcess()


class TestDevices(EngineContract):
    @pytest.fixture
    def engine(self) -> fl.Engine:
        return InProcess(nodes=3, devices=True, twice=True)


def _run(engine: fl.Engine | None = None, method: fl.Method | None = None, rounds: int = 2) -> fl.RunResult:
    return tiny_run(method or fl.Method(), rounds=rounds, engine=engine)


def _changed(**changes: Any) -> Fault:
    """A fault that changes what the first reply of an answer says of itself."""

    def fault(message: Message, answer: Message) -> Message:
        payload, *others = read(answer)
        tensors, meta = unpack(payload)
        return Message(content(pack(tensors, {**meta, **changes}), *others), reply_to=message)

    return fault


def _answered(*parts: bytes) -> Fault:
    return lambda message, answer: Message(content(*parts), reply_to=message)


def _failed(message: Message, reason: str) -> Message:
    return Message(Error(code=2, reason=reason), reply_to=message)


FAULTS: dict[str, tuple[Fault, str]] = {
    "no reply": (lambda message, answer: None, "no reply within"),
    "an error of Flower": (gone, "node unavailable"),
    "bytes that are no update": (_answered(b"\x00" * 50), "its answer cannot be used"),
    "no replies": (_answered(), "expected 1"),
    "another update's round": (_changed(round=7), "round 7"),
    "another client's update": (_changed(client=7), "client 7"),
    "an error that ends a simulation": (lambda message, _: _failed(message, "ActorDiedError"), "ActorDiedError"),
    "a reason of a megabyte": (lambda message, _: _failed(message, "x" * 10**6), "xxxx"),
    "an error of a megabyte": (_answered(encode_reply(fl.Reply(client_id=0, error="x" * 10**6))), "xxxx"),
    "a million payloads": (_answered(*[b""] * 10**6), "expected 1"),
}


class StillClock:
    """Stands for the module `time`: only waiting takes time, so that no slow machine misses a deadline."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@functools.cache
def _without_its_victim() -> tuple[int, fl.RunResult]:
    """A client of the first round, and the run in which it fails by itself."""
    victim = _run().rounds[0].cohort[0]
    return victim, _run(method=Failing(clients=(victim,)))


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.same_bits
def test_a_faulty_reply_is_dropped_with_its_reason_and_the_round_goes_on_as_if_it_had_failed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_reply_counts_if_it_is_there_before_the_deadline_and_one_after_it_does_not(
    looks: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", StillClock())
    victim, others = _without_its_victim()

    def delay(message: Message) -> int:
        task = task_of(message)
        return looks if (task["task"], task["client_id"]) == ("train", victim) else 0

    # The server looks 50 times a second.
    result = _run(InProcess(delay=delay, timeout_seconds=1.0))
    assert result.final.state_sha256 == (others if late else _run()).final.state_sha256
    assert [client_id for client_id, _ in result.rounds[0].dropped] == [victim] * late


KEEPS = Local(keep="best")


def test_scores_that_say_they_are_of_another_client_are_not_believed() -> None:
    def borrowed(message: Message, answer: Message) -> Message:
        tensors, meta = unpack(read(answer)[0])
        meta["reply"]["evaluation"]["client_id"] = 2
        return Message(content(pack(tensors, meta)), reply_to=message)

    result = _run(InProcess(fault=planted(borrowed, "score", clients=[1])))
    assert [client.client_id for client in result.final.per_client] == [0, 2, 3, 4, 5, 6, 7]
    assert "client 1 was not scored: its answer cannot be used: it sent the scores of client 2" in result.rounds[-1].notes


def test_a_memory_that_is_not_in_the_folder_of_the_run_ends_it() -> None:
    def elsewhere(message: Message, answer: Message) -> Message:
        folder, asked = Path(run_of(message)), task_of(message)
        (folder / f"{asked['client_id']}-{asked['round']}.pt").unlink()
        return answer

    with pytest.raises(DataError, match="must be a folder that all machines share"):
        _run(InProcess(fault=planted(elsewhere)), method=KEEPS)


def test_a_process_of_the_simulation_that_died_ends_the_run() -> None:
    def killed(message: Message, _: Message) -> Message:
        return Message(Error(code=0, reason="ray.exceptions.ActorDiedError: The actor died"), reply_to=message)

    with pytest.raises(fl.errors.WorkerDiedError, match=r"a process that trains clients failed.*round 0 of 2 was the last"):
        _run(InProcess(fault=planted(killed, times=1)))


@pytest.mark.parametrize("count", [1000])
def test_however_many_clients_of_a_device_fail_the_others_count(count: int) -> None:
    """What is said of one client takes no room from another."""
    healthy = (0, 500, 999)

    class Broken(Failing):
        called = "broken"

        def train(self, client: fl.ClientContext, task: fl.Task) -> fl.Result:
            if client.client.id not in healthy:
                raise ArithmeticError("x" * 10_000)
            return super().train(client, task)

    spec = RunSpec.build(Broken(clients=()), tiny_problem(), tiny_config())
    data = tiny_clients(1)[0].data
    clients = by_id([fl.Client(id=id, data=data) for id in range(count)])
    requests = [fl.Request(round=1, client_id=id, state=spec.initial) for id in clients]
    with (
        TemporaryDirectory() as folder,
        InProcess(nodes=1, devices=True).open(spec, clients, Memories(Path(folder), durable=False)) as run_clients,
    ):
        replies = list(run_clients(requests))
    assert [reply.client_id for reply in replies] == list(clients)
    assert [reply.client_id for reply in replies if reply.update is not None] == list(healthy)
    assert all("ArithmeticError: xxx" in reply.error for reply in replies if reply.update is None)
