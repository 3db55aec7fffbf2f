"""A problem that trains in milliseconds, for tests of methods and engines."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.problem.clients import Capability, Client, ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.problem import Problem


class TinyNet(nn.Module):
    """Six inputs, eight hidden features with batch norm, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits, float (batch, 3)."""
        logits: Tensor = self.last(torch.relu(self.norm(self.first(inputs))))
        return logits


def tiny_problem() -> Problem:
    """Classify points by a linear rule."""
    return Problem(model=TinyNet, example_inputs=(torch.zeros(2, 6),))


def tiny_clients(count: int = 8, *, examples: int = 24) -> list[Client]:
    """Clients with ids 0, 1, …; client k has examples + k mod 4 training examples and capability 1, 1/2 or 1/4."""
    rng = np.random.default_rng(7)
    rule = rng.normal(size=(6, 3))

    def split(size: int) -> TensorData:
        points = rng.normal(size=(size, 6))
        labels = (points @ rule).argmax(axis=1)
        return TensorData((torch.from_numpy(points.astype(np.float32)),), torch.from_numpy(labels))

    return [
        Client(
            id=number,
            data=ClientData(train=split(examples + number % 4), val=split(6), test=split(12)),
            capability=Capability(ratio=(1.0, 0.5, 0.25)[number % 3]),
        )
        for number in range(count)
    ]


def tiny_config(*, rounds: int = 4, seed: int = 3) -> RunConfig:
    """Four clients a round, two epochs, evaluation every second round."""
    return RunConfig(
        rounds=rounds,
        cohort=4,
        training=TrainingConfig(local_epochs=2, batch_size=8, lr=0.1),
        seed=seed,
        eval_every=2,
        capability="dynamic",
        capability_levels=(1.0, 0.5, 0.25),
    )


def tiny_client(id: int, folder: str | None = None) -> Client:
    """Return one of `tiny_clients`, as a node of a deployment loads it; there are no files, so `folder` is not used."""
    del folder
    return tiny_clients()[id]
