"""Nodes: which SuperNode has which client, what it says of them, while they come, go or claim too much; their memories."""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from flwr.clientapp import ClientApp
from local_grid import LocalGrid, over_the_wire

from sparsekit.errors import DataError
from sparsekit_fl.engines.flower import nodes as module
from sparsekit_fl.engines.flower.nodes import Nodes, described, read_clients
from sparsekit_fl.engines.flower.wire import content
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.problem.clients import Capability, Client, ClientData


class Devices(LocalGrid):
    """Nodes that come and go, each with the clients that it claims; some say nothing."""

    def __init__(self, nodes: dict[int, list[int]]) -> None:
        self.nodes = nodes
        self.silent: set[int] = set()
        self.asked: list[int] = []
        self.looked: Callable[[], object] = lambda: None
        super().__init__(self.introduce, fault=self.unless_silent)  # type: ignore[arg-type]
        self._contexts = dict.fromkeys(range(9))

    def introduce(self, message: Message, context: object) -> Message:
        data = ClientData(train=range(3), val=range(1), test=range(1))
        about = described(Client(id=client_id, data=data) for client_id in self.nodes[message.metadata.dst_node_id])
        return Message(content({}, **about), reply_to=message)

    def unless_silent(self, message: Message, reply: Message) -> Message | None:
        self.asked.append(message.metadata.dst_node_id)
        return None if self.asked[-1] in self.silent else reply

    def get_node_ids(self) -> list[int]:
        self.looked()
        return list(self.nodes)

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, name=f"device-{node}") for node in self.nodes]


def found(grid: Devices, **options: Any) -> Nodes:
    return Nodes(grid, **{"wanted": len(grid.nodes), "wait_seconds": 1, "identity": {}, **options})


def test_a_node_that_claims_a_taken_client_takes_over_when_the_first_is_gone() -> None:
    grid = Devices({1: [0, 1], 2: [2]})
    nodes = found(grid)
    assert sorted(nodes.introduce()) == [0, 1, 2]
    grid.nodes[3] = [0, 1]
    nodes.look(wait=True)
    assert nodes.node_of(0) == 1
    assert nodes.news() == ["SuperNode 3 is not used for now: it claims the clients [0, 1], which another node has"]
    del grid.nodes[1]
    nodes.look(wait=True)
    assert nodes.node_of(0) == nodes.node_of(1) == 3
    assert nodes.news() == ["SuperNode 1 is gone, with the clients [0, 1]", "SuperNode 3 came, with the clients [0, 1]"]
    assert nodes.news() == []
    assert grid.asked == [1, 2, 3]
    del grid.nodes[2]
    nodes.look(wait=True)
    with pytest.raises(ClientError, match="no SuperNode has client 2 now"):
        nodes.node_of(2)


def test_with_a_list_a_node_that_claims_the_clients_of_others_locks_nobody_out() -> None:
    grid = Devices({1: [0, 1, 2, 3], 2: [2, 3], 3: [9]})
    nodes = found(grid, allowed={"device-1": [0, 1], "device-2": [2, 3, 4]})
    assert sorted(nodes.introduce()) == [2, 3]
    assert nodes.node_of(2) == 2
    assert nodes.news() == [
        "SuperNode 1 is not used: it claims the clients [2, 3], which 'device-1' is not allowed to have",
        "SuperNode 3 is not used: its key was registered under the name 'device-3', which is not among those that are allowed",
    ]
    with pytest.raises(WorkerDiedError, match="no SuperNode can be used"):
        found(Devices({1: [5]}), allowed={"device-1": [0, 1]}).introduce()


def test_a_silent_node_costs_one_timeout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUERY_SECONDS", 0.3)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.0)
    grid = Devices({1: [0]})
    nodes = found(grid, wait_seconds=0.1)
    nodes.introduce()
    grid.nodes[2], grid.silent = [1], {2}
    seconds = []
    for _ in range(4):
        began = time.monotonic()
        nodes.look(wait=True)
        seconds.append(time.monotonic() - began)
    assert seconds[0] >= 0.3
    assert max(seconds[1:]) < 0.2
    assert nodes.news() == ["SuperNode 2 did not say which clients it has: no reply within 0.3 seconds"]
    # It is asked again all the same, and used once it answers.
    assert grid.asked.count(2) > 1
    grid.silent.clear()
    time.sleep(0.3)
    for _ in range(3):
        nodes.look(wait=True)
    assert nodes.node_of(1) == 2


