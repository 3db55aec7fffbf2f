"""Small networks for tests of narrow training: one with its narrow model under a random mask, one with a loose buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsekit import NarrowModel, select, trace_units
from sparsekit.criteria import Random, View
from sparsekit.training.unit_vectors import UnitVectors


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 4 * 4, 5), nn.Tanh(), nn.Linear(5, 3),
    ).double()  # fmt: skip


X = torch.randn(4, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0])


def prepared(ratio: float) -> tuple[NarrowModel, UnitVectors]:
    model = network()
    graph = trace_units(model, X)
    narrow_model = NarrowModel(model, graph)
    fused = UnitVectors(narrow_model)
    narrow_model.load(model.state_dict(), select(Random(), graph, ratio, View(generator=torch.Generator().manual_seed(1))))
    fused.reload()
    return narrow_model, fused


class Rotary(nn.Module):
    """A buffer that is not in the state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        self.register_buffer("turn", torch.linspace(0.5, 1.5, 4, dtype=torch.float64)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.b(torch.tanh(self.a(x)) * self.turn)))
        return out
