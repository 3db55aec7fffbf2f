"""FedPer, FedRep and FedP3: what travels, what stays, who trains when, and which models have no head."""

import sys

import pytest
import torch
from personal import client_context, tiny_run, training, watched
from torch import nn

from sparsekit.allocation.shares import keep_count
from sparsekit_fl.methods import fedp3, fedper, fedrep
from sparsekit_fl.methods.client import Task
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import tiny_clients, tiny_config

fedrep_module = sys.modules["sparsekit_fl.methods.whole_models"]
HEAD = {"last.weight", "last.bias"}


@pytest.mark.parametrize("method", [fedper, fedrep])
def test_the_head_never_travels(method) -> None:
    result, updates = watched(method())
    assert all(set(item.delta).isdisjoint(HEAD) and "first.weight" in item.delta for item in updates)
    start = tiny_run("local", rounds=1).state
    assert all(torch.equal(result.state[name], start[name]) for name in HEAD)
    assert not torch.equal(result.state["first.weight"], start["first.weight"])
    assert result.final.personal["loss"] < result.final.shared["loss"]


def test_fedrep_trains_the_head_first_and_the_body_after(monkeypatch) -> None:
    spec, _, ctx = client_context(fedrep(), config=training(tiny_config(), local_epochs=5))
    seen, sgd, trains = [], fedrep_module.sgd, set(spec.parameters)

    def heard(client, task, **how):
        result = sgd(client, task, **how)
        moved = {name for name in trains if not torch.equal(result.state[name], task.state[name])}
        seen.append((moved, len(result.log.loss), result.log.examples))
        return result

    monkeypatch.setattr(fedrep_module, "sgd", heard)
    result = fedrep().train(ctx, Task(state=spec.initial))
    assert [(epochs, examples) for _, epochs, examples in seen] == [(2, 48), (3, 72)]
    assert seen[0][0] == HEAD
    # A bias in front of batch norm has no gradient.
    assert seen[1][0] | {"first.bias"} == trains - HEAD
    assert all(leaf.requires_grad for leaf in ctx.masked.weights())
    assert len(result.log.loss) == 5


def four() -> Problem:
    """Four layers: three that clients answer for, and the head."""
    return Problem(model=_four, example_inputs=(torch.zeros(2, 6),))


def _four() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def test_layers_are_dealt_cyclically() -> None:
    graph = RunSpec.build(fedp3(), four(), tiny_config()).graph

    def names(client_id, count):
        return [layer.name for layer in fedp3(layers=count).own_layers(graph, client_id)]

    assert [names(k, 2) for k in range(4)] == [["0", "2"], ["2", "4"], ["4", "0"], ["0", "2"]]
    assert names(1, 1) == ["2"]
    assert names(1, 3) == names(1, 9) == ["2", "4", "0"]


@pytest.mark.parametrize("layers", [1, 2])
def test_the_layers_that_come_whole_are_those_that_go_up_and_the_head_never_travels(layers) -> None:
    method, problem = fedp3(layers=layers), four()
    spec = RunSpec.build(method, problem, tiny_config())
    server = Server(spec, {client.id: client for client in tiny_clients()})
    for request in server.requests(1):
        assert "6.weight" not in request.state
        own = {layer.name for layer in method.own_layers(spec.graph, request.client_id)}
        others = {f"{name}.weight": spec.graph.shapes[f"{name}.weight"].numel() for name in {"0", "2", "4"} - own}
        assert request.mask.counts() == {name: keep_count(0.9, size) for name, size in others.items()}
    _, updates = watched(method, problem=problem)
    for update in updates:
        own = {layer.name for layer in method.own_layers(spec.graph, update.client_id)}
        assert {name.split(".")[0] for name, delta in update.delta.items() if delta.numel()} == own


def test_fedp3_trains_the_first_units_that_its_capability_allows() -> None:
    spec, _, ctx = client_context(fedp3(), four(), tiny_config())
    result = fedp3().train(ctx, Task(state=spec.initial, ratio=0.5))
    assert all(keep.tolist() == [True] * 4 + [False] * 4 for keep in result.mask.values())


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_fedrep_passes_over_its_data_as_often_as_fedper(epochs) -> None:
    config = training(tiny_config(rounds=1), local_epochs=epochs)
    ours, theirs = (tiny_run(method(), config=config).cost for method in (fedrep, fedper))
    assert ours.flops_paper == theirs.flops_paper
    assert ours.flops < theirs.flops
