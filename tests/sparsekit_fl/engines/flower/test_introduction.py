"""What SuperNodes say of their clients: any number of them, and nothing that a hostile node says does harm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from flwr.clientapp import ClientApp
from local_grid import LocalGrid, over_the_wire

from sparsekit.errors import DataError
from sparsekit_fl.client.packing import pack
from sparsekit_fl.engines.flower.introduction import described, read_clients
from sparsekit_fl.engines.flower.nodes import Nodes
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


def _tensors(count: int = 2, **changed: Any) -> dict[str, Any]:
    sizes, rates = torch.tensor([[3, 1, 1]] * count, dtype=torch.int64), torch.ones(count, 4, dtype=torch.float64)
    return {"ids": torch.arange(count), "sizes": sizes.reshape(count, 3), "capabilities": rates} | changed


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "does not say 'ids' of its clients"),
        (_tensors(0), "names 0 clients"),
        (_tensors(ids=torch.tensor([4, 4])), "a client twice"),
        (_tensors(ids=torch.tensor([-1, 4])), "a negative id"),
        (_tensors(ids=torch.tensor([1.0, 4.0])), "numbers of other types"),
        (_tensors(ids=torch.arange(3)), "tensors of shapes"),
        (_tensors(sizes=torch.tensor([3, 1, 1])), "tensors of shapes"),
        (_tensors(sizes=torch.tensor([[3, 1, 1], [0, 1, 1]])), "sizes of data that no client has"),
        (_tensors(sizes=torch.tensor([[3, 1, 1], [2**50, 1, 1]])), "sizes of data that no client has"),
        (_tensors(capabilities=torch.full((2, 4), 2.0, dtype=torch.float64)), "capability ratio"),
        (_tensors(capabilities=torch.full((2, 4), float("nan"), dtype=torch.float64)), "describes a client badly"),
    ],
)
def test_a_malformed_introduction_is_refused(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_clients(_said(clients=pack(tensors, {})))


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
