"""The zoo, part one: kinds of layers, of wiring, and what cannot be cut."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import add, images, tokens

add("mlp", images(4, 5), {"0": 8, "2": 6})(
    lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
)


def _convnet(dim: int) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1]
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dim - 1]
    average = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dim - 1]
    return nn.Sequential(
        conv(2, 6, 3, padding=1),
        norm(6),
        nn.ReLU(inplace=True),
        pool(2),
        conv(6, 4, 3, padding=1, bias=False),
        nn.ELU(),
        average(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


for _dim in (1, 2, 3):
    add(f"conv{_dim}d", images(3, 2, *[6] * _dim), {"0": 6, "4": 4})(lambda d=_dim: _convnet(d))
add("depthwise", images(2, 2, 5, 5), {"0": 6, "3": 3})(
    lambda: nn.Sequential(
        nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU6(), nn.Conv2d(6, 3, 1), nn.Flatten(), nn.Linear(27, 2)
    )
)
add("grouped", images(2, 2, 6, 6), {"0": 4, "3": 6})(
    lambda: nn.Sequential(
        nn.Conv2d(2, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 2, 3)
    )
)
add("transposed-grouped", images(2, 2, 5), {"0": 4, "2": 3})(
    lambda: nn.Sequential(nn.Conv1d(2, 8, 1), nn.ReLU(), nn.ConvTranspose1d(8, 6, 3, groups=2), nn.ReLU(), nn.Conv1d(6, 2, 1))
)
add("transposed-depthwise", images(2, 2, 5), {"0": 4})(
    lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.ConvTranspose1d(4, 8, 3, groups=4), nn.ReLU(), nn.Conv1d(8, 2, 1))
)
add("group-norm", images(2, 1, 5, 5), {"0": 4})(
    lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 2, 1))
)
add("embedding-bag", tokens(11, 3, 4), {"0": 6, "1": 5})(
    lambda: nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
)


add("tied-autoencoder", images(4, 5), {"encoder": 7})(
    lambda m, x: F.linear(F.relu(m.encoder(x)), m.encoder.weight.t()), encoder=(5, 7)
)
add("siamese", images(4, 3), {"body.0": 6, "body.2": 4})(
    lambda m, x: m.head((m.body(x) - m.body(2 * x)).abs()),
    body=lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)),
    head=(4, 2),
)
add("lstm", images(5, 2, 3), {"rnn": 6})(lambda m, x: m.head(m.rnn(x)[0]), rnn=lambda: nn.LSTM(3, 6), head=(6, 2))
add("lstm-stacked", images(2, 5, 3), {"rnn": 6, "rnn#2": 6}, ties=(("rnn", "rnn#2"),))(
    lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=lambda: nn.LSTM(3, 6, num_layers=2, batch_first=True), head=(6, 2)
)
add("lstm-bidirectional", images(2, 5, 3), {"rnn": 6})(
    lambda m, x: m.head(m.rnn(x)[0]), rnn=lambda: nn.LSTM(3, 6, bidirectional=True, batch_first=True), head=(12, 2)
)


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
