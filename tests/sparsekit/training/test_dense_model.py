"""A mask can be copied after a pass of the dense model, whose state belongs to that pass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparsekit import LearnableMask
from sparsekit.criteria.orders import Learned


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_mask_can_be_copied_after_a_dense_pass(again: Callable[[LearnableMask], LearnableMask]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.LSTM(3, 6, batch_first=True), nn.LayerNorm(6), nn.Linear(6, 2)])
    masked = LearnableMask(Chain(model), (torch.randn(2, 5, 3),), norm="kept", ratio=0.5, explore=1.0, criterion=Learned())
    x = torch.randn(2, 5, 3)
    masked(x).sum().backward()
    twin = again(masked)
    torch.testing.assert_close(twin(x), masked(x))
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.model.parameters())


class Chain(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        rnn, norm, head = self.parts
        out: Tensor = head(norm(rnn(x)[0]))
        return out
