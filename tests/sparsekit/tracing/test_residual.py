"""Residual branches: found, named, and removed exactly; what is none is refused."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsekit import count_cost
from sparsekit.surgery.removed import Blocks, Removed, remove_blocks
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.residual import find_blocks


class Bottleneck(nn.Module):
    """As torchvision writes it: one ReLU in place for all, and the sum in place."""

    def __init__(self, entering: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(entering, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(entering, width, 1) if entering != width else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.down is None else self.down(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += shortcut
        total: Tensor = self.relu(out)
        return total


class Net(nn.Module):
    """A stem, three blocks of which one has a projection, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.blocks = nn.Sequential(Bottleneck(8, 8), Bottleneck(8, 12), Bottleneck(12, 12))
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.blocks(self.stem(x)).mean((2, 3)))
        return out


class Inline(nn.Module):
    """A layer, an in-place ReLU at its end, and a branch that part of the class computes itself."""

    def __init__(self, relu: bool = False, inline: bool = False, read: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.shift = nn.Parameter(torch.zeros(6))
        self.relu, self.inline, self.read, self.bias = relu, inline, read, bias

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        branch = self.b(F.gelu(x @ self.a.weight if self.inline else self.a(x)))
        branch = branch + self.shift if self.bias else branch
        total = x + branch
        total = F.relu(total) if self.relu else total
        return (self.head(total), branch) if self.read else self.head(total)


def found(model: nn.Module, *args: Any, **kwargs: Any) -> Blocks:
    return find_blocks(model, [ModelInputs(args, kwargs)])


def gated(model: nn.Module, blocks: Blocks, names: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Outputs where what the last module of each branch returns is multiplied by zero."""

    def silence(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    handles = [model.get_submodule(blocks.blocks[name].parts[-1].module).register_forward_hook(silence) for name in names]
    try:
        with torch.no_grad():
            return find_tensors(model(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()


def test_blocks_of_a_residual_network_are_found_and_a_projection_is_none() -> None:
    blocks = found(Net(), torch.randn(1, 3, 6, 6))
    assert list(blocks.blocks) == ["blocks.0", "blocks.2"]
    assert {part.module for part in blocks.parts(["blocks.0"])} == {"blocks.0"}


def test_nothing_of_a_removed_branch_runs_or_is_kept() -> None:
    model, x = Net().eval(), torch.randn(1, 3, 6, 6)
    blocks = found(model, x)
    small = remove_blocks(model, blocks, ["blocks.2"])
    saved = count_cost(model, x).flops_compact - count_cost(small, x).flops_compact
    assert saved == blocks.blocks["blocks.2"].flops == 2 * 16 * (12 * 4 + 4 * 12 * 9)
    assert not any(name.startswith("blocks.2") for name in small.state_dict())
    assert isinstance(model.blocks[2], Bottleneck)  # type: ignore[index]
    assert not set(map(id, small.parameters())) & set(map(id, model.parameters()))


RESIDUAL = ["gpt", "llama", "residual", "resnet-small", "transformer", "transformer-encoder",
            "vit-fused-qkv", "vit-separate"]  # fmt: skip


@functools.cache
def _of_zoo(name: str) -> tuple[nn.Module, Any, Any, Blocks]:
    model, args, kwargs = zoo.build(name)
    return model.eval(), args, kwargs, found(model, *args, **kwargs)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(RESIDUAL), data=st.data())
def test_any_branches_can_go_with_the_outputs_of_zeros_in_their_place(name: str, data: st.DataObject) -> None:
    model, args, kwargs, blocks = _of_zoo(name)
    chosen = data.draw(st.lists(st.sampled_from(sorted(blocks.blocks)), unique=True))
    small = remove_blocks(model, blocks, chosen)
    torch.backends.mha.set_fastpath_enabled(False)  # it rounds in other ways
    try:
        with torch.no_grad():
            expected, given_ = gated(model, blocks, chosen, args, kwargs), find_tensors(small(*args, **kwargs))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert all(torch.equal(a, b) for a, b in zip(expected, given_, strict=True))
    with torch.no_grad():
        small(*args, **kwargs)  # with torch's fused kernels


def test_networks_without_streams_have_no_branches() -> None:
    assert not _of_zoo("vgg-small")[3].blocks
    assert not found(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(2, 4)).blocks


@pytest.mark.parametrize(
    ("options", "names", "reason"),
    [
        ({}, ["a"], None),
        ({"relu": True}, ["a"], None),  # the sum goes through a ReLU, so that the module is no identity; its parts go
        ({"inline": True}, [], "outside of modules of its own"),
        ({"read": True}, [], None),
        ({"bias": True}, [], "computes something else"),
    ],
)
def test_a_branch_goes_only_where_it_is_exact(options: dict[str, bool], names: list[str], reason: str | None) -> None:
    blocks = found(Inline(**options), torch.randn(3, 4))
    assert list(blocks.blocks) == names
    assert [reason in told for told in blocks.refused.values()] == ([True] if reason else [])  # type: ignore[operator]


def test_what_is_left_trains_and_stands_where_the_branch_was() -> None:
    model = Net()
    blocks = found(model, torch.randn(1, 3, 6, 6))
    small = remove_blocks(model, blocks, ["blocks.0"]).train()
    assert isinstance(small.blocks[0], Removed)  # type: ignore[index]
    small(torch.randn(4, 3, 6, 6)).sum().backward()
    assert all(entry.grad is not None for entry in small.parameters())
