"""FedAvg by hand, local training, FedProx, Ditto, Per-FedAvg; FedPer, FedRep and FedP3, whose clients keep layers."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from personal import ONE_STEP, chain, client_context, deep_problem, tiny_run, training, watched

from sparsekit.allocation.shares import keep_count
from sparsekit.rng import torch_scope
from sparsekit_fl.client.context import Rngs, stream
from sparsekit_fl.methods import ditto, fedlps_paper, fedp3, fedprox, fedrep, local, per_fedavg
from sparsekit_fl.methods.client import Task
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import TinyNet, tiny_clients, tiny_config, tiny_problem


@pytest.mark.same_bits
def test_equals_a_loop_written_by_hand():
    clients, config = tiny_clients(), tiny_config(rounds=3)
    result = tiny_run(clients=clients, config=config)
    with torch_scope(stream(config.seed, "model")):
        model = TinyNet()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for round in range(1, 4):
        rng = Rngs(config.seed, "server", round)["sampling"]
        cohort = sorted(rng.choice(8, size=4, replace=False).tolist())
        sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
        for client_id in cohort:
            data = clients[client_id].data.train
            rng = Rngs(config.seed, "client", round, client_id)["local"]
            orders = [rng.permutation(len(data)) for _ in range(2)]
            model.load_state_dict(state)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for order in orders:
                pieces = np.split(order, range(8, len(data), 8))
                if len(pieces[-1]) == 1:
                    pieces[-2:] = [np.concatenate(pieces[-2:])]
                for piece in pieces:
                    (inputs,), targets = data.batch(torch.from_numpy(piece))
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
            for name, tensor in model.state_dict().items():
                sums[name] += (tensor - state[name]).double() * (len(data) / len(clients[cohort[0]].data.train))
        weight = sum(len(clients[i].data.train) / len(clients[cohort[0]].data.train) for i in cohort)
        for name, total in sums.items():
            value = state[name].double() + total / weight
            state[name] = (value if state[name].is_floating_point() else value.round()).to(state[name].dtype)
        assert result.rounds[round - 1].cohort == tuple(cohort)
    assert all(torch.equal(result.state[name], state[name]) for name in state)


def test_the_global_model_never_moves_and_personal_models_learn():
    config = tiny_config(rounds=8)
    result = tiny_run(local(), config=config)
    initial = RunSpec.build(local(), tiny_problem(), config).initial
    assert all(torch.equal(result.state[name], initial[name]) for name in initial)
    assert result.final.personal["accuracy"] > tiny_run("fedavg", rounds=1).final.shared["accuracy"]
    assert result.final.shared is None, "nobody shares a model"


LEARNED = fedlps_paper(ratios=0.5, mu=0.3)


@pytest.mark.parametrize("method", [fedprox(mu=0.5), LEARNED], ids=["fedprox", "fedlps"])
def test_the_shortcut_in_place_equals_the_longer_gradient(method):
    """Plain SGD interpolates the leaves, in fedlps under a moving mask; weight decay of almost nothing takes the other way."""
    near, far = (tiny_run(method, config=training(tiny_config(rounds=2), weight_decay=decay)).state for decay in (0.0, 1e-30))
    assert all(torch.allclose(value.double(), far[name].double(), atol=1e-5) for name, value in near.items())


def test_without_a_pull_the_personal_models_are_those_of_local_training():
    ours, alone = watched(ditto(lam=0.0))[0], watched(local())[0]
    assert [score.personal for score in ours.final.per_client] == [score.personal for score in alone.final.per_client]


def gradient(weights, data):
    model = deep_problem().model()
    model.load_state_dict(weights)
    torch.nn.functional.cross_entropy(model(data.inputs[0]), data.targets).backward()
    return {name: value.grad for name, value in model.named_parameters()}


def moved(weights, direction, rate):
    return {name: value - rate * direction[name] for name, value in weights.items()}


def test_one_step_by_hand():
    """v ← v − η (∇F(v) + λ (v − ω)), on one batch."""
    spec, client, ctx = client_context(ditto(lam=0.5), deep_problem(), ONE_STEP)
    own = {name: tensor + 0.1 for name, tensor in spec.initial.items()}
    ctx.memory["kept"] = {"state": own, "ratio": 1.0, "mask": None}
    spec.method.train(ctx, Task(state=spec.initial))
    slope = gradient(own, client.data.train)
    for name, value in own.items():
        expected = value - 0.1 * (slope[name] + 0.5 * (value - spec.initial[name]))
        assert torch.allclose(ctx.memory["kept"]["state"][name], expected, atol=1e-6), name


def test_a_first_order_step_by_hand():
    """One batch holds all examples, so D and D′ are the same and the order in them does not matter."""
    spec, client, ctx = client_context(per_fedavg(), deep_problem(), ONE_STEP)
    result = per_fedavg(adaptation_lr=0.3).train(ctx, Task(state=spec.initial))
    adapted = moved(spec.initial, gradient(spec.initial, client.data.train), 0.3)
    expected = moved(spec.initial, gradient(adapted, client.data.train), 0.1)
    torch.testing.assert_close(result.state, expected)


def test_the_deployed_model_is_one_step_away_from_the_global_one():
    spec, client, ctx = client_context(per_fedavg(), deep_problem(), ONE_STEP, purpose="personal")
    found = per_fedavg(adaptation_lr=0.2).deploy(ctx, spec.initial)
    torch.testing.assert_close(found.state, moved(spec.initial, gradient(spec.initial, client.data.train), 0.2))


fedrep_module = sys.modules["sparsekit_fl.methods.whole_models"]


def test_fedrep_trains_the_head_first_and_the_body_after(monkeypatch):
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
    assert seen[0][0] == (head := {"last.weight", "last.bias"})
    # A bias in front of batch norm has no gradient.
    assert seen[1][0] | {"first.bias"} == trains - head
    assert all(leaf.requires_grad for leaf in ctx.masked.parameters())
    assert len(result.log.loss) == 5


def test_entries_that_do_not_train_get_no_gradient():
    spec, _, ctx = client_context(fedrep())
    seen = set()

    def forward(batch):
        seen.update(name for name, leaf in ctx.masked.narrow_model.named_parameters().items() if leaf.requires_grad)
        outputs = ctx.masked.model(*batch.inputs)
        return outputs, spec.problem.loss(outputs, batch.targets)

    fedrep_module.sgd(ctx, Task(state=spec.initial), only={"last.weight"}, forward=forward)
    assert seen == {"last.weight"}


FOUR = chain(6, 8, 8, 8, 3)  # three layers that clients answer for, and the head


def test_layers_are_dealt_cyclically():
    layers = RunSpec.build(fedp3(), FOUR, tiny_config()).layers

    def names(client_id, count):
        return [layer.name for layer in fedp3(layers=count).own_layers(layers, client_id)]

    assert [names(k, 2) for k in range(4)] == [["0", "2"], ["2", "4"], ["4", "0"], ["0", "2"]]
    assert names(1, 1) == ["2"]
    assert names(1, 3) == names(1, 9) == ["2", "4", "0"]


@pytest.mark.parametrize("layers", [1, 2])
def test_the_layers_that_come_whole_are_those_that_go_up_and_the_head_never_travels(layers):
    method, problem = fedp3(layers=layers), FOUR
    spec = RunSpec.build(method, problem, tiny_config())
    server = Server(spec, {client.id: client for client in tiny_clients()})
    for request in server.requests(server.context(1)):
        assert "6.weight" not in request.state
        own = {layer.name for layer in method.own_layers(spec.layers, request.client_id)}
        others = {f"{name}.weight": spec.graph.shapes[f"{name}.weight"].numel() for name in {"0", "2", "4"} - own}
        assert request.mask.counts() == {name: keep_count(0.9, size) for name, size in others.items()}
    _, updates = watched(method, problem=problem)
    for update in updates:
        own = {layer.name for layer in method.own_layers(spec.layers, update.client_id)}
        assert {name.split(".")[0] for name, delta in update.delta.items() if delta.numel()} == own


def test_fedp3_trains_the_first_units_that_its_capability_allows():
    spec, _, ctx = client_context(fedp3(), FOUR, tiny_config())
    result = fedp3().train(ctx, Task(state=spec.initial, ratio=0.5))
    kept = round(ctx.width(0.5) * 8)
    assert 4 < kept < 8
    assert all(keep.tolist() == [True] * kept + [False] * (8 - kept) for keep in result.mask.values())
