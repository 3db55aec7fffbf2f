"""FedPer, FedRep and FedP3: what travels, what stays, who trains when, and which models have no head."""

from __future__ import annotations

import pytest
import torch
from personal import client_context, combine, training, update, watched
from torch import nn

from sparsekit.allocation.shares import keep_count
from sparsekit.graph import WeightMask
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.methods import fedavg, fedp3, fedper, fedrep, local
from sparsekit_fl.methods.fedp3 import own_layers
from sparsekit_fl.methods.fedrep import HeadThenBody
from sparsekit_fl.policies.aggregate import Mean
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server.loop import run
from sparsekit_fl.server.server import Server
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

HEAD = {"last.weight", "last.bias"}


@pytest.mark.parametrize("method", [fedper, fedrep])
def test_the_head_never_travels(method) -> None:
    result, updates = watched(method())
    assert all(set(item.delta).isdisjoint(HEAD) and "first.weight" in item.delta for item in updates)
    start = run(local(), tiny_problem(), tiny_clients(), tiny_config(rounds=1)).state
    assert all(torch.equal(result.state[name], start[name]) for name in HEAD)
    assert not torch.equal(result.state["first.weight"], start["first.weight"])
    assert result.final.personal["loss"] < result.final.shared["loss"]


@pytest.mark.same_bits
def test_the_base_is_averaged_as_in_fedavg_where_heads_are_equal() -> None:
    """In the first round every head is that of round 0, so the base learns what it learns in FedAvg."""
    ours = watched(fedper(), config=tiny_config(rounds=1))[0]
    plain = watched(fedavg(), config=tiny_config(rounds=1))[0]
    assert all(torch.equal(ours.state[name], plain.state[name]) for name in plain.state if name not in HEAD)


def test_fedrep_trains_the_head_first_and_the_body_after() -> None:
    spec, _, ctx = client_context(fedrep(), config=training(tiny_config(), local_epochs=5))
    seen = []

    class Spy(HeadThenBody):
        def _phase(self, ctx, trained, frozen, epochs):
            before = {name: leaf.detach().clone() for name, leaf in ctx.masked.named_weights().items()}
            log = super()._phase(ctx, trained, frozen, epochs)
            moved = {n for n, leaf in ctx.masked.named_weights().items() if not torch.equal(before[n], leaf)}
            seen.append((moved, epochs, log.examples))
            return log

    result = Spy().train(ctx, spec.initial, None, 1.0)
    assert [(epochs, examples) for _, epochs, examples in seen] == [(2, 48), (3, 72)]
    assert seen[0][0] == HEAD
    # A bias in front of batch norm has no gradient.
    assert seen[1][0] | {"first.bias"} == set(dict(tiny_problem().model().named_parameters())) - HEAD
    assert all(leaf.requires_grad for leaf in ctx.masked.weights())
    assert len(result.log.loss) == 5


def test_fedreps_head_epochs_cost_a_forward_pass_and_the_head() -> None:
    spec, _, ctx = client_context(fedrep(), config=training(tiny_config(), local_epochs=5))
    work = HeadThenBody().train(ctx, spec.initial, None, 1.0).work
    whole, head = 2 * (48 + 24), 2 * 24
    assert work.flops_compact == (whole + 2 * head) * 48 + 3 * whole * 72
    # As published: five whole epochs of three full batches.
    assert work.flops_rowmask == 3 * (whole + 8 + 3) * 5 * 24


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
