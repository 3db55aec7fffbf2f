"""Taylor and Fisher: exact against gate gradients of single examples, any form of batch, bad input."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.criteria import Fisher, ScoringContext, Taylor
from sparsekit.errors import InvalidValueError


def _residual(m: nn.Module, x: Tensor) -> Tensor:
    x = F.relu(m.norm(m.first(x)))
    x = x + m.second(x)
    return m.head(m.narrow(F.relu(m.depthwise(x))).flatten(1))


def _batches(shape: tuple[int, ...] = (3, 3, 3), sizes: tuple[int, ...] = (6, 4)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(0, 5, (size,), generator=generator)) for size in sizes
    ]


def _gradients_of_examples(model: nn.Module, graph: sk.UnitGraph, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    gates = {name: torch.ones(group.size, requires_grad=True) for name, group in graph.groups.items()}
    rows = []
    for inputs, targets in batches:
        for x, y in zip(inputs.split(1), targets.split(1)):
            state = graph.gate({name: entry.detach() for name, entry in model.state_dict().items()}, gates)
            loss = F.cross_entropy(torch.func.functional_call(model, state, (x,)), y)
            rows.append(torch.autograd.grad(loss, list(gates.values())))
    return {name: torch.stack([row[k] for row in rows]).double() for k, name in enumerate(gates)}


@pytest.fixture
def residual() -> tuple[nn.Module, sk.UnitGraph]:
    torch.manual_seed(0)
    first, second = (nn.Conv2d(wide, 6, 3, padding=1) for wide in (3, 6))
    inner = {"norm": nn.BatchNorm2d(6), "depthwise": nn.Conv2d(6, 6, 3, groups=6, padding=1)}
    model = Lambda(_residual, first=first, second=second, narrow=(6, 4, 1), head=(4 * 9, 5), **inner).eval()
    model.norm.running_mean.uniform_(-0.5, 0.5)
    return model, sk.trace_units(model, torch.randn(2, 3, 3, 3))


def test_the_cost_of_removal_is_that_of_gates_of_single_examples(residual: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = residual
    scores = Fisher(_batches(), F.cross_entropy).scores(graph, ScoringContext(model=model))
    for name, rows in _gradients_of_examples(model, graph, _batches()).items():
        assert torch.allclose(scores[name], 0.5 * rows.square().mean(0), atol=1e-6)


def test_the_products_of_weights_and_mean_gradients_add_up_over_a_unit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
    graph = sk.trace_units(model, torch.randn(2, 3))
    found = Taylor(_batches((3,)), F.cross_entropy).scores(graph, ScoringContext(model=model))["0"]
    x, y = (torch.cat(parts) for parts in zip(*_batches((3,))))
    F.cross_entropy(model(x), y).backward()
    first, bias, second, _ = ((p * p.grad).detach().abs() for p in model.parameters() if p.grad is not None)
    assert torch.allclose(found.float(), first.sum(1) + bias + second.sum(0), rtol=1e-4)


def test_a_loss_that_is_a_sum_over_examples_is_refused(residual: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = residual
    for criterion in (Fisher, Taylor):
        with pytest.raises(InvalidValueError, match="must be the mean over the examples"):
            criterion(_batches(), nn.CrossEntropyLoss(reduction="sum")).scores(graph, ScoringContext(model=model))


def test_units_read_outside_of_layers_have_the_square_of_the_mean_and_single_examples_the_exact_square() -> None:
    torch.manual_seed(0)
    # No layer's input has the units: a parameter of the model itself reads them.
    scaled = {"first": nn.Linear(3, 6), "weight": nn.Parameter(torch.randn(5, 6))}
    model = Lambda(lambda m, x: F.linear(torch.tanh(m.first(x)), m.weight), **scaled)
    graph = sk.trace_units(model, torch.randn(2, 3))
    batches = _batches((3,), (1,) * 8)
    rows = _gradients_of_examples(model, graph, batches)["first"]
    context = ScoringContext(model=model)
    whole = [tuple(torch.cat(parts) for parts in zip(*batches))]
    found = Fisher(whole, F.cross_entropy).scores(graph, context)["first"]  # eight examples stand for as many of the mean
    assert torch.allclose(found, 0.5 * len(rows) * rows.mean(0).square(), atol=1e-6)
    assert torch.allclose(
        Fisher(batches, F.cross_entropy).scores(graph, context)["first"], 0.5 * rows.square().mean(0), atol=1e-6
    )


@pytest.mark.parametrize("order", ["examples first", "time first", "windows"])
def test_rows_that_merge_examples_with_time_or_windows_give_squares_of_examples(order: str) -> None:
    torch.manual_seed(0)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        examples = x.shape[0]
        if order == "time first":  # rows of an example are not together, so each is estimated
            return m.out(m.first(x.transpose(0, 1).reshape(-1, 3)).tanh()).reshape(-1, examples, 5).mean(0)
        rows = x.reshape(examples * 2, -1, 3) if order == "windows" else x.reshape(-1, 3)
        return m.out(m.first(rows).tanh()).reshape(examples, -1, 5).mean(1)

    model = Lambda(forward, first=(3, 6), out=(6, 5))
    x, y = torch.randn(4, 8, 3), torch.randint(5, (4,))
    graph = sk.trace_units(model, x)
    rows = _gradients_of_examples(model, graph, [(x, y)])["first"]
    [found] = Fisher([(x, y)], F.cross_entropy).scores(graph, ScoringContext(model=model)).values()
    expected = len(rows) * rows.mean(0).square() if order == "time first" else rows.square().mean(0)
    torch.testing.assert_close(found.float(), 0.5 * expected.float(), rtol=1e-4, atol=1e-7)


def test_squares_of_single_positions_add_up_over_tokens_and_over_all_layers_that_read_a_unit() -> None:
    torch.manual_seed(0)
    model = Lambda(
        lambda m, x: m.out(torch.tanh(m.first(x))) + m.other(torch.tanh(m.first(x))),
        first=(3, 6), out=(6, 5), other=(6, 5),
    )  # fmt: skip
    x, y = torch.randn(4, 7, 3), torch.randint(5, (4, 7))
    graph = sk.trace_units(model, x)
    [found] = (
        Fisher([(x[:1], y[:1]), (x[1:], y[1:])], _token_loss, per_position=True)
        .scores(graph, ScoringContext(model=model))
        .values()
    )
    gates = [torch.ones(4, 7, 6, requires_grad=True) for _ in range(2)]  # of each token, before each reader
    hidden = torch.tanh(model.first(x)).detach()
    _token_loss(model.out(hidden * gates[0]) + model.other(hidden * gates[1]), y).backward()
    # The mean over four examples has a quarter of each example's gradient.
    expected = sum(0.5 * (4 * gate.grad).square().sum(1).mean(0) for gate in gates if gate.grad is not None)
    assert torch.allclose(found.float(), torch.as_tensor(expected), rtol=1e-5)


def _token_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5))

    def forward(self, features: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.body(features)
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


class Encoding(UserDict):
    """Like the batches of a tokenizer."""


@pytest.mark.same_bits
def test_mappings_and_objects_like_them_give_what_tuples_give() -> None:
    torch.manual_seed(0)
    model = Named()
    graph = sk.trace_units(model.body, torch.randn(2, 3))
    plain = Fisher(_batches((3,)), F.cross_entropy).scores(graph, ScoringContext(model=model.body))
    named = [{"features": x, "labels": y} for x, y in _batches((3,))]
    graph = sk.trace_units(model, {"features": torch.randn(2, 3)})
    for batches, loss in ((named, None), (named, F.cross_entropy), ([Encoding(b) for b in named], None)):
        found = Fisher(batches, loss).scores(graph, ScoringContext(model=model))
        assert torch.equal(found["body.0"], plain["0"])
