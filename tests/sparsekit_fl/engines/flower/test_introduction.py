"""What SuperNodes say of their clients: any number of them, and nothing that a hostile node says does harm."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from flwr.clientapp import ClientApp

from sparsekit.errors import DataError
from sparsekit_fl.engines.flower import introduction
from sparsekit_fl.engines.flower.deployment import Nodes
from sparsekit_fl.engines.flower.introduction import described, read_clients
from sparsekit_fl.engines.flower.local_grid import LocalGrid, over_the_wire
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


def test_of_many_clients_of_a_lost_supernode_the_first_are_named() -> None:
    roster, app = _roster(12_000), ClientApp()

    @app.query()
    def answer(message: Message, _: Any) -> Message:
        return Message(content({}, **described(roster)), reply_to=message)

    grid = LocalGrid(app, nodes=1, rng=np.random.default_rng(0))
    nodes = Nodes(grid, wanted=1, wait_seconds=1)
    nodes.introduce()
    grid.get_node_ids = lambda: []  # type: ignore[method-assign]
    nodes.refresh()
    (told,) = nodes.news()
    assert told.startswith("SuperNode 1000 is gone, with the clients [0, 3, 6, ")
    assert told.endswith(", 57, …], 12,000 in all")


_ONE = {"id": 1, "sizes": [3, 1, 1], "capability": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "names no clients"),
        ([[]], "names no clients"),
        ([[_ONE], [_ONE]], "a client twice"),
        ([{"1": _ONE}], "at most 5000 clients in a part"),
        ([[_ONE] * 5001], "at most 5000 clients in a part"),
        ([[1]], "describes a client badly"),
        ([[{**_ONE, "sizes": [0, 1, 1]}]], "sizes"),
        ([[{**_ONE, "id": "1"}]], "describes a client badly"),
        ([[{**_ONE, "id": 10**400}]], "an id of 1329 bits"),
        ([[{**_ONE, "capability": [10**400, 1, 1, 1]}]], "describes a client badly"),
        ([[{**_ONE, "capability": [2, 1, 1, 1]}]], "capability ratio"),
    ],
)
def test_a_malformed_introduction_is_refused(parts: list[Any], message: str) -> None:
    payloads = {str(place): json.dumps(part).encode() for place, part in enumerate(parts)}
    with pytest.raises(DataError, match=message):
        read_clients(_said(**payloads))


@pytest.mark.parametrize("part", [b"[" * 100_000, b"\xff", b"{", b"[1" + b"0" * 5000 + b"]"])
def test_bytes_that_are_no_introduction_are_refused(part: bytes) -> None:
    with pytest.raises(DataError, match="badly"):
        read_clients(_said(**{"0": part}))


def test_a_node_that_says_too_much_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduction, "_MOST_CLIENTS", 3)
    assert len(read_clients(_said(**described(_roster(3))))) == 3
    with pytest.raises(DataError, match="more than 3 clients"):
        read_clients(_said(**described(_roster(4))))
    with pytest.raises(DataError, match="allowed are 768"):
        read_clients(_said(**described(_roster(20))))


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
