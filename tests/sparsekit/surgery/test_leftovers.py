"""What a pass leaves on a model, and what `train` of a model does: neither reaches a narrow model, nor stops a trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import NoUnitsError, UnsupportedModelError
from sparsekit.surgery.rebuild import named_entries


class Attention(nn.Module):
    """Attention with a bias for each head, which forward keeps on the module in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.heads, self.way = 4, way
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(4, 12))
        self.kept: dict[str, Tensor] = {}
        self.rows: list[Tensor] = []
        self.table: Tensor | None = None

    def train(self, mode: bool = True) -> "Attention":
        super().train(mode)
        if mode and self.way == "cleared by train":
            self.kept = {}
        return self

    def _bias(self, length: int) -> Tensor:
        made = self.bias[:, torch.arange(length).expand(length, -1)]
        if self.training:
            return made
        if self.way in ("cleared by train", "dict"):
            return self.kept.setdefault(str(length), made)
        if self.way == "list":
            self.rows = self.rows if any(row.shape[1] == length for row in self.rows) else [*self.rows, made]
            return next(row for row in self.rows if row.shape[1] == length)
        name = {"attribute": "table", "new attribute": "late"}[self.way]
        if getattr(self, name, None) is None or getattr(self, name).shape[1] < length:
            setattr(self, name, made)
        return getattr(self, name)[:, :length, :length]

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, self.heads, 12).split([4, 4, 4], 3)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        maps = (q @ k.transpose(-1, -2) / 2 + self._bias(n)).softmax(-1)
        return self.out((maps @ v).transpose(1, 2).reshape(b, n, -1))


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.attention, self.head = Attention(way), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(x)).mean(1)


WAYS = ("cleared by train", "dict", "list", "attribute", "new attribute")
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


def _evaluate(model: nn.Module, *, gradients: bool, length: int = 6) -> Tensor:
    with torch.set_grad_enabled(gradients):
        return model.eval()(X[:, :length])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_cut_whenever_somebody_has_evaluated_it(way: str, gradients: bool) -> None:
    torch.manual_seed(0)
    fresh = Net(way)
    state = {name: entry.detach().clone() for name, entry in named_entries(fresh).items()}
    for before, between in ((False, False), (True, False), (False, True), (True, True)):
        model = Net(way)
        model.load_state_dict(state)
        if before:
            _evaluate(model, gradients=gradients)
        graph = sk.trace_units(model, X)
        assert any(group.kind == "head" for group in graph.groups.values())
        if between:
            _evaluate(model, gradients=gradients)
        mask = random_mask(graph, 0.5, 1)
        small = sk.compact(model, graph, mask)
        again = Net(way)
        again.load_state_dict(state)
        fresh_graph = sk.trace_units(again, X)
        expected = sk.compact(again, fresh_graph, mask)
        for length in (6, 4, 6):
            found = _evaluate(small, gradients=False, length=length)
            assert torch.equal(found, _evaluate(expected, gradients=False, length=length))
        check_masked_equals_compact(again, (X,), {}, fresh_graph, mask)


@pytest.mark.parametrize("way", WAYS)
def test_prune_leaves_nothing_on_the_model_and_returns_one_that_runs(way: str) -> None:
    torch.manual_seed(0)
    model, batches = Net(way), [(torch.randn(8, 6, 16), torch.randint(3, (8,))) for _ in range(3)]
    _evaluate(model, gradients=False, length=4)
    held = [model.attention.kept.copy(), [*model.attention.rows], model.attention.table]

    def metric(net: nn.Module) -> float:
        return -float(_evaluate(net, gradients=False).sum())

    pruned = sk.prune(model, X[:, :4], budget="flops=60%", batches=batches, loss=F.cross_entropy, metric=metric)
    assert [model.attention.kept, model.attention.rows, model.attention.table] == held
    assert _evaluate(pruned.model, gradients=False).shape == (2, 3)
    assert _evaluate(pruned.model, gradients=False, length=3).shape == (2, 3)


class Trains(nn.Module):
    """Has a `train` of another kind, as wrappers of other libraries do."""

    started: list[Any] = []

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
        self.call: Callable[[Tensor], Tensor] | None = None if inside else self._other()

    def _other(self) -> Callable[[Tensor], Tensor]:
        weight = torch.randn(3, 6)
        return lambda x: F.linear(x, weight)

    def train(self, data: Any = "coco", epochs: int = 100) -> "Trains":  # type: ignore[override]
        self.started.append((data, epochs))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return (self.call or self.net)(x)


def test_a_train_of_another_kind_is_not_called_and_modes_are_set() -> None:
    torch.manual_seed(0)
    for model in (Trains(inside=True), nn.Sequential(Trains(inside=True))):
        pruned = sk.prune(model, torch.randn(4, 6), budget="flops=60%")
        assert pruned.model(torch.randn(4, 6)).shape == (4, 3)
    assert Trains.started == []


def test_a_wrapper_is_named_with_the_attribute_to_pass() -> None:
    with pytest.raises(NoUnitsError, match=r"wrapper.*Pass model\.net instead"):
        sk.trace_units(Trains(inside=False), torch.randn(4, 6))
    assert Trains.started == []


class Late(nn.Module):
    """Checks a width that no trace can see: a hook that is added after the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_a_narrow_model_that_does_not_run_is_never_returned() -> None:
    model, x = Late(), torch.randn(4, 6)
    graph = sk.trace_units(model, x)
    mask = random_mask(graph, 0.5, 0)
    assert sk.compact(model, graph, mask)(x).shape == (4, 3)
    mask = random_mask(graph, 0.25, 0)
    model.up.register_forward_hook(lambda _m, _x, y: y.view(4, 12))
    before = {name: entry.clone() for name, entry in model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match="does not run on the example inputs"):
        sk.compact(model, graph, mask)
    assert all(torch.equal(entry, before[name]) for name, entry in model.state_dict().items())
    assert model(x).shape == (4, 3)
