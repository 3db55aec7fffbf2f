"""Code at the edges of what a trace promises: each reader of a width keeps its units whole, and each twin that reads none keeps
them prunable.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import trace
from readers import ScaledGradient
from torch import Tensor, nn

from sparsekit.errors import NoUnitsError
from sparsekit.tracing import blocks
from sparsekit.tracing.trace import TrainModeWarning


def _dropped_paths(m: Any, h: Tensor, n: float) -> Any:
    if not m.training:
        return m.b(h)
    y = m.b(h * torch.bernoulli(torch.full((len(h), 1), 0.5, dtype=h.dtype)))
    return y, y.sum() * n


def _with_noise(m: Any, h: Tensor, n: float) -> Tensor:
    y: Tensor = m.b(h)
    return y + torch.randn_like(y) * n if m.training else y


def _running_scale(m: Any, h: Tensor, n: float) -> Tensor:
    y: Tensor = m.b(h)
    if m.training:
        with torch.no_grad():
            m.scale.mul_(0.9).add_(0.1 * y.sum() / n)
    return y * m.scale


def _counted(m: Any, h: Tensor, n: float) -> Tensor:
    if m.training:
        m.steps.add_(int(n))
    y: Tensor = m.b(h)
    return y


def _streamed(m: Any, h: Tensor, n: float) -> Tensor:
    y: Tensor = m.b(h) + (0.0 if m.state is None else m.state)
    m.state = y.detach().mean() / n
    return y


def _graph_kept(m: Any, h: Tensor, n: float) -> Tensor:
    y: Tensor = m.b(h) + (0.0 if m.state is None else m.state) * n
    m.state = y.mean() if m.training else None
    return y


def _later(m: Any, h: Tensor, n: float) -> Tensor:
    m.calls += 1
    y: Tensor = m.b(h)
    return y / n if m.calls > 1 else y


def _later_by_a_tensor(m: Any, h: Tensor, n: float) -> Tensor:
    m.told.add_(1.0)
    y: Tensor = m.b(h)
    return y / n if float(m.told) > 1 else y


def _returned(m: Any, h: Tensor, n: float) -> Any:
    m.scale.fill_(n)
    return m.b(h), m.scale


def _under_gradients(m: Any, h: Tensor, n: float) -> Tensor:
    y: Tensor = m.b(h)
    return y * n if m.training and torch.is_grad_enabled() else y


def _hooked(m: Any, h: Tensor, n: float) -> Tensor:
    y: Tensor = m.b(h)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / n)
    return y


EDGES: dict[str, Callable[[Any, Tensor, float], Any]] = {
    "an output of train mode beside dropped paths": _dropped_paths,
    "noise in train mode": _with_noise,
    "a buffer that train mode writes": _running_scale,
    "a counter": _counted,
    "what one call leaves for the next": _streamed,
    "what train mode leaves with its graph": _graph_kept,
    "a second call": _later,
    "a second call, told by a tensor": _later_by_a_tensor,
    "a buffer that is written and returned": _returned,
    "clamp": lambda m, h, n: m.b(h.clamp(max=40 * n)),
    "where": lambda m, h, n: m.b(torch.where(m.b(h).amax(1, True) > 60, h / n, h)),
    "masked_fill": lambda m, h, n: m.b(h.masked_fill(h > 60, 1 / n)),
    "softplus": lambda m, h, n: m.b(F.softplus(h, threshold=40 * n)),
    "a branch on gradients": _under_gradients,
    "a branch on requires_grad": lambda m, h, n: m.b(h * n) if h.requires_grad else m.b(h),
    "a backward pass": lambda m, h, n: m.b(ScaledGradient.apply(h, n)),
    "a hook on gradients": _hooked,
}


class Edge(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor, float], Any], *, reads: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 24), nn.Linear(24, 4)
        self.code, self.reads, self.calls = code, reads, 0
        self.state: Tensor | None = None
        self.told = torch.zeros(())
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.a(x))
        return self.code(self, h, float(h.shape[1] if self.reads else 24))


@pytest.mark.parametrize("lean", [False, True], ids=["a copy in float64", "operators in float64"])
@pytest.mark.parametrize("reads", [True, False], ids=["reads a width", "reads none"])
@pytest.mark.parametrize("edge", EDGES)
def test_what_reads_a_width_at_an_edge_keeps_its_units_whole(
    edge: str, reads: bool, lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LEAN_NUMBERS", 0 if lean else 10**12)
    torch.manual_seed(0)
    model = Edge(EDGES[edge], reads=reads)
    if reads:
        with pytest.raises(NoUnitsError):
            trace(model, torch.randn(6, 8))
        return
    graph, told = trace(model, torch.randn(6, 8), category=TrainModeWarning)
    assert list(graph.groups) == ["a"]
    # A second call cannot go backward through the graph that the first one left.
    assert ["second time" in text for text in told] == [True] * edge.endswith("with its graph")


def test_draws_for_each_unit_are_told() -> None:
    def drawn(m: Any, h: Tensor, n: float) -> Tensor:
        y: Tensor = m.b(h * (1 + torch.rand_like(h)) if m.training else h)
        return y

    graph, told = trace(Edge(drawn, reads=False), torch.randn(6, 8), category=TrainModeWarning)
    assert list(graph.groups) == ["a"]
    assert len(told) == 1
    assert "draws random numbers for each unit in train mode, by 'rand_like' at test_edges.py" in told[0]


class Scaled(nn.Module):
    def __init__(self, alpha: float | None) -> None:
        super().__init__()
        self.a, self.b, self.alpha = nn.Linear(16, 64), nn.Linear(64, 16), alpha

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        out: Tensor = x + self.b(h * (1 / h.shape[-1] if self.alpha is None else self.alpha))
        return out


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("alphas", [(1 / 64, None), (None, 1 / 64), (1 / 64, 1 / 64)])
def test_blocks_that_differ_with_fewer_units_alone_are_not_alike(
    alphas: tuple[float | None, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0)
    model = nn.Sequential(*map(Scaled, (*alphas, *alphas))).to(device)
    right = [f"{number}.a" for number, alpha in enumerate((*alphas, *alphas)) if alpha is not None]
    assert list(trace(model, torch.randn(2, 16, device=device))[0].groups) == right


@pytest.mark.parametrize("persistent", [True, False])
def test_what_no_call_writes_to_is_no_reason_for_second_calls(persistent: bool) -> None:
    runs = []

    def passes(*, buffer: bool) -> int:
        runs.clear()
        model = Edge(lambda m, h, _: (runs.append(1), m.b(h))[1], reads=False)
        if buffer:
            model.register_buffer("table", torch.ones(4), persistent=persistent)
        trace(model, torch.randn(6, 8))
        return len(runs)

    assert passes(buffer=True) == passes(buffer=False) < 25
