"""Flower's wire format in this process: the same bits as the embedded engine, whatever happens to the replies."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from local_grid import Fault, InProcess, LocalGrid, gone, planted, task_of
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit_fl.client.messages import decode_update, encode_update
from sparsekit_fl.engines.flower import pool
from sparsekit_fl.engines.flower.post import Carrier, Post
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.methods.local import Local
from sparsekit_fl.testing import EngineContract, Failing, tiny_clients


class TestInProcess(EngineContract):
    @pytest.fixture
    def engine(self) -> fl.Engine:
        return InProcess(memory="nodes")


class TestGrouped(EngineContract):
    @pytest.fixture
    def engine(self) -> fl.Engine:
        return InProcess(nodes=3, devices=True, twice=True)


def _run(engine: fl.Engine | None = None, method: fl.Method | None = None, rounds: int = 2) -> fl.RunResult:
    return tiny_run(method or fl.Method(), rounds=rounds, engine=engine)


def _of_another_round(message: Message, reply: Message) -> Message:
    header, payloads = read(reply)
    update = dataclasses.replace(decode_update(payloads["0/body"]), round=7)
    return Message(content(header, **{**payloads, "0/body": encode_update(update)}), reply_to=message)


FAULTS = {
    "no reply": (lambda message, reply: None, "no reply within"),
    "an error of Flower": (gone, "node unavailable"),
    "bytes that are no update": (
        lambda message, reply: Message(content(read(reply)[0], **{"0/body": b"\x00" * 50}), reply_to=message),
        "no valid update",
    ),
    "a header without replies": (lambda message, reply: Message(content({}), reply_to=message), "expected 1 replies"),
    "another update's round": (_of_another_round, "round 7"),
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
    monkeypatch.setattr("sparsekit_fl.engines.flower.post.time", StillClock())
    change, reason = FAULTS[name]
    victim, others = _without_its_victim()
    result = _run(InProcess(fault=planted(change, clients=[victim]), timeout_seconds=30.0))
    record = result.rounds[0]
    assert [client_id for client_id, _ in record.dropped] == [victim]
    assert reason in record.dropped[0][1]
    assert set(record.ratios) == set(record.cohort) - {victim}
    # The model is what the others alone make of it.
    assert result.final.state_sha256 == others.final.state_sha256


@pytest.mark.parametrize(("looks", "late"), [(40, False), (60, True)])
@pytest.mark.same_bits
def test_a_reply_counts_if_it_is_there_before_the_deadline_and_one_after_it_does_not(
    looks: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekit_fl.engines.flower.post.time", StillClock())
    victim, others = _without_its_victim()

    def delay(message: Message) -> int:
        task = task_of(message)
        return looks if (task["task"], task["client_id"]) == ("train", victim) else 0

    # The server looks 50 times a second.
    result = _run(InProcess(delay=delay, timeout_seconds=1.0))
    assert result.final.state_sha256 == (others if late else _run()).final.state_sha256
    assert [client_id for client_id, _ in result.rounds[0].dropped] == [victim] * late


class Fragile(Carrier):
    """A grid of one node with a fault; started anew it has none."""

    devices = False

    def __init__(self, fault: Fault | None) -> None:
        app = ClientApp()
        app.query()(lambda message, _: Message(content({}), reply_to=message))
        self.grid = LocalGrid(app, fault=fault)

    def node_of(self, client_id: int) -> int:
        return 1000

    def restart(self, reason: str) -> None:
        self.grid = Fragile(None).grid


def test_what_was_open_is_sent_again_where_the_grid_is_started_anew_whoever_sent_it() -> None:
    def fault(message: Message, reply: Message) -> Message | None:
        killed = Message(Error(code=2, reason="ActorDiedError"), reply_to=message)
        return {"lost": None, "killed": killed}.get(read(message)[0]["key"], reply)

    grid = Fragile(fault)
    posts: list[Post[str]] = [
        Post(grid, lambda key, node: Message(content({"key": key}), node, "query"), lambda _: 1000, ttl=5) for _ in range(2)
    ]
    posts[0].add(["lost"])
    posts[1].add(["killed", "answered"])
    answers = [dict(post.answers()) for post in reversed(posts)]
    assert [sorted(found) for found in answers] == [["answered", "killed"], ["lost"]]
    assert not any(isinstance(reply, str) or reply.has_error() for found in answers for reply in found.values())


KEEPS = Local(keep="best")


def test_memories_that_travel_are_counted_apart_to_the_byte() -> None:
    seen: list[int] = []

    def count(message: Message, reply: Message) -> Message:
        if task_of(message)["task"] == "train":
            seen.extend(len(read(one)[1].get("0/memory", b"")) for one in (message, reply))
        return reply

    here, there = _run(method=KEEPS, rounds=4), _run(InProcess(fault=count), KEEPS, rounds=4)
    assert there.cost.memory_bytes == sum(seen) > 0
    assert min(seen[1::2]) > 0
    assert dataclasses.replace(there.cost, memory_bytes=0, wall_seconds=here.cost.wall_seconds) == here.cost
    assert there.to_dict()["cost"]["memory_bytes"] == sum(seen)
    assert there.rounds[-1] == fl.RoundRecord.from_dict(there.rounds[-1].to_dict())


def test_scores_that_say_they_are_of_another_client_are_not_believed() -> None:
    def borrowed(message: Message, reply: Message) -> Message:
        header, payloads = read(reply)
        for one in header["replies"]:
            if (one.get("evaluation") or {}).get("client_id") == 1:
                one["evaluation"]["client_id"] = 2
        return Message(content(header, **payloads), reply_to=message)

    result = _run(InProcess(fault=borrowed))
    assert [client.client_id for client in result.final.per_client] == [0, 2, 3, 4, 5, 6, 7]
    assert "client 1 was not scored: it sent the scores of client 2" in "; ".join(result.rounds[-1].notes)


def test_a_memory_that_did_not_come_back_with_its_update_drops_the_update() -> None:
    def forgetful(message: Message, reply: Message) -> Message:
        header, payloads = read(reply)
        payloads = {name: data for name, data in payloads.items() if "memory" not in name}
        return Message(content(header, **payloads), reply_to=message)

    with pytest.raises(fl.errors.ClientError, match="without its memory"):
        _run(InProcess(fault=forgetful), method=KEEPS)


def test_a_defect_of_a_node_stops_the_run() -> None:
    def broken(message: Message, reply: Message) -> Message:
        return Message(content({"replies": [{"broken": "Traceback: …"}]}), reply_to=message)

    with pytest.raises(fl.errors.WorkerDiedError, match="Traceback"):
        _run(InProcess(fault=broken))


@pytest.mark.parametrize(
    ("count", "options", "open"),
    [(180, {}, 50), (120, {"nodes": 1, "devices": True}, 3)],
    ids=["a node for each", "more on a node than fit into one message"],
)
@pytest.mark.same_bits
def test_however_many_clients_are_scored_only_a_few_messages_are_open_at_once(
    count: int, options: dict[str, Any], open: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    pull = LocalGrid.pull_messages

    def counted(grid: LocalGrid, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        asked.append(len(ids))
        return pull(grid, ids)

    monkeypatch.setattr(LocalGrid, "pull_messages", counted)
    monkeypatch.setattr(pool, "_MOST_TASKS", 50)
    here, there = (tiny_run(clients=tiny_clients(count), rounds=1, engine=one) for one in (None, InProcess(**options)))
    assert max(asked) == open
    assert len(there.final.per_client) == count
    assert there.final == here.final
