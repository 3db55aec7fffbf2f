"""Architectures that shrink in width when norms are taken over the kept units, with the groups that must then be found."""

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
import zoo
import zoo_base
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo_attention import block, language, separate
from zoo_base import Architecture, images, tokens

KEPT: dict[str, Architecture] = {}


add = functools.partial(zoo_base.add, zoo=KEPT)


def widened(name: str, groups: dict[str, int], fixed: tuple[str, ...] = ()) -> None:
    """An architecture of the zoo with the groups that it has when norms are taken over kept units."""
    KEPT[name] = dataclasses.replace(zoo.ZOO[name], groups=groups, fixed=fixed)


widened("vit-fused-qkv", {"patch": 12, "blocks.0.attn.qkv": 3, "blocks.0.fc1": 10})
widened("gpt", {"tokens": 12, "blocks.0.attn.c_attn": 3, "blocks.0.fc1": 10, "blocks.1.attn.c_attn": 6, "blocks.1.fc1": 8})
widened("gpt-hard-coded-width", {"tokens": 4, "blocks.0.fc1": 10})
widened(
    "transformer-encoder",
    {"0": 8, "1.layers.0.self_attn": 4, "1.layers.0.linear1": 12, "1.layers.1.self_attn": 4, "1.layers.1.linear1": 12},
)
widened("llama", {"embed": 8, "attn.0.wq": 3, "gate.0": 10, "attn.1.wq": 4, "gate.1": 10})
add("gpt-tied", tokens(11, 2, 5), {"tokens": 8, "blocks.0.attn.q": 3, "blocks.0.fc1": 10})(
    lambda: language(8, block(8, separate(8, 3, 2), 10), tied=True)
)


class ChannelNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * (x - mean) / torch.sqrt(spread + 1e-6) + self.bias[:, None, None]


def _convnext(m: Any, x: Tensor) -> Tensor:
    """Depthwise convolution, norm over channels last, inverted bottleneck, a learned scale of each channel."""
    x = m.stem_norm(m.stem(x))
    h = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
    x = x + (m.gamma * m.down(F.gelu(m.up(h)))).permute(0, 3, 1, 2)
    return m.head(m.last(x.mean((2, 3))))


add("convnext", images(2, 1, 6, 6), {"stem": 6, "up": 12})(
    _convnext,
    stem=lambda: nn.Conv2d(1, 6, 2, stride=2),
    stem_norm=lambda: ChannelNorm(6),
    depthwise=lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
    norm=lambda: nn.LayerNorm(6, eps=1e-6),
    up=(6, 12),
    down=(12, 6),
    gamma=lambda: nn.Parameter(torch.rand(6)),
    last=lambda: nn.LayerNorm(6),
    head=(6, 3),
)


add("mean-in-the-words-of-numpy", images(4, 3), {"a": 6})(
    lambda m, x: m.head((h := m.a(x).relu()) - h.mean(axis=-1, keepdim=True)), a=(3, 6), head=(6, 2)
)
add("standardized", images(4, 3), {"a": 6})(
    lambda m, x: m.head(((h := m.a(x)) - h.mean(-1, True)) / (h.var(-1, correction=0, keepdim=True) + 0.1).sqrt()),
    a=(3, 6),
    head=(6, 2),
)
add("norm-of-a-concatenation", images(4, 3), {"a": 4, "b": 5})(
    lambda m, x: m.head(m.norm(torch.cat([m.a(x), x, torch.tanh(m.b(x))], -1))),
    a=(3, 4),
    b=(3, 5),
    norm=lambda: nn.LayerNorm(12),
    head=(12, 2),
)


add("reentrant-norm", images(4, 3), {"stem": 6, "block.1": 8})(
    lambda m, x: m.head((h := m.stem(x)) + checkpoint(m.block, h, use_reentrant=True)),
    stem=(3, 6),
    block=lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)),
    head=(6, 2),
)
add("pool-former", images(2, 1, 6, 6), {"stem": 6})(
    lambda m, x: m.head((h := m.stem(x)) + F.avg_pool2d(m.norm(h), 3, 1, 1) - m.norm(h)),
    stem=(1, 6, 3),
    norm=lambda: nn.GroupNorm(1, 6),
    head=(6, 2, 1),
)

# What cannot be pruned even so.
add("one-norm-for-two-streams", images(4, 3), {}, fixed=("sees other units from time to time",))(
    lambda m, x: m.p(m.norm(m.a(x))) + m.q(m.norm(m.b(x))),
    a=(3, 6),
    b=(3, 6),
    norm=lambda: nn.LayerNorm(6, elementwise_affine=False),
    p=(6, 2),
    q=(6, 2),
)
