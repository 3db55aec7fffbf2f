"""The zoo, part two: kinds of wiring, and what cannot be cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import Lambda, add, images

add(
    "residual",
    lambda: Lambda(
        lambda m, x: m.head(m.b(F.relu(m.a(h := m.stem(x)))) + h),
        stem=nn.Linear(3, 6),
        a=nn.Linear(6, 5),
        b=nn.Linear(5, 6),
        head=nn.Linear(6, 2),
    ),
    images(4, 3),
    {"stem": 6, "a": 5},
)
add(
    "concat",
    lambda: Lambda(
        lambda m, x: m.head(torch.cat([F.relu(m.a(x)), torch.tanh(m.b(x))], 1)),
        a=nn.Linear(3, 4),
        b=nn.Linear(3, 5),
        head=nn.Linear(9, 2),
    ),
    images(4, 3),
    {"a": 4, "b": 5},
)
add(
    "concat-raw",
    lambda: Lambda(lambda m, x: m.head(torch.cat([x, F.relu(m.a(x)), x], 1)), a=nn.Linear(3, 4), head=nn.Linear(10, 2)),
    images(4, 3),
    {"a": 4},
)
add(
    "squeeze-excite",
    lambda: Lambda(
        lambda m, x: m.head((h := F.relu(m.conv(x))) * torch.sigmoid(m.up(F.relu(m.down(h.mean((2, 3), keepdim=True)))))),
        conv=nn.Conv2d(1, 6, 3),
        down=nn.Conv2d(6, 3, 1),
        up=nn.Conv2d(3, 6, 1),
        head=nn.Conv2d(6, 2, 1),
    ),
    images(2, 1, 5, 5),
    {"conv": 6, "down": 3},
)
add(
    "vgg-small",
    lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    ),
    images(2, 3, 8, 8),
    {"0": 6, "4": 8},
)


class Block(nn.Module):
    """A residual block, with a projection where the width changes."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.skip(x))


add(
    "resnet-small",
    lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        Block(4, 4),
        Block(4, 6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 2),
    ),
    images(2, 3, 7, 7),
    {"0": 4, "3.conv1": 4, "4.conv1": 6, "4.conv2": 6},
)


