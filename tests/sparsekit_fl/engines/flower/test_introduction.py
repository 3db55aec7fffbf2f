"""What SuperNodes say of their clients: any number of them, and nothing that a hostile node says does harm."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from flwr.clientapp import ClientApp
from local_grid import LocalGrid, over_the_wire

from sparsekit.errors import DataError
from sparsekit_fl.engines.flower.nodes import Nodes, described, read_clients
from sparsekit_fl.engines.flower.wire import content
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.problem.clients import Capability, Client, ClientData


def _roster(count: int) -> list[Client]:
    return [
        Client(
            id=3 * place,
            data=ClientData(train=range(100 + place), val=range(7), test=range(8)),
            capability=Capability(ratio=1 / (1 + place % 3), uplink_bytes_per_second=1e6 / 3),
        )
        for place in range(count)
    ]


def _said(**payloads: bytes) -> Message:
    LocalGrid(ClientApp(), nodes=1, rng=np.random.default_rng(0))  # what Flower asks of a process that makes a message
    return over_the_wire(Message(content({}, **payloads), 1, "query"))


def _facts(client: Client) -> tuple[Any, ...]:
    return client.id, len(client.data.train), len(client.data.val), len(client.data.test), client.capability


def test_twelve_thousand_clients_of_one_supernode_introduce_themselves() -> None:
    roster, app = _roster(12_000), ClientApp()

    @app.query()
    def answer(message: Message, _: Any) -> Message:
        return Message(content({}, **described(roster)), reply_to=message)

    nodes = Nodes(LocalGrid(app, nodes=1, rng=np.random.default_rng(0)), wanted=1, wait_seconds=1)
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
    said = {} if clients is None else {"clients": json.dumps(clients).encode()}
    with pytest.raises(DataError, match=message):
        read_clients(_said(**said))


def test_bytes_that_are_no_introduction_are_refused() -> None:
    for payload in (b"\xff\x00", b"[" * 10**5, b"[[1,"):
        with pytest.raises(DataError, match="badly"):
            read_clients(_said(clients=payload))


OURS = {"sparsekit": "1.0", "code": "aaa", "graph": "bbb"}


def introduced(header: dict[str, Any]) -> Nodes:
    """The nodes of a grid whose one node introduces itself with this header."""
    app = ClientApp()
    app.query()(lambda message, context: Message(content(header, **described(_roster(2))), reply_to=message))
    grid = LocalGrid(app, nodes=1, rng=np.random.default_rng(0))
    return Nodes(grid, wanted=1, wait_seconds=1, identity=OURS)


def test_a_node_of_the_same_code_and_model_is_used() -> None:
    assert set(introduced({"identity": OURS}).introduce()) == {0, 3}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({}, "does not say by which version"),
        ({"identity": {**OURS, "sparsekit": "0.9"}}, "it has sparsekit 0.9, the server 1.0"),
        ({"identity": {**OURS, "code": "ccc"}}, "has other code .digest ccc."),
        ({"identity": {**OURS, "graph": "ddd"}}, "its model has other units .digest ddd."),
    ],
)
def test_a_node_whose_code_or_model_differs_is_not_used_and_the_error_says_why(header: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkerDiedError, match=says):
        introduced(header).introduce()
