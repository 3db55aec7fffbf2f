"""Taylor and Fisher: exact against gate gradients of single examples, any form of batch, bad input."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.criteria import Fisher, Magnitude, Normalised, Taylor, View
from sparsekit.errors import DataError, InvalidValueError, MissingImportanceError


class Residual(nn.Module):
    """A sum, a batch norm, a depthwise convolution and a flatten between the units and their readers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.depthwise = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.narrow, self.head = nn.Conv2d(6, 4, 1), nn.Linear(4 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = x + self.second(x)
        return self.head(self.narrow(F.relu(self.depthwise(x))).flatten(1))


class ScaledOnce(nn.Module):
    """Units that are read by a parameter of the model itself, so that no layer's input has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(3, 6), nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.first(x)), self.weight)


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
    model = Residual().eval()
    model.norm.running_mean.uniform_(-0.5, 0.5)
    return model, sk.trace_units(model, torch.randn(2, 3, 3, 3))


def test_the_cost_of_removal_is_that_of_gates_of_single_examples(residual: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = residual
    scores = Taylor(_batches(), F.cross_entropy).scores(graph, View(model=model))
    for name, rows in _gradients_of_examples(model, graph, _batches()).items():
        assert torch.allclose(scores[name], -rows.mean(0) + 0.5 * rows.square().mean(0), atol=1e-6)


def test_fisher_of_a_summed_loss_is_that_of_the_mean(residual: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = residual
    mean = Fisher(_batches(), F.cross_entropy).scores(graph, View(model=model))
    total = Fisher(_batches(), nn.CrossEntropyLoss(reduction="sum"), reduction="sum").scores(graph, View(model=model))
    assert all(torch.allclose(mean[name], total[name], rtol=1e-4, atol=1e-9) for name in graph.groups)


def test_units_read_outside_of_layers_have_the_exact_mean_and_single_examples_the_exact_square() -> None:
    torch.manual_seed(0)
    model = ScaledOnce()
    graph = sk.trace_units(model, torch.randn(2, 3))
    batches = _batches((3,), (1,) * 8)
    rows = _gradients_of_examples(model, graph, batches)["first"]
    view = View(model=model)
    whole = [tuple(torch.cat(parts) for parts in zip(*batches))]
    assert torch.allclose(Taylor(whole, F.cross_entropy, form="signed").scores(graph, view)["first"], -rows.mean(0), atol=1e-6)
    assert torch.allclose(Fisher(batches, F.cross_entropy).scores(graph, view)["first"], 0.5 * rows.square().mean(0), atol=1e-6)


def test_products_are_of_all_entries_of_a_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False))
    graph = sk.trace_units(model, torch.randn(2, 2))
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(2)]
    F.mse_loss(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()
    first, second = ((entry * entry.grad).abs() for entry in model.parameters())
    expected = first.sum(1) + second.sum(0)
    model.zero_grad()
    found = Taylor(batches, F.mse_loss, form="products").scores(graph, View(model=model))["0"]
    assert torch.allclose(found, expected.double(), atol=1e-6)


def test_a_ranking_by_signed_means_is_that_of_measured_removals() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 5))
    graph = sk.trace_units(model, torch.randn(2, 8))
    x = torch.randn(200, 8)
    y = (x @ torch.randn(8, 5)).argmax(1)
    model(x)
    scores = Taylor([(x, y)], F.cross_entropy).scores(graph, View(model=model))["0"]
    rises = []
    for unit in range(24):
        keep = torch.ones(24, dtype=torch.bool)
        keep[unit] = False
        small = sk.compact(model, graph, sk.UnitMask({"0": keep}))
        with torch.no_grad():
            rises.append(float(F.cross_entropy(small(x), y) - F.cross_entropy(model(x), y)))
    ranks = torch.stack([scores.argsort().argsort().double(), torch.tensor(rises).argsort().argsort().double()])
    assert float(torch.corrcoef(ranks)[0, 1]) > 0.95


class Named(nn.Module):
    """Takes keyword inputs and, with labels, returns its own loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5))

    def forward(self, features: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.body(features)
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like the batches of a tokenizer."""


@pytest.mark.same_bits
def test_mappings_and_objects_like_them_give_what_tuples_give() -> None:
    torch.manual_seed(0)
    model = Named()
    graph = sk.trace_units(model.body, torch.randn(2, 3))
    plain = Taylor(_batches((3,)), F.cross_entropy).scores(graph, View(model=model.body))
    named = [{"features": x, "labels": y} for x, y in _batches((3,))]
    graph = sk.trace_units(model, features=torch.randn(2, 3))
    for batches, loss in ((named, None), (named, F.cross_entropy), ([Encoding(b) for b in named], None)):
        found = Taylor(batches, loss).scores(graph, View(model=model))
        assert torch.equal(found["body.0"], plain["0"])


def test_the_work_is_counted_and_a_bar_is_drawn_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    graph = sk.trace_units(model, torch.randn(1, 4))
    criterion = Fisher([(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))] * 3, F.cross_entropy, progress=True)
    criterion.scores(graph, View(model=model))
    forward = 2 * (4 * 8 + 8 * 2) * 5
    assert (criterion.work.batches, criterion.work.examples) == (3, 15)
    assert 3 * forward < criterion.work.flops <= 9 * forward
    assert criterion.work.seconds > 0
    assert "Fisher scores" in capsys.readouterr().err
    limited = Fisher(criterion.batches, F.cross_entropy, limit=2)
    limited.scores(graph, View(model=model))
    assert limited.work.batches == 2


def test_what_is_missing_or_wrong_is_said(residual: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = residual
    view = View(model=model)
    with pytest.raises(MissingImportanceError, match=r"Fisher needs data; pass Fisher\(batches, loss\)"):
        Fisher().scores(graph, view)
    with pytest.raises(MissingImportanceError, match=r"pass View\(model=model\)"):
        Fisher(_batches(), F.cross_entropy).scores(graph, View())
    with pytest.raises(DataError, match="the loader is empty"):
        Taylor([], F.cross_entropy).scores(graph, view)
    with pytest.raises(InvalidValueError, match="pass loss="):
        Taylor(_batches()).scores(graph, view)
    with pytest.raises(InvalidValueError, match="scalar"):
        Taylor(_batches(), nn.CrossEntropyLoss(reduction="none")).scores(graph, view)
    with pytest.raises(DataError, match="batch 0 is on meta, the model on cpu"):
        Taylor([(torch.zeros(2, 3, 3, 3, device="meta"), torch.zeros(2))], F.cross_entropy).scores(graph, view)
    with pytest.raises(DataError, match="a batch must be"):
        Taylor([7], F.cross_entropy).scores(graph, view)
    with pytest.raises(InvalidValueError, match="form must be one of"):
        Taylor(form="third")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="limit must be at least 1"):
        Taylor(limit=0)
    bad = _batches()
    bad[1][0][0, 0, 0, 0] = float("nan")
    with pytest.raises(InvalidValueError, match=r"scores of group 'first' are nan for unit 0"):
        Taylor(bad, F.cross_entropy).scores(graph, view)


def test_modes_and_flags_are_put_back_after_an_error(residual: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = residual
    model.train()
    model.head.bias.requires_grad_(False)

    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        Taylor(_batches(), failing).scores(graph, View(model=model))
    assert model.norm.training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]
    assert not model.head._forward_pre_hooks
    assert torch.ones(1).add(1).item() == 2.0  # no counter is left on


def test_normalising_keeps_the_order_within_groups(residual: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = residual
    view = View(weights=model.state_dict())
    plain = Magnitude().scores(graph, view)
    for by in ("mean", "sum", "max", "standard", "rank", "share_of_remaining"):
        scores = Normalised(Magnitude(), by=by).scores(graph, view)  # type: ignore[arg-type]
        assert all(torch.equal(scores[name].argsort(), plain[name].argsort()) for name in graph.groups)
