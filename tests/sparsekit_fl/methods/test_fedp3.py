"""FedP3: who answers for which layer, what comes down and goes up, and FedAvg where everything is shared."""

from __future__ import annotations

import torch
from personal import combine, update, watched
from torch import nn

from sparsekit.allocation.shares import keep_count
from sparsekit.graph import WeightMask
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.methods import fedp3
from sparsekit_fl.methods.fedp3 import own_layers
from sparsekit_fl.policies.aggregate import Mean
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server.server import Server
from sparsekit_fl.testing import tiny_clients, tiny_config


def four() -> Problem:
    """Four layers: three that clients answer for, and the head."""
    return Problem(model=_four, example_inputs=(torch.zeros(2, 6),))


def _four() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def test_layers_are_dealt_cyclically() -> None:
    graph = RunSpec.build(fedp3(), four(), tiny_config()).graph

    def names(client_id, count, private_head=True):
        return [layer.name for layer in own_layers(graph, client_id, count, private_head=private_head)]

    assert [names(k, 2) for k in range(4)] == [["0", "2"], ["2", "4"], ["4", "0"], ["0", "2"]]
    assert names(1, 1) == ["2"]
    assert names(1, None) == ["0", "2", "4"]
    assert names(1, None, private_head=False) == ["0", "2", "4", "6"]


def test_layers_are_averaged_over_those_who_send_them() -> None:
    everything, nothing = update(0, [3.0, 3.0, 3.0], b=4.0), update(1, [], keep=[False, False, False], b=2.0)
    found = combine(Mean("uniform", over="holders"), everything, nothing)
    assert found["w"].tolist() == [[4.0, 5.0, 6.0]]
    assert found["b"].tolist() == [13.0]


def test_own_layers_come_whole_others_pruned_and_the_head_never() -> None:
    spec = RunSpec.build(fedp3(), four(), tiny_config())
    server = Server(spec, {client.id: client for client in tiny_clients()})
    for assignment in server.assign(1):
        assert "6.weight" not in assignment.state
        own = {layer.name for layer in own_layers(spec.graph, assignment.client_id, 2, private_head=True)}
        (other,) = {"0", "2", "4"} - own
        size = spec.graph.shapes[f"{other}.weight"].numel()
        assert assignment.mask.counts() == {f"{other}.weight": keep_count(0.9, size)}


def test_the_trained_part_of_own_layers_goes_up_alone() -> None:
    _, updates = watched(fedp3(), problem=four())
    assert {item.ratio for item in updates} == {1.0, 0.5, 0.25}
    for item in updates:
        units = keep_count(item.ratio, 8)
        first = item.client_id % 3
        own = {2 * first, 2 * ((first + 1) % 3)}
        for place in (0, 2, 4):
            inputs = 6 if place == 0 else units
            expected = (units * inputs, units) if place in own else (0, 0)
            found = item.delta[f"{place}.weight"].numel(), item.delta[f"{place}.bias"].numel()
            assert found == expected
        assert "6.weight" not in item.delta
        assert isinstance(item.mask, WeightMask)
