"""The zoo: kinds of layers and wiring, and constructs that are known to break structured pruning, each exact or refused."""

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from zoo_base import Lambda, add, images, tokens


def _cell_loop(m: Any, x: Tensor) -> Tensor:
    """Call a cell step by step, and write its outputs into one tensor."""
    steps, batch, _ = x.shape
    out = x.new_zeros(batch, steps, m.cell.hidden_size)
    h = c = x.new_zeros(batch, m.cell.hidden_size)
    for t in range(steps):
        if isinstance(m.cell, nn.LSTMCell):
            h, c = m.cell(x[t], (h, c))
        else:
            h = m.cell(x[t], h)
        out[:, t] = h
    return m.head(out)


add("gru-cell-loop", images(4, 2, 3), {"cell": 6})(_cell_loop, cell=lambda: nn.GRUCell(3, 6), head=(6, 2))
add("lstm-cell-loop", images(4, 2, 3), {"cell": 6})(_cell_loop, cell=lambda: nn.LSTMCell(3, 6), head=(6, 2))
add("packed-and-padded", images(3, 4, 3), {"embed": 4, "rnn": 6, "rnn#2": 6}, ties=(("rnn", "rnn#2"),))(
    lambda m, x: m.head(
        pad_packed_sequence(
            m.rnn(pack_padded_sequence(m.embed(x), torch.tensor([4, 1, 3]), batch_first=True, enforce_sorted=False))[0],
            batch_first=True,
        )[0]
    ),
    embed=(3, 4),
    rnn=lambda: nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True),
    head=(12, 2),
)
add("last-states", images(5, 2, 3), {"rnn": 6, "rnn#2": 6}, ties=(("rnn", "rnn#2"),))(
    lambda m, x: m.head(torch.cat([(h := m.rnn(x)[1])[-1], h[-2:].sum(0), h[::2][0], h[1::2][1]], -1)),
    rnn=lambda: nn.GRU(3, 6, num_layers=2, bidirectional=True),
    head=(24, 2),
)
for _name, _read in (
    ("of-some-units", lambda h: h[:, :, :3][0].repeat(1, 2)),
    ("taken-apart", lambda h: h.view(*h.shape[:2], 2, 3)[0].flatten(1)),
):
    add(f"last-states-{_name}", images(5, 2, 3), {}, fixed=("stacked states of several layers",))(
        lambda m, x, read=_read: m.head(read(m.rnn(x)[1])),
        rnn=lambda: nn.GRU(3, 6, num_layers=2, bidirectional=True),
        head=(6, 2),
    )
add("first-state-in-a-buffer", images(5, 2, 3), {"rnn": 6})(
    lambda m, x: m.head(m.rnn(x, m.h0)[0]), rnn=lambda: nn.GRU(3, 6), h0=lambda: torch.randn(1, 2, 6), head=(6, 2)
)
add(
    "recurrent-weight-norm",
    images(5, 2, 3),
    {"up": 5},
    fixed=("recurrent layers with computed weights (weight_hh_l0) keep their units",),
)(
    lambda m, x: m.head(F.relu(m.up(m.rnn(x)[0]))),
    rnn=lambda: parametrizations.weight_norm(nn.GRU(3, 6), "weight_hh_l0"),
    up=(6, 5),
    head=(5, 2),
)


