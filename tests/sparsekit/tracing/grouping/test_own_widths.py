"""Integers that only other code than forward reads follow the one width that they equal; of two, they are listed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import random_mask, run_gated, trace
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.graph.graph import UnitGraph
from sparsekit.surgery.compaction import compact


class Branches(nn.Module):
    """A block of two convolutions that `fold` makes one, as in timm and in RepVGG."""

    def __init__(self, in_chs: int, out_chs: int, groups: int = 1) -> None:
        super().__init__()
        self.in_chs, self.out_chs, self.groups = in_chs, out_chs, groups
        self.wide = nn.Sequential(nn.Conv2d(in_chs, out_chs, 3, padding=1, groups=groups), nn.BatchNorm2d(out_chs))
        self.thin = nn.Conv2d(in_chs, out_chs, 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.wide(x) + self.thin(x))

    def fold(self) -> nn.Conv2d:
        conv, norm = self.wide
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        made = nn.Conv2d(self.in_chs, self.out_chs, 3, padding=1, groups=self.groups)
        inner = torch.zeros(self.out_chs, self.in_chs // self.groups, 3, 3)
        inner[:, :, 1:2, 1:2] = self.thin.weight
        made.weight.data = conv.weight * scale.view(-1, 1, 1, 1) + inner
        made.bias.data = (conv.bias - norm.running_mean) * scale + norm.bias + self.thin.bias
        return made.requires_grad_(requires_grad=False)


class Folds(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Sequential(*blocks), nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).relu()).mean((2, 3)))


BLOCKS = {
    "two widths": lambda: [Branches(6, 10), Branches(10, 7)],
    "depthwise": lambda: [Branches(6, 6, groups=6), Branches(6, 9)],
    "depthwise, two of each": lambda: [Branches(6, 12, groups=6), Branches(12, 5)],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_folding_after_the_cut_is_exact(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = Folds(*BLOCKS[name]())
    model(x)
    for module in model.eval().modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean), nn.init.uniform_(module.running_var, 0.5, 1.5), nn.init.uniform_(module.bias)
    graph = sk.trace_units(model, x)
    mask = random_mask(graph, 0.5, seed=1)
    small = compact(model, graph, mask)
    assert not graph.unfollowed
    for block in small.blocks:
        assert (block.in_chs, block.out_chs, block.groups) == (
            block.thin.in_channels, block.thin.out_channels, block.thin.groups,
        )  # fmt: skip
    expected = run_gated(model, graph, mask, (x,), {})[0]
    for number, block in enumerate(small.blocks):
        small.blocks[number] = nn.Sequential(block.fold(), nn.ReLU())
    torch.testing.assert_close(small(x), expected, rtol=1e-5, atol=1e-5)


def test_of_two_widths_that_differ_neither_is_guessed() -> None:
    model = Folds(Branches(6, 8), Branches(8, 8))
    model(torch.randn(2, 3, 8, 8))
    graph = sk.trace_units(model.eval(), torch.randn(2, 3, 8, 8))
    small = compact(model, graph, random_mask(graph, 0.5, seed=1))
    assert graph.unfollowed == ("blocks.1.in_chs", "blocks.1.out_chs")
    assert (small.blocks[1].in_chs, small.blocks[1].out_chs) == (8, 8)
    assert small.blocks[0].out_chs == small.blocks[1].thin.in_channels < 8


class Holds(nn.Module):
    def __init__(self, uses: Any = None, **held: int) -> None:
        super().__init__()
        self.uses, self.a, self.b = uses or (lambda _, h: h), nn.Linear(3, 6), nn.Linear(6, 2)
        vars(self).update(held)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.uses(self, self.a(x).relu()))


def _widths(graph: UnitGraph) -> set[str]:
    return {str(size.path[0]) for size in graph.sizes}


def test_only_names_of_widths_follow() -> None:
    names = dict.fromkeys(("in_chs", "c", "c2", "inner_dim", "d_model", "hidden_size", "w", "num_features"), 6)
    graph = sk.trace_units(Holds(**names, kernel_size=6, num_heads=6, depth=6, scale=6, dim=7), torch.randn(2, 3))
    assert _widths(graph) == names.keys()


@pytest.mark.parametrize(
    "uses",
    [lambda m, h: h * sum(1 for _ in range(m.dim)), lambda m, h: h / m.dim, lambda m, h: h * m.dim**-0.5],
    ids=["in a loop", "as a divisor", "as a power"],
)
def test_a_number_that_forward_reads_for_something_else_stays_and_costs_no_unit(uses: Any) -> None:
    graph, warned = trace(Holds(uses, dim=6), torch.randn(2, 3))
    assert not _widths(graph)
    assert graph.units == 6
    assert not warned