class Dense(nn.Module):
    """A dense block: each layer reads all the earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 3 * k) for k in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(4 + 3 * k, 3, 3, padding=1) for k in range(3))
        self.head = nn.Linear(13, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = torch.cat([h, conv(F.relu(norm(h)))], 1)
        out: Tensor = self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))
        return out


add("densenet-small", Dense, images(2, 2, 6, 6), {"stem": 4, "convs.0": 3, "convs.1": 3, "convs.2": 3})
add("glu", lambda: nn.Sequential(nn.Linear(3, 8), nn.GLU(), nn.Linear(4, 2)), images(4, 3), {"0": 4})
add(
    "chunk",
    lambda: Lambda(
        lambda m, x: m.head((p := m.a(x).chunk(2, -1))[0] * torch.sigmoid(p[1])), a=nn.Linear(3, 8), head=nn.Linear(4, 2)
    ),
    images(4, 3),
    {"a": 4},
)
add(
    "pixel-shuffle",
    lambda: nn.Sequential(nn.Conv2d(1, 12, 3), nn.PixelShuffle(2), nn.PReLU(3), nn.Conv2d(3, 2, 1)),
    images(2, 1, 5, 5),
    {"0": 3},
)
add(
    "conv-time-slice",
    lambda: Lambda(
        lambda m, x: m.head(F.relu(m.conv(x)[:, :, :6]).mean(-1)), conv=nn.Conv1d(2, 5, 3, padding=2), head=nn.Linear(5, 2)
    ),
    images(3, 2, 6),
    {"conv": 5},
)
add(
    "pooled-dot",
    lambda: Lambda(
        lambda m, x: (F.relu(m.a(x)) * torch.tanh(m.b(x))).sum(-1, keepdim=True), a=nn.Linear(3, 6), b=nn.Linear(3, 6)
    ),
    images(4, 3),
    {"a": 6},
)
add(
    "normalised",
    lambda: Lambda(lambda m, x: m.head(F.normalize(F.relu(m.a(x)), dim=1)), a=nn.Linear(3, 6), head=nn.Linear(6, 2)),
    images(4, 3),
    {"a": 6},
)
add(
    "layer-scale",
    lambda: Lambda(
        lambda m, x: m.head(F.relu(m.a(x)) * m.scale),
        a=nn.Linear(3, 6),
        scale=nn.Parameter(torch.rand(6)),
        head=nn.Linear(6, 2),
    ),
    images(4, 3),
    {"a": 6},
)
add(
    "detached",
    lambda: Lambda(
        lambda m, x: m.head(h := F.relu(m.a(x))) + m.side(h.detach()),
        a=nn.Linear(3, 6),
        head=nn.Linear(6, 2),
        side=nn.Linear(6, 2),
    ),
    images(4, 3),
    {"a": 6},
)
add(
    "raw-matrix",
    lambda: Lambda(lambda m, x: F.relu(x @ m.w) @ m.v, w=nn.Parameter(torch.randn(3, 6)), v=nn.Parameter(torch.randn(6, 2))),
    images(4, 3),
    {"w": 6},
)
add(
    "einsum",
    lambda: Lambda(
        lambda m, x: torch.einsum("bh,hk->bk", F.relu(torch.einsum("bi,ih->bh", x, m.w)), m.v),
        w=nn.Parameter(torch.randn(3, 6)),
        v=nn.Parameter(torch.randn(6, 2)),
    ),
    images(4, 3),
    {"w": 6},
)
add(
    "dict-input",
    lambda: Lambda(lambda m, batch: {"logits": m.head(F.relu(m.a(batch["x"])))}, a=nn.Linear(3, 6), head=nn.Linear(6, 2)),
    lambda: ({"x": torch.randn(4, 3)},),
    {"a": 6},
)
add(
    "keyword-input",
    lambda: Lambda(lambda m, x, *, scale: m.head(F.relu(m.a(x)) * scale), a=nn.Linear(3, 6), head=nn.Linear(6, 2)),
    images(4, 3),
    {"a": 6},
    kwargs=lambda: {"scale": torch.rand(4, 1)},
)
add(
    "two-heads",
    lambda: Lambda(lambda m, x: (m.p(h := F.relu(m.a(x))), m.q(h)), a=nn.Linear(3, 6), p=nn.Linear(6, 2), q=nn.Linear(6, 3)),
    images(4, 3),
    {"a": 6},
)
add(
    "output-used",
    lambda: Lambda(
        lambda m, x: (h := F.relu(m.a(x)), m.q(F.relu(m.b(h)))), a=nn.Linear(3, 6), b=nn.Linear(6, 5), q=nn.Linear(5, 3)
    ),
    images(4, 3),
    {"b": 5},
)
add(
    "layer-norm",
    lambda: nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
    images(4, 3),
    {"2": 5},
    fixed=("layer_norm",),
)
add(
    "rms-norm",
    lambda: nn.Sequential(nn.Linear(3, 6), nn.RMSNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
    images(4, 3),
    {"2": 5},
    fixed=("'mean'",),
)
add(
    "softmax",
    lambda: nn.Sequential(nn.Linear(3, 6), nn.Softmax(-1), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
    images(4, 3),
    {"2": 5},
    fixed=("softmax",),
)
add(
    "hard-coded-view",
    lambda: Lambda(
        lambda m, x: m.head(F.relu(m.b(F.relu(m.conv(x)).view(-1, 36)))),
        conv=nn.Conv2d(1, 4, 3),
        b=nn.Linear(36, 5),
        head=nn.Linear(5, 2),
    ),
    images(2, 1, 5, 5),
    {"b": 5},
    fixed=("zoo_wiring.py",),
)
add(
    "constant-sum",
    lambda: Lambda(lambda m, x: m.head(F.relu(m.a(x) + x)), a=nn.Linear(6, 6), head=nn.Linear(6, 2)),
    images(4, 6),
    {},
    fixed=("belong to no unit",),
)
add(
    "sum-of-sigmoids",
    lambda: Lambda(
        lambda m, x: m.head(F.relu(m.b(x))) + torch.sigmoid(m.a(x)).sum(-1, keepdim=True),
        a=nn.Linear(3, 6),
        b=nn.Linear(3, 5),
        head=nn.Linear(5, 2),
    ),
    images(4, 3),
    {"b": 5},
    fixed=("not zero",),
)
add(
    "written-view",
    lambda: Lambda(
        lambda m, x: m.head(_write(m.a(x))) + m.side(F.relu(m.b(x))),
        a=nn.Linear(3, 6),
        b=nn.Linear(3, 5),
        head=nn.Linear(6, 2),
        side=nn.Linear(5, 2),
    ),
    images(4, 3),
    {"b": 5},
    fixed=("in place",),
)
add(
    "buffer-mask",
    lambda: Lambda(lambda m, x: m.head(F.relu(m.a(x)) * m.mask), a=nn.Linear(3, 6), mask=torch.rand(6), head=nn.Linear(6, 2)),
    images(4, 3),
    {"a": 6},
)
add(
    "transformer-layer",
    lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), nn.Linear(8, 2)),
    images(2, 3, 8),
    {"0.self_attn": 2, "0.linear1": 12},
    fixed=("units",),
)
add(
    "log-softmax",
    lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.LogSoftmax(-1)),
    images(4, 3),
    {"0": 6},
)
add(
    "channel-mean",
    lambda: Lambda(
        lambda m, x: m.head(F.relu(m.a(x))) + m.b(x).mean(-1, keepdim=True),
        a=nn.Linear(3, 6),
        b=nn.Linear(3, 5),
        head=nn.Linear(6, 2),
    ),
    images(4, 3),
    {"a": 6},
    fixed=("reduced over its units by 'mean'",),
)


def _write(h: Tensor) -> Tensor:
    buffer = h.new_zeros(h.shape[0], h.shape[1] + 1)
    buffer[:, 1:] = h
    return buffer[:, 1:]
