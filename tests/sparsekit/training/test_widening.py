"""Widening: exploring passes gather the one group that they widen, and change no output."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk
from sparsekit import LearnableMask
from sparsekit.criteria.orders import Learned
from sparsekit.graph.mask import UnitMask


def _masked() -> tuple[sk.LearnableMask, Tensor]:
    """Three layers, narrow, with a unit of the first group in the slot of another."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(32, 10), nn.ReLU(), nn.Linear(10, 2),
    ).double()  # fmt: skip
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    masked = sk.LearnableMask(model, (x,), ratio=0.5, explore=0.0)
    keep = masked.unit_mask()["0"].clone()
    keep[keep.nonzero()[0]], keep[(~keep).nonzero()[-1]] = False, True
    masked.change(UnitMask({**masked.unit_mask(), "0": keep}))
    return masked, x


def test_the_outputs_and_the_gradients_of_kept_weights_are_those_of_the_narrow_network() -> None:
    masked, x = _masked()
    for group in masked.graph.groups:
        found = []
        for widen in (False, True):
            masked.zero_grad()
            execution = masked.execution
            outputs, probes = execution.explore([group], (x,), {}) if widen else (masked(x), [])
            outputs.square().sum().backward()
            found.append([outputs.detach(), *(weight.grad for weight in masked.weights())])
        assert probes
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


def test_units_that_enter_by_a_move_of_widths_begin_afresh() -> None:
    y = torch.tensor([0, 1, 0, 1])
    budget = sk.LearnableMask(
        nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)),
        (torch.zeros(2, 6),),
        budget="params=50%",
    )
    optimizer = torch.optim.SGD(budget.weights(), lr=0.1, momentum=0.9)
    F.cross_entropy(budget(torch.randn(4, 6)), y).backward()
    optimizer.step()
    before = budget.unit_mask()
    wider = min(before, key=lambda name: int(before[name].sum()) / before[name].numel())
    counts = before.counts()
    rule, other = budget._rule, next(name for name in before if name != wider)
    aims = {wider: counts[wider] + 1, other: counts[other] - 1}
    budget.within_budget = lambda *_: aims  # type: ignore[method-assign]
    rule._move_widths(budget)  # type: ignore[attr-defined]
    after = budget.unit_mask()
    [entered] = (after[wider] & ~before[wider]).nonzero().flatten().tolist()
    reader = {"0": "2.weight", "2": "4.weight"}[wider]
    assert not budget.dense_state()[reader][:, entered][after[other] if reader == "2.weight" else slice(None)].any()
    slot = int((budget.execution.narrow_model.slot_order()[wider] == entered).nonzero())
    momentum = optimizer.state[budget.named_weights()[f"{wider}.bias"]]["momentum_buffer"]
    assert momentum.any()
    assert not momentum[slot]


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