def _behind(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def _quietly(old: Callable[..., nn.Module], layer: nn.Module, *args: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return old(layer, *args)


add("weight-norm", images(4, 3), {"0": 6, "2": 5})(lambda: _behind(parametrizations.weight_norm(nn.Linear(3, 6))))
add("weight-norm-hook", images(4, 3), {"0": 6, "2": 5})(lambda: _behind(_quietly(nn.utils.weight_norm, nn.Linear(3, 6))))
add("weight-norm-of-all", images(4, 3), {"2": 5}, fixed=("'0' (6 units) cannot be pruned: weight_norm over the whole weight",))(
    lambda: _behind(parametrizations.weight_norm(nn.Linear(3, 6), dim=None))
)
add(
    "spectral-norm",
    images(4, 3),
    {"2": 5},
    fixed=("'0' (6 units) cannot be pruned: spectral_norm divides by a norm of the whole weight",),
)(lambda: _behind(parametrizations.spectral_norm(nn.Linear(3, 6))))
add("spectral-norm-hook", images(4, 3), {"2": 5}, fixed=("spectral_norm divides by a norm of the whole weight",))(
    lambda: _behind(_quietly(nn.utils.spectral_norm, nn.Linear(3, 6)))
)
add(
    "orthogonal",
    images(4, 3),
    {"2": 5},
    fixed=("'0' (6 units) cannot be pruned: rows and columns of an orthogonal weight depend on each other",),
)(lambda: _behind(parametrizations.orthogonal(nn.Linear(3, 6))))


add("data-parallel", images(4, 3), {"module.0": 6, "module.2": 5})(lambda: nn.DataParallel(_behind(nn.Linear(3, 6))))


add("checkpointed-reentrant", images(4, 3), {"stem": 4, "a": 6, "b": 5})(
    lambda m, x: m.head(checkpoint(lambda y: F.relu(m.b(F.relu(m.a(y)))), m.stem(x), use_reentrant=True)),
    stem=(3, 4),
    a=(4, 6),
    b=(6, 5),
    head=(5, 2),
)


def _normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))


add("group-norm-plain", images(2, 1, 5, 5), {"0": 4, "3": 6})(lambda: _normed(nn.GroupNorm(4, 8, affine=False)))
add("group-norm-of-all", images(2, 1, 5, 5), {"3": 6}, fixed=("normalized over all its units by 'group_norm' in '1'",))(
    lambda: _normed(nn.GroupNorm(1, 8))
)
add("group-norm-functional", images(4, 3), {}, fixed=("a fixed number of groups at zoo_constructs.py",))(
    lambda m, x: m.head(F.group_norm(m.a(x), 4)), a=(3, 8), head=(8, 2)
)
add("instance-norm-plain", images(2, 1, 5, 5), {"0": 8, "3": 6})(lambda: _normed(nn.InstanceNorm2d(8)))
add("instance-norm-statistics", images(2, 1, 5, 5), {"0": 8, "3": 6})(
    lambda: _normed(nn.InstanceNorm2d(8, track_running_stats=True))
)
add("local-response-norm", images(2, 1, 5, 5), {"3": 6}, fixed=("in '1'",))(lambda: _normed(nn.LocalResponseNorm(3)))
add("split-unevenly", images(4, 3), {"p": 5}, fixed=("split into fixed sizes [2, 4] at zoo_constructs.py",))(
    lambda m, x: m.head(F.relu(m.p((s := m.a(x).split([2, 4], -1))[0]) + m.q(s[1]))), a=(3, 6), p=(2, 5), q=(4, 5), head=(5, 2)
)
add("pixel-unshuffle", images(2, 1, 4, 4), {"0": 4})(
    lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.PixelUnshuffle(2), nn.ReLU(), nn.Conv2d(16, 2, 1))
)


add("patches-of-one-image", images(1, 6, 6), {"a": 6})(
    lambda m, x: m.head(F.fold(m.scale * F.unfold(torch.tanh(m.a(x)), 2, stride=2), (4, 4), 2, stride=2)),
    a=(1, 6, 3),
    scale=lambda: nn.Parameter(torch.rand(24, 1)),
    head=(6, 2, 1),
)
add("channel-shuffle", images(2, 1, 6, 6), {"a": 4, "b": 2, "c": 4})(
    lambda m, x: m.head(F.relu(m.c(m.depthwise(F.channel_shuffle(F.relu(m.b(F.relu(m.a(x)))), 2))))),
    a=(1, 8, 3),
    b=lambda: nn.Conv2d(8, 8, 1, groups=2),
    depthwise=lambda: nn.Conv2d(8, 8, 3, groups=8),
    c=lambda: nn.Conv2d(8, 8, 1, groups=2),
    head=(8, 2, 1),
)
_ROWS = torch.tensor([1, 0, 2, 2])
_MOVES = (
    lambda h: h.new_zeros(3, h.shape[1]).index_add(0, _ROWS, h),
    lambda h: h.new_zeros(3, h.shape[1]).index_add_(0, _ROWS, h, alpha=2),
    lambda h: torch.zeros_like(h).index_copy(0, torch.tensor([3, 1, 0, 2]), h),
    lambda h: torch.zeros_like(h).scatter_add(0, _ROWS[:, None].expand(-1, h.shape[1]), h),
    lambda h: h.gather(0, _ROWS[:2, None].expand(-1, h.shape[1])),
)
add("rows-moved", images(4, 3), {"a": 6})(
    lambda m, x: m.head(torch.cat([move(torch.tanh(m.a(x))) for move in _MOVES])), a=(3, 6), head=(6, 2)
)
add("slots-of-fixed-size", images(4, 3), {}, fixed=("written in place through a view by 'copy' at zoo_constructs.py",))(
    lambda m, x: m.head(_slots(x.new_zeros(x.shape[0], 12), F.relu(m.a(x)), F.relu(m.b(x)))), a=(3, 6), b=(3, 6), head=(12, 2)
)


