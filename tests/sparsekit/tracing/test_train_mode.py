"""Operators that run in training only are traced and verified too, and dropout is not mistaken for one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn


def net(run: Callable[..., Any]) -> nn.Module:
    return zoo.Lambda(run, a=(3, 6), b=(3, 5), c=(6, 2), d=(5, 2))


@pytest.mark.parametrize(
    ("trained", "told"),
    [(lambda out, h: (out, h.mean()), ""), (lambda out, h: out / h.shape[1], "in training, removing units changes the output")],
    ids=["a penalty on hidden values", "a size that only the verification sees"],
)
def test_what_only_training_does_with_units_keeps_them_whole(trained: Callable[..., Any], told: str) -> None:
    def run(m: nn.Module, x: Tensor) -> Any:
        h = F.relu(m.a(x))
        out = m.c(h) + m.d(F.relu(m.b(x)))
        return trained(out, h) if m.training else out

    graph, messages = trace(net(run), torch.randn(4, 3))
    assert list(graph.groups) == ["b"]
    assert len(messages) == 1
    assert told in messages[0]


def dropped_paths(m: nn.Module, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    if m.training:
        h = h * x.new_empty((x.shape[0], 1)).bernoulli_(0.5).div_(0.5)
    out: Tensor = m.c(h)
    if m.training:
        keep = 0.5 + torch.rand((x.shape[0], 1), dtype=x.dtype)
        out = out.div(0.5) * keep.floor_()
    noise = torch.empty((x.shape[0], 1), dtype=x.dtype).bernoulli_(0.5) if m.training else 1.0
    return out + m.d(torch.relu(m.b(x)) * noise)  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", [False, True])
def test_dropped_paths_keep_units_apart(train: bool) -> None:
    model = net(dropped_paths)
    x = torch.randn(4, 3)
    graph, messages = trace(model, x)
    assert dict(graph.fingerprint()) == {"a": 6, "b": 5}
    assert messages == []
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), train=train)


def with_head(m: nn.Module, x: Tensor) -> Any:
    h = m.norm(m.a(x)).relu()
    return (m.c(h), m.d(h)) if m.training else m.c(h)


def test_an_auxiliary_head_of_training_behind_a_batch_norm_is_traced_from_one_example() -> None:
    model = zoo.Lambda(with_head, a=(3, 6), norm=nn.BatchNorm1d(6), c=(6, 2), d=(6, 2))
    graph, messages = trace(model, torch.randn(1, 3))
    assert {piece.name for piece in graph.groups["a"].slices if piece.gated} == {"c.weight", "d.weight"}
    assert messages == []
    check_masked_equals_compact(model, (torch.randn(4, 3),), {}, graph, random_mask(graph, 0.5, 0), train=True)


@pytest.mark.parametrize("seed", range(8))
def test_units_are_found_though_training_drops_paths_at_random_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = torch.Generator().manual_seed(seed)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (on_gpu,))

    class DropsPaths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.norm(self.a(x)))
            return self.b(hidden * (torch.rand(1, generator=on_gpu) < 0.8) if self.training else hidden)

    before = on_gpu.get_state()
    assert list(trace(DropsPaths(), torch.rand(2, 4))[0].groups) == ["a"]
    assert torch.equal(on_gpu.get_state(), before)
