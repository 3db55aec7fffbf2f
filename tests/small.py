"""Networks of a few units, and batches of rules that they can learn."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk

Batches = list[tuple[Tensor, Tensor]]


def make_model(seed: int = 0) -> nn.Module:
    """Make a network whose passes in train mode draw, and change statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
        )


def make_batches(examples: int = 96, size: int = 16, width: int = 6) -> Batches:
    """Make batches of a rule of a number of inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, width, generator=generator)
    y = (x @ torch.randn(width, 3, generator=generator)).argmax(1)
    return list(zip(x.split(size), y.split(size)))


def make_trained(kind: str = "linear") -> tuple[nn.Module, Batches]:
    """Train a network, linear or of convolutions, with two batch norms; returns it in eval mode, with its batches."""
    batches = make_batches(256, 32, 12)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "linear":
            front = [nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU()]
            model = nn.Sequential(*front, nn.Linear(16, 3))
        else:
            front = [nn.Conv2d(3, 16, 2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 2), nn.BatchNorm2d(16)]
            model = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), *front, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        sk.finetune(model, batches, F.cross_entropy, epochs=15, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    return model.eval(), batches


def half(graph: sk.UnitGraph) -> sk.UnitMask:
    """Keep the first half of every group."""
    return sk.UnitMask({name: torch.arange(group.size) < (group.size + 1) // 2 for name, group in graph.groups.items()})
