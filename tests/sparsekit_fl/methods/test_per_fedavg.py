"""Per-FedAvg: steps by hand, the cost of every gradient, and FedAvg where nothing adapts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from personal import ONE_STEP, client_context, deep_problem, watched

from sparsekit_fl.methods import fedavg, per_fedavg, with_settings
from sparsekit_fl.methods.per_fedavg import AdaptedModel, MetaSgd
from sparsekit_fl.testing import tiny_clients, tiny_config


def gradient(weights, data):
    model = deep_problem().model()
    model.load_state_dict(weights)
    torch.nn.functional.cross_entropy(model(data.inputs[0]), data.targets).backward()
    return {name: value.grad for name, value in model.named_parameters()}


def moved(weights, direction, rate):
    return {name: value - rate * direction[name] for name, value in weights.items()}


def test_a_first_order_step_by_hand() -> None:
    """One batch holds all examples, so D and D′ are the same and the order in them does not matter."""
    spec, client, ctx = client_context(per_fedavg(), deep_problem(), ONE_STEP)
    result = MetaSgd(adaptation_lr=0.3).train(ctx, spec.initial, None, 1.0)
    data, start = client.data.train, dict(spec.initial)
    adapted = moved(start, gradient(start, data), 0.3)
    expected = moved(start, gradient(adapted, data), 0.1)
    for name, value in expected.items():
        assert torch.allclose(result.state[name], value, atol=1e-6), name


def test_a_hessian_free_step_by_hand() -> None:
    spec, client, ctx = client_context(per_fedavg(), deep_problem(), ONE_STEP)
    result = MetaSgd(adaptation_lr=0.3, variant="hessian-free", delta=0.05).train(ctx, spec.initial, None, 1.0)
    data, start = client.data.train, dict(spec.initial)
    first = gradient(moved(start, gradient(start, data), 0.3), data)
    plus, minus = gradient(moved(start, first, -0.05), data), gradient(moved(start, first, 0.05), data)
    corrected = {name: first[name] - 0.3 * (plus[name] - minus[name]) / 0.1 for name in first}
    for name, value in moved(start, corrected, 0.1).items():
        assert torch.allclose(result.state[name], value, atol=1e-5), name


@pytest.mark.parametrize(("variant", "gradients"), [("first-order", 2), ("hessian-free", 4)])
def test_every_gradient_of_a_step_is_counted(variant, gradients) -> None:
    # Every batch of these clients is full, so that counted and executed work agree.
    clients = [client for client in tiny_clients() if len(client.data.train) == 24]
    config = dataclasses.replace(tiny_config(), cohort=2)
    ours = watched(with_settings(per_fedavg(), {"local.variant": variant}), clients=clients, config=config)[0]
    plain = watched(fedavg(), clients=clients, config=config)[0]
    assert ours.cost.flops_rowmask == gradients * plain.cost.flops_rowmask
    assert ours.cost.flops_compact == gradients * plain.cost.flops_compact


def test_the_deployed_model_is_one_step_away_from_the_global_one() -> None:
    spec, client, ctx = client_context(per_fedavg(), deep_problem(), ONE_STEP, kind="personal")
    found = AdaptedModel(adaptation_lr=0.2).model(ctx, spec.initial)
    expected = moved(dict(spec.initial), gradient(dict(spec.initial), client.data.train), 0.2)
    for name, value in expected.items():
        assert torch.allclose(found.state[name], value, atol=1e-6), name
    assert AdaptedModel(steps=0).model(ctx, spec.initial).state["0.weight"].equal(spec.initial["0.weight"])
