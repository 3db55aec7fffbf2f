"""Submodels of several widths: scaler, clipping, statistics, windows, FjORD by hand, FedMP and its bandit; kept models."""

import dataclasses
import math
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from personal import Watching, client_context, deep_problem, server_context, tiny_run, training, update, watched
from torch import nn

import sparsekit_fl as fl
from sparsekit import trace_units
from sparsekit.allocation.shares import keep_count
from sparsekit.bandit import Interval
from sparsekit.graph import UnitMask
from sparsekit_fl.checkpoint import State
from sparsekit_fl.methods import efd, fedavg, fedlps, fedrolex, fjord, heterofl
from sparsekit_fl.methods.bandits import EUCB
from sparsekit_fl.methods.base import ClientInfo
from sparsekit_fl.methods.client import Task, keep_model, sgd
from sparsekit_fl.methods.submodels import FedMP
from sparsekit_fl.server import Server, learn_statistics, statistics_of
from sparsekit_fl.spec import RunSpec, _deployed, run_client
from sparsekit_fl.testing import TinyNet, tiny_clients, tiny_config, tiny_problem


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([(0.5, 1.0), (0.9, 2.0), (0.9, 1.5)], 2),
        ([(0.5, 1.0), (0.5, 1.0), (0.4, 0.1)], 0),
        ([(0.5, math.nan), (0.5, 9.0), (0.4, 0.1)], 1),
        ([(None, 1.0), (None, math.nan), (None, 0.5)], 2),
    ],
)
def test_the_best_of_all_models_is_deployed_by_validation_data_for_every_method_alike(scores, best, monkeypatch):
    """Of the newest, the last trained, and the newest trained once more; without validation data it is the newest."""
    spec, client, ctx = client_context(fedavg(), config=replace(tiny_config(), deploy="best"), purpose="personal")
    keep_model(ctx, sgd(ctx, Task(state=spec.initial)))
    kept, found = ctx.memory["kept"]["state"]["first.weight"], []

    def score(ctx, split, **_):
        accuracy, loss = scores[len(found)]
        found.append(ctx.masked.narrow_state()["first.weight"].clone())
        return {"loss": (10 * loss, 10.0)} | ({} if accuracy is None else {"accuracy": (10 * accuracy, 10.0)})

    monkeypatch.setattr(fl.ClientContext, "score", score)
    assert torch.equal(_deployed(ctx, fedavg(), spec.initial).state["first.weight"], found[best])
    newest, trained, tuned = found
    assert torch.equal(newest, spec.initial["first.weight"])
    assert torch.equal(trained, kept)
    assert not torch.equal(tuned, newest)
    nobody = replace(ctx, client=replace(client, data=replace(client.data, val=client.data.val.take(np.arange(0)))))
    assert _deployed(nobody, fedavg(), spec.initial).state is spec.initial