def _slots(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out[:, :6], out[:, 6:] = a, b
    return out


add("interpolated-sum", images(2, 1, 5, 5), {"a": 6})(
    lambda m, x: m.head(
        F.interpolate(F.relu(m.a(x)), scale_factor=2, mode="bilinear") + F.interpolate(F.relu(m.b(x)), size=(6, 6))
    ),
    a=(1, 6, 3),
    b=(1, 6, 1),
    head=(6, 2, 1),
)
add("maxout", images(4, 3), {"a": 6})(lambda m, x: m.head(m.a(x).view(x.shape[0], -1, 2).amax(-1)), a=(3, 12), head=(6, 2))


def _unsaved() -> nn.Module:
    """A tensor of one number per unit outside the state."""
    model = Lambda(lambda m, x: m.head(F.relu(m.b(m.a(x) * m.scale.to(x.dtype)))), a=(3, 6), b=(6, 5), head=(5, 2))
    model.register_buffer("scale", torch.rand(6), persistent=False)
    return model


add("unsaved-buffer", images(4, 3), {"a": 6, "b": 5})(_unsaved)
add("bilinear", images(4, 3), {"both": 4}, fixed=("operator '_trilinear' is not known to keep units apart",))(
    lambda m, x: m.head(F.relu(m.both(F.relu(m.a(x)), F.relu(m.b(x))))),
    a=(3, 6),
    b=(3, 5),
    both=lambda: nn.Bilinear(6, 5, 4),
    head=(4, 2),
)
add("weights-made-by-a-network", images(4, 3), {"b": 5}, fixed=("'a' (6 units) cannot be pruned",))(
    lambda m, x: F.linear(F.relu(m.a(F.relu(m.b(x)))), m.maker(x.new_ones(4)).view(2, 6)), a=(5, 6), b=(3, 5), maker=(4, 12)
)
add("distance-to-prototypes", images(4, 3), {"b": 5, "a": 6})(
    lambda m, x: torch.cdist(F.relu(m.a(F.relu(m.b(x)))), m.prototypes),
    a=(5, 6),
    b=(3, 5),
    prototypes=lambda: nn.Parameter(torch.randn(4, 6)),
)
add("fourier", images(2, 4, 3), {"b": 5, "a": 6})(
    lambda m, x: m.head(torch.fft.fft(m.a(F.relu(m.b(x))), dim=1).real), a=(5, 6), b=(3, 5), head=(6, 2)
)


@dataclasses.dataclass
class Result:
    """Two outputs."""

    logits: Tensor
    extra: Tensor


Pair = collections.namedtuple("Pair", "a b")

add("dataclasses", lambda: (Result(torch.randn(4, 3), torch.randn(4, 2)),), {"a": 6})(
    lambda m, batch: Result(m.head(h := F.relu(m.a(batch.logits) + m.b(batch.extra))), m.extra(h)),
    a=(3, 6),
    b=(2, 6),
    head=(6, 2),
    extra=(6, 2),
)
add("namedtuples", lambda: (Pair(torch.randn(4, 3), torch.randn(4, 2)),), {"a": 6})(
    lambda m, pair: Pair(m.head(F.relu(m.a(pair.a) + m.b(pair.b))), None), a=(3, 6), b=(2, 6), head=(6, 2)
)


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
