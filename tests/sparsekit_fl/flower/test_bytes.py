"""The bytes that a result reports are those that cross Flower's wire, up and down."""

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from local_grid import InProcess

import sparsekit_fl as fl
from sparsekit_fl.methods import registry
from sparsekit_fl.testing import tiny_clients, tiny_config

# Flower's share of a message: its types, its ids and our header; about 1,300 bytes.
_MOST_DIFFERENCE = 0.03


def _serialised(message: Message) -> int:
    """The length of all objects that Flower makes of a message, each as it is sent."""
    return sum(len(found.deflate()) for found in get_all_nested_objects(message).values())


def _wide() -> nn.Module:
    """A hundred thousand parameters, so that headers do not count."""
    return nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 240), nn.ReLU(), nn.Linear(240, 3))


# Units, single entries, and layers with what goes beside them; the others send one of these, or whole models.
@pytest.mark.parametrize("name", ["fedlps", "cs", "fedp3"])
def test_a_methods_reported_bytes_are_those_on_flowers_wire(name: str) -> None:
    down, up = [], []

    def watch(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":  # a run's scoring is not part of its reported bytes
            down.append(_serialised(message))
            up.append(_serialised(reply))
        return reply

    problem = fl.Problem(model=_wide, example_inputs=(torch.zeros(2, 6),))
    # Of devices, whose memories do not travel.
    engine = InProcess(devices=True, fault=watch)
    result = fl.run(registry[name](), problem, tiny_clients(), tiny_config(rounds=2), engine=engine)
    assert len(up) == len(down) == sum(len(record.cohort) for record in result.rounds)
    for counted, reported in ((sum(up), result.cost.uplink_bytes), (sum(down), result.cost.downlink_bytes)):
        assert reported <= counted <= (1 + _MOST_DIFFERENCE) * reported
