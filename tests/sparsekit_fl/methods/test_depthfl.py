"""Exits where a model names places; DepthFL: prefixes, losses and FedDyn by hand, the mean over holders, the part that runs."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from personal import ONE_STEP, chain, client_context, deep_problem, server_context, tiny_config, update
from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit_fl.methods import depthfl
from sparsekit_fl.methods.client import Task
from sparsekit_fl.methods.depthfl import affordable_depth, depth_entries, depth_flops, distillation_loss, with_exits
from sparsekit_fl.problem.metrics import IGNORED
from sparsekit_fl.problem.models import Cnn, NextWordLstm, Vgg
from sparsekit_fl.spec import RunSpec

CASES = {
    "cnn": (Cnn, (torch.zeros(2, 1, 28, 28),), ("conv2", "fc1"), (2, 10)),
    "vgg": (lambda: Vgg(11), (torch.zeros(2, 3, 32, 32),), ("features.4", "features.8", "features.15", "features.22"), (2, 10)),
    "lstm": (lambda: NextWordLstm(50, 20, 30), (torch.zeros(2, 9, dtype=torch.int64),), ("lstm2",), (2, 9, 50)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.same_bits
def test_places_and_outputs(name):
    build, inputs, places, shape = CASES[name]
    model = with_exits(build, inputs)
    assert model._places == places
    outputs = model.outputs(*inputs)
    assert [tuple(output.shape) for output in outputs] == [shape] * (len(places) + 1)
    model.eval()
    outputs = model.outputs(*inputs)
    assert torch.allclose(model(*inputs), torch.stack(outputs).mean(0))
    # The last output is the model's own.
    assert torch.equal(outputs[-1], model.model(*inputs))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_behind_an_exit_is_run_or_differentiated(depth):
    model = with_exits(Cnn, (torch.zeros(2, 1, 28, 28),))
    called = []
    for layer in ("conv1", "conv2", "fc1", "fc2"):
        getattr(model.model, layer).register_forward_hook(lambda *_, layer=layer: called.append(layer))
    outputs = model.outputs(torch.randn(2, 1, 28, 28), depth=depth)
    assert len(outputs) == depth
    assert called == ["conv1", "conv2", "fc1", "fc2"][: {1: 1, 2: 2, 3: 4}[depth]]
    torch.stack(outputs).sum().backward()
    trained = {name.split(".")[1] for name, value in model.model.named_parameters(prefix="model") if value.grad is not None}
    assert trained == set(called)
    assert [head.linear.weight.grad is not None for head in model.exits] == [k < depth for k in range(2)]


@pytest.mark.parametrize(
    ("model", "inputs", "places"),
    [
        (nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), torch.zeros(2, 6), ("2", "1")),  # another order
        (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), torch.zeros(2, 6), ("1", "9")),  # no such module
    ],
)
def test_places_that_cannot_have_an_exit_are_refused(model, inputs, places):
    model.exits_before = places
    with pytest.raises(InvalidValueError, match=r"exits need a model .* names \('.* and calls \["):
        with_exits(lambda: model, (inputs,))


def test_depth_follows_capability():
    spec = RunSpec.build(depthfl(), chain(*[6] * 7, 3, exits=("2", "4", "8", "10")), tiny_config())
    entries = depth_entries(spec.layers)
    assert len(entries) == 5
    assert all(smaller < larger for smaller, larger in itertools.pairwise(entries))
    work = depth_flops(spec.layers, spec.costs)
    # Six layers of 36 weights, of 6 inputs and 3 outputs the last and every exit, at two FLOPs each.
    assert work[0] < work[1]
    assert work[-1] == 2 * (6 * 36 + 5 * 18)
    assert [affordable_depth(spec.layers, spec.costs, flops / work[-1]) for flops in work] == [1, 2, 3, 4, 5]
    assert affordable_depth(spec.layers, spec.costs, 1e-6) == 1
    assert affordable_depth(spec.layers, spec.costs, 0.9999) == 4


def drifting():
    return server_context(clients=10, parameters=("w", "b", "out"))


def test_entries_become_the_mean_over_their_holders_minus_the_servers_drift():
    ctx = drifting()
    first, second = update(0, [3.0, 3.0, 3.0], b=4.0), update(1, [], keep=[False, False, False], b=2.0)
    found = depthfl().aggregate(ctx, [first, second])
    # One holder of ten moved w by 3: h = -0.1 · 0.1 · 3, and the entry moves by 3 - h / 0.1 = 3.3.
    assert torch.allclose(found["w"], torch.tensor([[4.3, 5.3, 6.3]]))
    # Two holders, mean 3: 3 + 0.6.
    assert torch.allclose(found["b"], torch.tensor([13.6]))
    again = depthfl().aggregate(dataclasses.replace(ctx, state=found), [first])
    assert torch.allclose(again["w"], torch.tensor([[4.3, 5.3, 6.3]]) + 3.0 + 0.6)
    # What nobody holds stays.
    assert depthfl().aggregate(drifting(), [second])["w"].tolist() == [[1.0, 2.0, 3.0]]


def test_distillation_by_hand():
    first, second = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    p, q = first.softmax(-1), second.softmax(-1)
    expected = ((q * (q / p).log()).sum(-1) + (p * (p / q).log()).sum(-1)).mean()
    targets = torch.tensor([0, 1])
    assert torch.allclose(distillation_loss([first, second], targets), expected)
    # Three exits: every ordered pair, over two.
    three = distillation_loss([first, second, first], targets)
    assert torch.allclose(three, 2 * expected / 2)
    # The teacher is held fixed: at equal outputs nothing moves, elsewhere only the student does.
    student = first.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(distillation_loss([student, second], targets), student)
    wanted = (student.softmax(-1) - q) / 2
    assert torch.allclose(gradient, wanted.detach())
    # Positions without a target teach nothing.
    first, second = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    targets = torch.tensor([[0, 1, IGNORED], [IGNORED, 2, 3]])
    keep = targets != IGNORED
    alone = distillation_loss([first[keep], second[keep]], targets[keep])
    assert torch.allclose(distillation_loss([first, second], targets), alone)


def test_one_step_by_hand():
    """Cross-entropies, weighted distillation and both terms of FedDyn."""
    drift = 0.05
    config = dataclasses.replace(ONE_STEP, rounds=10)
    spec, client, ctx = client_context(depthfl(), deep_problem(), config, round=2)
    parameters = [name for name in spec.initial if spec.initial[name].is_floating_point()]
    ctx.memory["drift"] = {name: torch.full_like(spec.initial[name], drift) for name in parameters}
    start = {name: tensor.clone() for name, tensor in spec.initial.items()}
    result = depthfl().train(ctx, Task(state=start))
    model = spec.problem.model()
    model.load_state_dict(spec.initial)
    data = client.data.train
    outputs = model.outputs(data.inputs[0])
    weight = math.exp(-5 * (1 - 2 / 3) ** 2)
    loss = sum(F.cross_entropy(output, data.targets) for output in outputs)
    (loss + weight * distillation_loss(outputs, data.targets)).backward()
    for name, value in model.named_parameters():
        # At the start the quadratic term has no gradient.
        expected = value - 0.1 * (value.grad - drift)
        assert torch.allclose(result.state[name], expected, atol=1e-6), name
        moved = drift - 0.1 * (result.state[name] - spec.initial[name])
        assert torch.allclose(ctx.memory["drift"][name], moved, atol=1e-6), name
