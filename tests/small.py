"""A network of a few units whose passes in train mode draw, and batches of a rule that it can learn."""

import torch
from torch import Tensor, nn


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
        )


def make_batches(examples: int = 96, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 6, generator=generator)
    y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
    return list(zip(x.split(size), y.split(size)))
