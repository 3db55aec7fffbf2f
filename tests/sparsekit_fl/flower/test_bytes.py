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
from sparsekit_fl.problem.models import Vgg
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


def _clients(count: int, shape: tuple[int, ...], *, examples: int = 8) -> list[fl.Client]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * examples, *shape, generator=generator)
    labels = torch.arange(4 * examples) % 10

    def split(client: int, size: int) -> fl.TensorData:
        return fl.TensorData((inputs,), labels, (torch.arange(size) + client) % len(labels))

    return [fl.Client(id=k, data=fl.ClientData(split(k, examples), split(k, 4), split(k, 4))) for k in range(count)]


def _run(
    method: fl.Method, problem: fl.Problem, clients: list[fl.Client], *, batch: int, rounds: int = 1
) -> tuple[fl.RunResult, _Wire]:
    config = fl.RunConfig(
        rounds=rounds,
        cohort=min(2, len(clients)),
        training=fl.TrainingConfig(local_epochs=1, batch_size=batch, lr=0.01),
        eval_every=rounds,
        capability="dynamic",
        capability_levels=(1.0, 0.5),
    )
    wire = _Wire()
    # Of devices, whose memories do not travel.
    return run(method, problem, clients, config, engine=InProcess(devices=True, fault=wire)), wire


def _mlp() -> nn.Module:
    """A million parameters in 4 MB, so that headers do not count."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 200), nn.ReLU(), nn.Linear(200, 10))


# Whole models, units, single entries, layers, and what goes beside them; the others send one of these.
@pytest.mark.parametrize("name", ["fedavg", "fedlps", "cs", "fedp3", "depthfl", "prunefl", "refl"])
def test_a_methods_reported_bytes_are_those_on_flowers_wire(name: str) -> None:
    problem = fl.Problem(model=_mlp, example_inputs=(torch.zeros(2, 1, 28, 28),))
    result, wire = _run(registry[name](), problem, _clients(3, (1, 28, 28)), batch=8, rounds=2)
    assert len(wire.up) == len(wire.down) == sum(len(record.cohort) for record in result.rounds)
    for counted, reported in ((sum(wire.up), result.cost.uplink_bytes), (sum(wire.down), result.cost.downlink_bytes)):
        assert reported <= counted <= (1 + _MOST_DIFFERENCE) * reported


def test_vgg11_at_a_quarter_uploads_less_than_two_and_a_half_megabytes() -> None:
    problem = fl.Problem(model=lambda: Vgg(11, classes=10), example_inputs=(torch.zeros(1, 3, 32, 32),))
    method = registry["fedlps"](ratios=0.25)
    result, wire = _run(method, problem, _clients(1, (3, 32, 32), examples=4), batch=4)
    assert result.rounds[0].ratios == {0: 0.25}
    assert wire.up[0] < 2.5e6
    assert abs(wire.up[0] - result.cost.uplink_bytes) <= _MOST_DIFFERENCE * result.cost.uplink_bytes