class Line(nn.Module):
    """Two inputs, two hidden units that pass them on, three logits; no bias anywhere."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.last = nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(2))
            self.last.weight.copy_(torch.ones(3, 2))

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def one_client(labels):
    data = fl.TensorData((torch.tensor([[1.0, 2.0]] * len(labels)),), torch.tensor(labels))
    client = fl.Client(id=0, data=fl.ClientData(train=data, val=data, test=data), capability=fl.Capability(ratio=0.5))
    problem = fl.Problem(model=Line, example_inputs=(data.inputs[0][:2],))
    config = fl.RunConfig(rounds=1, cohort=1, training=fl.TrainingConfig(local_epochs=1, batch_size=2, lr=1.0))
    return client, problem, config


PLAIN = heterofl(clip=None, scaler=False)


def trained(method, labels, *, ratio=0.5):
    client, problem, config = one_client(labels)
    spec, _, ctx = client_context(method, problem, config, client=client)
    mask = UnitMask({"first": torch.tensor([True, ratio == 1.0])})
    return method.train(ctx, fl.Task(state=spec.initial, mask=mask, ratio=ratio)), ctx


@pytest.mark.parametrize(("method", "scale"), [(heterofl(clip=None), 2.0), (PLAIN, 1.0), (efd(clip=None), 1.0)])
def test_heterofls_scaler_alone_divides_what_hidden_layers_give_while_training(method, scale):
    # Unit 0 alone is kept: it gives 1, the scaler makes it 2, and all logits are equal. The gradient of each logit is
    # 1/3 − [class], times the scaled activation.
    result, ctx = trained(method, [0, 0])
    expected = torch.ones(3, 1) - scale * (torch.full((3, 1), 1 / 3) - torch.tensor([[1.0], [0.0], [0.0]]))
    assert torch.allclose(result.state["last.weight"], expected)
    hidden = ctx.masked.model.first(torch.tensor([[1.0, 2.0]]))
    assert torch.allclose(hidden, result.state["first.weight"] @ torch.tensor([1.0, 2.0]))


def test_the_best_model_of_a_client_runs_as_it_was_trained_with_the_scaler_in_its_weights():
    client, problem, config = one_client([0, 0])
    mask, method = UnitMask({"first": torch.tensor([True, False])}), heterofl(clip=None)
    spec, _, ctx = client_context(method, problem, replace(config, deploy="best", capability_of="units"), client=client)
    result, kept = method.train(ctx, fl.Task(state=spec.initial, mask=mask, ratio=0.5)), ctx.memory["kept"]["state"]
    assert torch.equal(kept["first.weight"], 2.0 * result.state["first.weight"])
    assert torch.equal(kept["last.weight"], result.state["last.weight"]), "only layers that lost units are scaled"


def test_the_server_keeps_buffers_for_each_level_and_a_new_level_begins_with_the_nearest():
    memory: dict = {}

    def learn(**changes):
        """Changes of the counter, which is 10 at first, by the ratio of the one client that sends each."""
        ratios = {"whole": 1.0, "half": 0.5, "quarter": 0.25}
        ctx = server_context(parameters=("w", "b", "out"), memory=memory, clients=3)
        ctx.tasks.update({place: Task(ratio=ratios[name]) for place, name in enumerate(changes)})
        found = learn_statistics(ctx, [update(place, [0.0] * 3, n=n) for place, n in enumerate(changes.values())])
        return {name: int(tensor) for name, tensor in found.items()}

    assert learn(whole=5) == {}, "all train the whole model: the method averages"
    assert statistics_of(memory, 1.0) == {}
    assert learn(whole=2, quarter=6) == {"n": 12}, "the global model has those of the widest"
    assert learn(half=1) == {"n": 12}
    held = {ratio: int(statistics_of(memory, ratio)["n"]) for ratio in (1.0, 0.9, 0.5, 0.3, 0.25, 1 / 16)}
    assert held == {1.0: 12, 0.9: 12, 0.5: 13, 0.3: 13, 0.25: 16, 1 / 16: 16}
    assert learn(whole=4, half=-1) == {"n": 16}
    assert int(statistics_of(memory, 0.5)["n"]) == 12


@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "efd", "fjord", "fedlps", "rcr-fix", "fedp3"])
def test_a_device_trains_and_deploys_with_the_statistics_of_its_width_and_no_more_than_it_can_run(name):
    watching = Watching()
    result = tiny_run(name, engine=watching, rounds=6, redraw_capability=False)
    sent: dict = {}  # task and round → ratio → running means
    for request, _ in watching.seen:
        mean = request.received["norm.running_mean"]
        assert torch.equal(sent.setdefault((request.task, request.round), {}).setdefault(request.ratio, mean), mean)
    assert len({tuple(mean.tolist()) for mean in sent["score", 6].values()}) == 3, "levels differ"
    capability = {request.client_id: request.capability.ratio for request, _ in watching.seen}
    for one in result.final.per_client:
        assert (one.ratio or 1.0) <= capability[one.id]


@pytest.mark.parametrize("method", ["heterofl", "fjord", "hermes", "fedspa", "ditto"])
def test_a_client_s_saved_model_is_the_one_that_was_scored(method, tmp_path):
    result, clients, problem = tiny_run(method, rounds=2, out=tmp_path), tiny_clients(), tiny_problem()
    for score in result.final.per_client:
        module, data = fl.load_model(tmp_path, score.id, model=problem.model), clients[score.id].data.test
        with torch.no_grad():
            loss = problem.loss(module.eval()(*data.inputs), data.targets)
        assert float(loss) == pytest.approx(score.personal["loss"], rel=1e-5)


def test_steps_are_clipped_at_the_smaller_of_both_norms():
    start = Line().state_dict()
    free, _ = trained(PLAIN, [0, 0])
    before = {name: value[:, :1] if name == "last.weight" else value[:1] for name, value in start.items()}
    full = math.sqrt(sum(float((free.state[name] - before[name]).square().sum()) for name in before))
    clipped, _ = trained(heterofl(clip=full / 4, scaler=False), [0, 0])
    moved = math.sqrt(sum(float((clipped.state[name] - before[name]).square().sum()) for name in before))
    assert moved == pytest.approx(full / 4, rel=1e-3)
    loose, _ = trained(heterofl(clip=1e6, scaler=False), [0, 0])
    assert all(torch.allclose(loose.state[name], free.state[name]) for name in before)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 1 / 16])
def test_fedrolexs_window_begins_at_the_round_and_trains_every_unit_equally_often(ratio):
    graph = trace_units(TinyNet(), torch.zeros(2, 6))
    roster = {0: ClientInfo(examples=10, capability=fl.Capability(ratio=ratio))}
    counts = torch.zeros(8, dtype=torch.int64)
    for round in range(1, 9):
        window = fedrolex().assign(server_context(round=round, roster=roster, graph=graph), 0).mask["first"]
        assert window.nonzero().flatten().tolist() == sorted((round + k) % 8 for k in range(keep_count(ratio, 8)))
        counts += window
    assert counts.tolist() == [keep_count(ratio, 8)] * 8


def test_efd_draws_other_units_for_every_client_and_round():
    config = dataclasses.replace(tiny_config(rounds=4), capability_levels=(0.5,))
    _, updates = watched(efd(), config=config)
    drawn = {tuple(update.mask["first"].tolist()) for update in updates}
    assert len(drawn) > 10
    assert all(sum(mask) == 4 for mask in drawn)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fjord_equals_masked_training_written_by_hand(momentum):
    """Narrow modules on parts of the leaves against a dense model whose units are silenced, step for step and pass for pass."""
    config = dataclasses.replace(training(tiny_config(rounds=1), momentum=momentum), capability_levels=(0.5, 0.25))
    method = fjord()
    spec, _, ctx = client_context(method, deep_problem(), config)
    ours = method.train(ctx, Task(state=spec.initial))
    _, _, ctx = client_context(method, deep_problem(), config)
    model = deep_problem().model()
    model.load_state_dict(spec.initial)
    batches = ctx.batches()
    drawn = iter(ctx.rng.integers(3, size=len(batches.bounds) * 2).tolist())
    velocity = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    flops = 0
    for epoch in batches:
        for batch in epoch:
            width = (0.25, 0.5, 1.0)[next(drawn)]
            count = keep_count(width, 8)
            # Two FLOPs for each weight of a 6-8-8-3 network of that width and for each example, backward twice as many.
            flops += 3 * 2 * (6 * count + count * count + 3 * count) * batch.size
            kept = (torch.arange(8) < count).float()
            hidden = torch.relu(model[0](batch.inputs[0])) * kept
            logits = model[4](torch.relu(model[2](hidden)) * kept)
            loss = torch.nn.functional.cross_entropy(logits, batch.targets)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for name, value in model.named_parameters():
                    velocity[name] = momentum * velocity[name] + value.grad
                    value -= 0.1 * velocity[name]
    torch.testing.assert_close(ours.state, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    assert ours.work.flops == flops


@pytest.mark.parametrize(
    ("losses", "seconds", "rewards"),
    [
        # Times 1 and 3 have a mean of 2: both gaps are a half. A worse loss is a negative reward, slow or fast.
        ([(2.0, 3.0), (1.5, 3.5)], (1.0, 3.0), [0.5 / 0.5, -0.5 / 0.5]),
        # Finishing on time is no infinite reward.
        ([(2.0,), (1.0,)], (1.0,), [1.0 / 0.1]),
    ],
)
def test_the_reward_is_the_loss_decrease_over_the_gap_to_the_mean_time(losses, seconds, rewards):
    memory = defaultdict(dict)
    for round, now in enumerate(losses, 1):
        ctx = server_context(round=round, rounds=100, rng=[5, round], client=memory)
        for client_id in range(len(now)):
            FedMP().ratio_of(ctx, client_id)
        told = [{"metrics": {"loss": loss}, "cost": fl.Cost(simulated_seconds=spent)} for loss, spent in zip(now, seconds)]
        FedMP().aggregate(ctx, [update(k, [0.0] * 3, **one) for k, one in enumerate(told)])
    for client_id, each in enumerate(rewards):
        ((_, reward),) = FedMP()._bandit(ctx, client_id).bandit.told
        assert reward == pytest.approx(each)


def e_ucb(low, seed=0):
    return EUCB(Interval(low, 1.0), arms=1, min_width=0.05, rng=np.random.default_rng(seed))


def told(bandit, value, reward):
    bandit.tell(replace(bandit.ask(), value=value), reward)


def test_the_indices_of_a_trace_of_e_ucb(monkeypatch):
    monkeypatch.setattr(sys.modules[EUCB.__module__], "_DISCOUNT", 0.5)
    bandit = e_ucb(0.0001)
    assert bandit.indices() == (math.inf,)
    for value, reward in ((0.5, 1.0), (0.2, 0.5), (0.7, 0.25)):
        told(bandit, value, reward)
    # The first splits [0, 1], the second [0, 0.5], the third [0.5, 1]; a reward stays in the part that begins at its ratio.
    weights, total = (0.25, 0.5, 1.0), math.log(1.75)
    found = bandit.indices()
    assert found[0] == math.inf
    for index, weight, reward in zip(found[1:], (weights[1], weights[0], weights[2]), (0.5, 1.0, 0.25), strict=True):
        assert index == pytest.approx(reward + math.sqrt(2 * total / weight))


@given(st.lists(st.tuples(st.floats(0.1, 1.0), st.floats(-5.0, 5.0)), max_size=30), st.integers(0, 9))
def test_e_ucb_draws_from_an_arm_of_largest_index_and_its_arms_cover_the_ratios(steps, seed):
    bandit = e_ucb(0.1, seed)
    for value, reward in steps:
        indices, arms, pull = bandit.indices(), bandit.arms, bandit.ask()
        assert 0.1 <= pull.value <= 1.0
        assert [arm.low <= pull.value < arm.high for arm in arms].index(True) == indices.index(max(indices))
        bandit.tell(replace(pull, value=value), reward)
    arms = bandit.arms
    assert (arms[0].low, arms[-1].high) == (0.1, 1.0)
    assert all(below.high == above.low for below, above in pairwise(arms))
    assert all(arm.high - arm.low >= 0.05 * 0.9 - 1e-12 for arm in arms)
    assert len(bandit.told) == len(steps)


@pytest.mark.parametrize(("make", "expected"), [(efd, 1.0), (fjord, 1.0), (heterofl, 2.0), (fedrolex, 2.0)])
def test_efd_and_fjord_weigh_clients_by_examples_heterofl_and_fedrolex_alike(make, expected):
    updates = [update(0, [4.0, 0.0, 0.0], examples=1), update(1, [0.0, 0.0, 0.0], examples=3)]
    assert make().aggregate(server_context(), updates)["w"][0, 0] - 1.0 == expected


class Scaled(nn.Module):
    """A network whose outputs depend on a buffer that it replaces in each training step, and on batch norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        if self.training:
            self.scale = self.scale * 1.5
        return self.last(torch.relu(self.norm(self.first(x)))) * self.scale


@pytest.mark.parametrize("method", [fedlps(), fjord()])
def test_modules_of_narrower_submodels_bring_nothing_from_one_client_to_the_next(method):
    problem = fl.Problem(model=Scaled, example_inputs=(torch.zeros(2, 6),))
    clients = {client.id: client for client in tiny_clients(4)}

    def trained(spec, id):
        server = Server(spec, clients, State(0, dict(spec.initial)))
        ctx = server.context(1)
        request = server._request(ctx, id, method.assign(ctx, id))
        return run_client(spec, clients[id], request, {})[0].update.delta

    config = replace(tiny_config(), capability_levels=(1.0, 0.5, 0.25))
    shared = RunSpec.build(method, problem, config)
    for id in (0, 1, 2, 3, 1):
        alone = trained(RunSpec.build(method, problem, config), id)
        assert all(torch.equal(one, alone[name]) for name, one in trained(shared, id).items())
