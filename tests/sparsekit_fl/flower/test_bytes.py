"""The bytes that a result reports are those that cross Flower's wire, up and down."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from local_grid import InProcess

import sparsekit_fl as fl
from sparsekit_fl.methods import registry
from sparsekit_fl.rounds import run

pytestmark = pytest.mark.slow

# Flower's share of a message: its types, its ids and our header; about 1,300 bytes.
_MOST_DIFFERENCE = 0.03


class _Wire:
    """Counts what training sends; a run's scoring is not part of its reported bytes."""

    def __init__(self) -> None:
        self.down: list[int] = []
        self.up: list[int] = []

    def __call__(self, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            self.down.append(_serialised(message))
            self.up.append(_serialised(reply))
        return reply


def _serialised(message: Message) -> int:
    """The length of all objects that Flower makes of a message, each as it is sent."""
    return sum(len(found.deflate()) for found in get_all_nested_objects(message).values())


def _mlp() -> nn.Module:
    """A million parameters in 4 MB, so that headers do not count."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 200), nn.ReLU(), nn.Linear(200, 10))


# Units, single entries, and layers with what goes beside them; the others send one of these, or whole models.
@pytest.mark.parametrize("name", ["fedlps", "cs", "fedp3"])
def test_a_methods_reported_bytes_are_those_on_flowers_wire(name: str) -> None:
    problem = fl.Problem(model=_mlp, example_inputs=(torch.zeros(2, 1, 28, 28),))
    images, labels = torch.randn(32, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 10
    splits = [[fl.TensorData((images,), labels, torch.arange(size) + k) for size in (8, 4, 4)] for k in range(3)]
    clients = [fl.Client(id=k, data=fl.ClientData(*own)) for k, own in enumerate(splits)]
    training = fl.TrainingConfig(local_epochs=1, batch_size=8, lr=0.01)
    levels: dict[str, Any] = {"capability": "dynamic", "capability_levels": (1.0, 0.5)}
    config = fl.RunConfig(rounds=2, cohort=2, training=training, eval_every=2, **levels)
    wire = _Wire()
    # Of devices, whose memories do not travel.
    result = run(registry[name](), problem, clients, config, engine=InProcess(devices=True, fault=wire))
    assert len(wire.up) == len(wire.down) == sum(len(record.cohort) for record in result.rounds)
    for counted, reported in ((sum(wire.up), result.cost.uplink_bytes), (sum(wire.down), result.cost.downlink_bytes)):
        assert reported <= counted <= (1 + _MOST_DIFFERENCE) * reported