def test_before_clients_are_asked_again_the_server_waits_for_their_nodes_as_long_as_it_waits_for_nodes() -> None:
    grid = Devices({1: [0, 1], 2: [2]})
    nodes = found(grid, wait_seconds=3)
    nodes.introduce()
    del grid.nodes[1]
    looks: list[int] = []

    def back() -> None:
        looks.append(1)
        if len(looks) == 3:
            grid.nodes[3] = [0, 1]

    grid.looked = back
    nodes.await_clients([0, 1, 2], 2)
    assert nodes.node_of(0) == 3
    del grid.nodes[3]
    began = time.monotonic()
    nodes.await_clients([0, 1, 2], 1)
    assert time.monotonic() - began < 1, "enough are there"
    nodes.await_clients([0, 1, 2], 3)
    assert time.monotonic() - began >= 3, "it gives up after a while"


def _roster(count: int) -> list[Client]:
    return [
        Client(
            id=3 * place,
            data=ClientData(train=range(100 + place), val=range(7), test=range(8)),
            capability=Capability(ratio=1 / (1 + place % 3), uplink_bytes_per_second=1e6 / 3),
        )
        for place in range(count)
    ]


def _facts(client: Client) -> tuple[Any, ...]:
    return client.id, len(client.data.train), len(client.data.val), len(client.data.test), client.capability


OURS = {"sparsekit": "1.0", "graph": "bbb"}


def introduced(roster: list[Client], header: dict[str, Any]) -> Nodes:
    """The nodes of a grid whose one node introduces itself with this header."""
    app = ClientApp()
    app.query()(lambda message, context: Message(content(header, **described(roster)), reply_to=message))
    return Nodes(LocalGrid(app), wanted=1, wait_seconds=1, identity=OURS)


def test_twelve_thousand_clients_of_one_supernode_introduce_themselves() -> None:
    roster = _roster(12_000)
    nodes = introduced(roster, {"identity": OURS})
    found = nodes.introduce()
    assert [_facts(client) for client in found.values()] == [_facts(client) for client in roster]
    assert nodes.node_of(3 * 11_999) == 1000
    assert nodes.news() == []


def _rows(**changed: Any) -> list[list[Any]]:
    """Two clients, of which the second is changed."""
    fine = {"id": 4, "train": 3, "val": 1, "test": 1, "ratio": 1.0, "flops": 1.0, "up": 1.0, "down": 1.0}
    return [[3, 3, 0, 1, 1.0, 1.0, 1.0, 1.0], list({**fine, **changed}.values())]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (None, "describes its clients badly"),
        *((payload, "badly") for payload in (b"\xff\x00", b"[" * 10**5, b"[[1,")),
        ([], "at least 1 item"),
        ({}, "valid array"),
        ([3, 4], "valid array"),
        ([[4, 3, 1, 1]], "Field required"),
        ([[4, 3, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0]], "at most 8 items"),
        (_rows(id=3), "a client twice"),
        (_rows(id=-1), "greater than or equal to 0"),
        (_rows(id=2**63), "less than"),
        (_rows(id=4.0), "valid integer"),
        (_rows(id="4"), "valid integer"),
        (_rows(train=0), "greater than or equal to 1"),
        (_rows(train=2**50), "less than"),
        (_rows(train=10**1000), "badly"),
        (_rows(val=-1), "greater than or equal to 0"),
        (_rows(ratio=2.0), "capability ratio"),
        (_rows(flops=-1.0), "describes a client badly"),
        (_rows(up=float("nan")), "describes a client badly"),
        (_rows(down=float("inf")), "describes a client badly"),
    ],
)
def test_a_malformed_introduction_is_refused(clients: Any, message: str) -> None:
    LocalGrid(ClientApp())  # what Flower asks of a process that makes a message
    payload = clients if isinstance(clients, bytes) else json.dumps(clients).encode()
    said = {} if clients is None else {"clients": payload}
    with pytest.raises(DataError, match=message):
        read_clients(over_the_wire(Message(content({}, **said), 1, "query")), {})


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({}, "it has sparsekit None, the server 1.0"),
        ({"identity": {**OURS, "sparsekit": "0.9"}}, "it has sparsekit 0.9, the server 1.0"),
        ({"identity": {**OURS, "graph": "ddd"}}, "its model has other units or frozen weights .digest ddd."),
    ],
)
def test_a_node_whose_code_or_model_differs_is_not_used_and_the_error_says_why(header: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkerDiedError, match=says):
        introduced(_roster(2), header).introduce()
