"""The zoo, part two: kinds of wiring, and what cannot be cut."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import add, images

add("residual", images(4, 3), {"stem": 6, "a": 5})(
    lambda m, x: m.head(m.b(F.relu(m.a(h := m.stem(x)))) + h), stem=(3, 6), a=(6, 5), b=(5, 6), head=(6, 2)
)
add("concat", images(4, 3), {"a": 4, "b": 5})(
    lambda m, x: m.head(torch.cat([F.relu(m.a(x)), torch.tanh(m.b(x))], 1)), a=(3, 4), b=(3, 5), head=(9, 2)
)
add("concat-raw", images(4, 3), {"a": 4})(lambda m, x: m.head(torch.cat([x, F.relu(m.a(x)), x], 1)), a=(3, 4), head=(10, 2))
add("squeeze-excite", images(2, 1, 5, 5), {"conv": 6, "down": 3})(
    lambda m, x: m.head((h := F.relu(m.conv(x))) * torch.sigmoid(m.up(F.relu(m.down(h.mean((2, 3), keepdim=True)))))),
    conv=(1, 6, 3),
    down=(6, 3, 1),
    up=(3, 6, 1),
    head=(6, 2, 1),
)
add("vgg-small", images(2, 3, 8, 8), {"0": 6, "4": 8})(
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
    )
)


class Block(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.skip(x))


add("resnet-small", images(2, 3, 7, 7), {"0": 4, "3.conv1": 4, "4.conv1": 6, "4.conv2": 6})(
    lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        Block(4, 4),
        Block(4, 6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 2),
    )
)


add("glu", images(4, 3), {"0": 4})(lambda: nn.Sequential(nn.Linear(3, 8), nn.GLU(), nn.Linear(4, 2)))
add("pixel-shuffle", images(2, 1, 5, 5), {"0": 3})(
    lambda: nn.Sequential(nn.Conv2d(1, 12, 3), nn.PixelShuffle(2), nn.PReLU(3), nn.Conv2d(3, 2, 1))
)
add("normalized", images(4, 3), {"a": 6})(lambda m, x: m.head(F.normalize(F.relu(m.a(x)), dim=1)), a=(3, 6), head=(6, 2))
add("dict-and-keyword", lambda: ({"x": torch.randn(4, 3)},), {"a": 6}, kwargs=lambda: {"scale": torch.rand(4, 1)})(
    lambda m, batch, *, scale: {"logits": m.head(F.relu(m.a(batch["x"])) * scale)}, a=(3, 6), head=(6, 2)
)
add("sum-of-sigmoids", images(4, 3), {"b": 5}, fixed=("not zero",))(
    lambda m, x: m.head(F.relu(m.b(x))) + torch.sigmoid(m.a(x)).sum(-1, keepdim=True), a=(3, 6), b=(3, 5), head=(5, 2)
)
add("written-view", images(4, 3), {"b": 5}, fixed=("in place",))(
    lambda m, x: m.head(_write(m.a(x))) + m.side(F.relu(m.b(x))), a=(3, 6), b=(3, 5), head=(6, 2), side=(5, 2)
)
add("log-softmax", images(4, 3), {"0": 6})(
    lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.LogSoftmax(-1))
)


def _write(h: Tensor) -> Tensor:
    buffer = h.new_zeros(h.shape[0], h.shape[1] + 1)
    buffer[:, 1:] = h
    return buffer[:, 1:]
