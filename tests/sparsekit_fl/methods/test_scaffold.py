"""SCAFFOLD: equal to its algorithm written out in plain torch; without control variates it is FedAvg."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from personal import client_context, deep_problem, server_context, watched

import sparsekit_fl as fl
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.methods import fedavg, scaffold
from sparsekit_fl.methods.scaffold import ControlledMean
from sparsekit_fl.policies import Assignment, Mean, Update
from sparsekit_fl.policies.aggregate import median
from sparsekit_fl.testing import tiny_clients, tiny_problem

LR, STEPS = 0.2, 3
# Each epoch is one batch of all examples, so that nothing is drawn but the cohorts.
CONFIG = fl.RunConfig(rounds=4, cohort=2, training=fl.TrainingConfig(local_epochs=STEPS, batch_size=99, lr=LR), seed=3)


def by_hand(cohorts, clients, server_lr):
    """Algorithm 1 of the paper with option II, word for word; returns x."""
    model = deep_problem().model()
    x = client_context(scaffold(), deep_problem(), CONFIG)[0].initial
    c = {name: torch.zeros_like(value) for name, value in x.items()}
    own = {client.id: dict(c) for client in clients}
    for cohort in cohorts:
        moved, controls = [], []
        for k in cohort:
            data = clients[k].data.train
            model.load_state_dict(x)
            for _ in range(STEPS):
                loss = F.cross_entropy(model(data.inputs[0]), data.targets)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for (name, y), gradient in zip(model.named_parameters(), gradients, strict=True):
                        y -= LR * (gradient - own[k][name] + c[name])
            y = {name: value.clone() for name, value in model.state_dict().items()}
            new = {name: own[k][name] - c[name] + (x[name] - y[name]) / (STEPS * LR) for name in x}
            moved.append({name: y[name] - x[name] for name in x})
            controls.append({name: new[name] - own[k][name] for name in x})
            own[k] = new
        x = {name: x[name] + server_lr * sum(delta[name] for delta in moved) / len(moved) for name in x}
        c = {name: c[name] + sum(delta[name] for delta in controls) / len(clients) for name in x}
    return x


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_a_run_equals_the_algorithm_of_the_paper_in_plain_torch(server_lr):
    clients = tiny_clients(4)
    result = fl.run(scaffold(), deep_problem(), clients, replace(CONFIG, server_lr=server_lr))
    expected = by_hand([record.cohort for record in result.rounds], clients, server_lr)
    plain = fl.run(replace(fedavg(), aggregate=Mean("uniform")), deep_problem(), clients, replace(CONFIG, server_lr=server_lr))
    for name, value in expected.items():
        torch.testing.assert_close(result.state[name], value, rtol=1e-5, atol=1e-6)
        assert float((plain.state[name] - value).abs().max()) > 1e-3, "the correction is there to be seen"


def test_control_variates_go_down_and_up_and_count_on_the_wire():
    result, updates = watched(scaffold())
    plain, _ = watched(replace(fedavg(), aggregate=Mean("uniform")))
    parameters = [name for name, _ in tiny_problem().model().named_parameters()]
    assert all(sorted(item.extra) == sorted(parameters) for item in updates)
    assert result.rounds[0].loss == plain.rounds[0].loss  # all are zero in the first round
    assert result.cost.uplink_bytes > 1.5 * plain.cost.uplink_bytes
    assert result.cost.downlink_bytes > 1.5 * plain.cost.downlink_bytes
    assert result.cost.flops_compact == plain.cost.flops_compact


@pytest.mark.parametrize("extra", [{}, {"w": torch.zeros(1)}, {"w": torch.zeros(1, 3), "b": torch.zeros(1)}])
def test_an_update_without_the_control_variates_that_were_sent_is_refused(extra):
    ctx = replace(server_context(), parameters=frozenset({"w"}))
    policy = ControlledMean("uniform")
    sent = Assignment(round=2, client_id=1, state=ctx.state, extra=policy.broadcast(ctx, 1))
    update = Update(round=2, client_id=1, examples=1, delta=ctx.state, extra={"w": torch.ones(1, 3)})
    policy.validate(ctx, update, sent)
    with pytest.raises(UpdateError, match="client 1 lacks control variates"):
        policy.validate(ctx, replace(update, extra=extra), sent)


def test_one_client_of_three_cannot_move_the_control_variates_under_the_median():
    ctx = replace(server_context(clients=3), parameters=frozenset({"w"}))
    updates = [
        Update(round=2, client_id=k, examples=1, delta=ctx.state, extra={"w": torch.full((1, 3), value)})
        for k, value in enumerate((1.0, 1e30, 2.0))
    ]
    state = ControlledMean("uniform").combine(ctx, ctx.state, [(update, 0) for update in updates], median)
    assert set(state) == set(ctx.state)
    assert ctx.memory["w"].tolist() == [[2.0, 2.0, 2.0]]
