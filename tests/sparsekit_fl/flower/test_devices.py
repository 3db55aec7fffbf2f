"""Devices: which SuperNode has which client, what it says of them, and while they come and go."""

import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from flwr.clientapp import ClientApp
from local_grid import LocalGrid, over_the_wire

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.flower import engine as module
from sparsekit_fl.flower.engine import GridEngine, content, describe_clients, identity_of, read_clients
from sparsekit_fl.problem.data import Capability, Client, ClientData
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import tiny_config, tiny_problem

SPEC = RunSpec.build(fl.Method(), tiny_problem(), tiny_config())
OURS = identity_of(SPEC)


class Devices(LocalGrid):
    """Nodes that come and go, each with the clients that it claims; some say nothing."""

    def __init__(self, nodes: dict[int, list[int]]) -> None:
        self.nodes = nodes
        self.silent: set[int] = set()
        self.asked: list[int] = []
        super().__init__(self.introduce, fault=self.unless_silent)  # type: ignore[arg-type]
        self._contexts = dict.fromkeys(range(9))

    def introduce(self, message: Message, context: object) -> Message:
        data = ClientData(train=range(3), val=range(1), test=range(1))
        clients = [Client(id=client_id, data=data) for client_id in self.nodes[message.metadata.dst_node_id]]
        return Message(content(describe_clients(clients, OURS)), reply_to=message)

    def unless_silent(self, message: Message, reply: Message) -> Message | None:
        self.asked.append(message.metadata.dst_node_id)
        return None if self.asked[-1] in self.silent else reply

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)


def found(grid: LocalGrid, **options: Any) -> tuple[GridEngine, dict[int, Client]]:
    """An engine that has asked the devices of a grid, and their clients."""
    engine = GridEngine(grid, **{"nodes": len(list(grid.get_node_ids())), "wait_seconds": 1, **options})
    return engine, engine.introduce(SPEC)


def nodes(engine: GridEngine) -> dict[int, int]:
    """Client → the node that has it."""
    return {client_id: node for node, own in engine._clients.items() for client_id in own}


def told(engine: GridEngine) -> list[str]:
    """What the record of the next round says."""
    notes = list(engine._notes)
    engine._notes.clear()
    return notes


def test_a_device_that_comes_back_under_another_id_has_its_clients_again_at_once() -> None:
    grid = Devices({1: [0, 1], 2: [2]})
    engine, clients = found(grid)
    assert sorted(clients) == [0, 1, 2]
    assert engine.workers == 2
    grid.nodes[3] = [0, 1]  # the SuperNode was started again, and Flower has not noticed that the old one is gone
    engine._find_clients(note_new=True)
    assert nodes(engine) == {0: 3, 1: 3, 2: 2}
    assert told(engine) == ["SuperNode 3 came, with 2 clients"]
    del grid.nodes[1]
    engine._find_clients(note_new=True)
    assert nodes(engine) == {0: 3, 1: 3, 2: 2}
    assert told(engine) == []
    del grid.nodes[2]
    engine._find_clients(note_new=True)
    assert nodes(engine) == {0: 3, 1: 3}
    assert told(engine) == ["SuperNode 2 is gone, with 1 clients"]
    assert grid.asked == [1, 2, 3]


def test_a_silent_node_costs_one_timeout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUERY_SECONDS", 0.3)
    grid = Devices({1: [0]})
    engine, _ = found(grid, wait_seconds=0.1)
    grid.nodes[2] = [1]
    grid.silent.add(2)
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        engine._find_clients()
        seconds.append(time.monotonic() - began)
    assert seconds[0] >= 0.3
    assert max(seconds[1:]) < 0.2
    assert told(engine) == ["SuperNode 2 is not used: no reply within 0.3 seconds"]
    grid.nodes[3] = [1]  # it was started again
    del grid.nodes[2]
    engine._find_clients()
    assert nodes(engine) == {0: 1, 1: 3}


ROSTER = [
    Client(id=3 * place, data=ClientData(train=range(100 + place), val=range(7), test=range(8)),
           capability=Capability(ratio=1 / (1 + place), uplink_bytes_per_second=1e6 / 3))
    for place in range(3)
]  # fmt: skip


def _saying(identity: str) -> LocalGrid:
    """A device that has the roster, and says that it is of this version and model."""
    app = ClientApp()
    app.query()(lambda message, context: Message(content(describe_clients(ROSTER, identity)), reply_to=message))
    return LocalGrid(app)


def test_a_device_says_how_many_examples_and_which_capability_each_of_its_clients_has() -> None:
    _, clients = found(_saying(OURS))
    for own, known in zip(ROSTER, clients.values(), strict=True):
        assert (known.id, known.capability) == (own.id, own.capability)
        assert [len(known.data.train), len(known.data.val), len(known.data.test)] == [len(own.data.train), 7, 8]


ROW = [4, 3, 1, 1, 1.0, 1.0, 1.0, 1.0]


def _with(column: int, value: Any) -> Any:
    return [[3, *ROW[1:]], [*ROW[:column], value, *ROW[column + 1 :]]]


ROWS = [[], None, [3, 4], [ROW[:3]], _with(0, 3), _with(0, -1), _with(1, 0), _with(1, 2**50), _with(4, 2.0), _with(6, math.nan)]
BYTES = [b"", b"\xff\x00", b"[" * 10**5, b"[]"]


@pytest.mark.parametrize("payload", [*(json.dumps({"identity": OURS, "clients": rows}).encode() for rows in ROWS), *BYTES])
def test_a_malformed_introduction_is_refused(payload: bytes) -> None:
    LocalGrid(ClientApp())  # what Flower asks of a process that makes a message
    with pytest.raises(DataError, match="badly"):
        read_clients(over_the_wire(Message(content(payload), 1, "query")), OURS)


def test_a_node_whose_version_or_model_or_frozen_weights_differ_is_not_used_and_the_error_says_why() -> None:
    """Frozen values never travel, so a device with other ones would train another model unnoticed."""
    frozen = replace(SPEC, frozen=frozenset(list(SPEC.initial)[:1]))
    name = next(iter(frozen.frozen))
    nudged = frozen.initial[name].clone()
    nudged.view(-1)[0] = torch.nextafter(nudged.view(-1)[0], torch.tensor(9.0))
    other = replace(frozen, initial={**frozen.initial, name: nudged})
    identities = [identity_of(frozen), identity_of(other), identity_of(SPEC), OURS.replace("sparsekit ", "sparsekit 0.")]
    assert len(set(identities)) == 4
    for theirs in identities[1:]:
        with pytest.raises(WorkerDiedError, match=r"no SuperNode can be used.*it has sparsekit .*, and the server has"):
            GridEngine(_saying(theirs), wait_seconds=1).introduce(frozen)
