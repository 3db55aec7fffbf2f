"""Code of a user that the commands are pointed at."""

from pathlib import Path

import pytest

NETS = """
from collections import OrderedDict

import torch
from torch import nn

def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Flatten(),
                        nn.Linear(12 * 16, 3))
    return net, (torch.randn(2, 1, 8, 8),)

def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection_of_the_first_block, self.other, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.out((self.projection_of_the_first_block(x) + self.other(x)).relu())

def long_names():
    return nn.Sequential(OrderedDict(a_module_with_a_long_name=Inner())), (torch.zeros(2, 4),)

def no_units():
    return nn.Linear(4, 3), torch.zeros(1, 4)

def needs(argument):
    return plain()

def wrong():
    return 3

def boom():
    raise RuntimeError("no weights here")

def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6 * batch_size, 1, 8, 8, generator=generator)
    y = (x.mean((1, 2, 3)) > 0).long()
    pairs = list(zip(x.split(batch_size), y.split(batch_size)))
    return pairs[:4], pairs[4:]

def empty():
    return [], []

def once():
    return iter([1])

def soft():
    pairs = [(torch.randn(3, 1, 8, 8), torch.full((3, 3), 1 / 3))]
    return pairs, pairs

def nan():
    return [(torch.full((4, 1, 8, 8), float("nan")), torch.zeros(4, dtype=torch.long))]

def wide():
    return [(torch.randn(4, 5, 8, 8), torch.zeros(4, dtype=torch.long))] * 4

def bare():
    return [torch.randn(4, 1, 8, 8)] * 4

def strict(outputs, target):
    assert target.max() > 9, "ten classes"
    return outputs.mean()
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / f"nets_{abs(hash(str(tmp_path)))}.py"
    path.write_text(NETS, encoding="utf-8")
    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path / "cache"))
    return str(path)
