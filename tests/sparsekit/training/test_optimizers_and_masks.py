"""A mask follows its importance and its optimisers, whichever way an optimiser writes and wherever it comes from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsekit import LearnableMask


def _classifier(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    return model.to(dtype), torch.randn(12, 6, dtype=dtype), torch.randint(3, (12,))


def _step(masked: LearnableMask, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(masked(x), y) + masked.penalty()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


class DataSgd(torch.optim.Optimizer):
    """Writes to `.data`, which torch does not count as a change."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


SILENT = {
    "fused SGD": (lambda p: torch.optim.SGD(p, lr=0.5, fused=True), lambda p: torch.optim.SGD(p, lr=0.5)),
    "fused AdamW": (lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), lambda p: torch.optim.AdamW(p, lr=0.1)),
    "writes to .data": (lambda p: DataSgd(p, lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
}


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("name", SILENT)
def test_the_mask_follows_optimizers_whose_writes_torch_does_not_count(name: str, execution: str) -> None:
    model, x, y = _classifier(torch.float64)
    pair = [LearnableMask(model, (x,), ratio=0.5, execution=execution) for _ in range(2)]
    optimizers = [make(masked.parameters()) for make, masked in zip(SILENT[name], pair, strict=True)]
    changes, before = 0, pair[0].unit_mask()
    for _ in range(15):
        for masked, optimizer in zip(pair, optimizers, strict=True):
            _step(masked, optimizer, x, y)
        assert pair[0].unit_mask() == pair[1].unit_mask()
        changes += pair[0].unit_mask() != before
        before = pair[0].unit_mask()
    assert changes >= 2


def test_an_optimizer_of_importance_alone_is_followed_too() -> None:
    model, x, y = _classifier()
    masked = LearnableMask(model, (x,), ratio=0.5)
    optimizer = torch.optim.SGD([masked.scores], lr=5.0, fused=True)
    before = masked.unit_mask()
    for _ in range(5):
        _step(masked, optimizer, x, y)
    assert masked.unit_mask() != before


@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_the_mask_follows_writes_to_the_data_of_importance_that_nobody_announces(execution: str) -> None:
    model, x, _ = _classifier()
    masked = LearnableMask(model, (x,), ratio=0.5, execution=execution)
    before = masked.unit_mask()
    masked.scores.data.copy_(-masked.scores.data)
    masked(x)
    assert masked._execution.mask != before
    assert masked.unit_mask()["0"].sum() == 4


def test_a_training_step_does_not_compare_values_of_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = _classifier()
    masked = LearnableMask(model, (x,), ratio=0.5)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
    _step(masked, optimizer, x, y)

    def refuse(*_: object) -> bool:
        raise AssertionError("compared")

    monkeypatch.setattr(torch, "equal", refuse)
    _step(masked, optimizer, x, y)
    with pytest.raises(AssertionError, match="compared"):
        masked(x), masked(x)
