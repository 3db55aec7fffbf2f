"""Random networks from layers and wiring, each from one integer: what the fuzz test traces and cuts."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import Lambda

Rng = np.random.Generator
Op = tuple[nn.Module, tuple[int, ...]] | nn.Module
"""A module and the numbers of the values that it reads; a module alone reads the value that it was drawn for."""

Draws = Callable[["_Draw"], Op]

_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.SiLU, nn.ELU, nn.Softplus, nn.Identity, nn.Hardswish)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ops = nn.ModuleList()
        self.wiring: list[tuple[int, ...]] = []
        self.outputs: tuple[int, ...] = ()

    def append(self, op: nn.Module, reads: tuple[int, ...], values: list[Tensor]) -> None:
        self.ops.append(op)
        self.wiring.append(reads)
        made = op(*(values[i] for i in reads))
        values.extend(made if isinstance(made, tuple) else (made,))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for op, reads in zip(self.ops, self.wiring, strict=True):
            made = op(*(values[i] for i in reads))
            values.extend(made if isinstance(made, tuple) else (made,))
        return tuple(values[i] for i in self.outputs)


@dataclass
class _Draw:
    rng: Rng
    values: list[Tensor]
    at: int

    @property
    def x(self) -> Tensor:
        return self.values[self.at]

    @property
    def width(self) -> int:
        """Size of the axis of units: the last of (batch, …, features), the second of maps."""
        return self.x.shape[1 if self.x.dim() == 4 else -1]

    def size(self, low: int = 3, high: int = 9) -> int:
        return int(self.rng.integers(low, high))

    def one(self, *choices: int) -> int:
        return int(self.rng.choice(choices))

    def flip(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def act(self) -> nn.Module:
        return _ACTIVATIONS[int(self.rng.integers(len(_ACTIVATIONS)))]()

    def twins(self) -> list[int]:
        return [i for i, value in enumerate(self.values) if value.shape == self.x.shape and value.is_floating_point()]

    def partner(self) -> int:
        found = self.twins()
        return found[int(self.rng.integers(len(found)))]

    def conv(self, out: int, kernel: int = 1, groups: int = 1) -> nn.Module:
        return nn.Conv2d(self.width, out, kernel, padding=kernel // 2, groups=groups, bias=self.flip())

    def parameter(self, values: npt.NDArray[np.float64]) -> nn.Parameter:
        return nn.Parameter(torch.from_numpy(values))

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return (self.width, 1, 1) if self.x.dim() == 4 else (self.width,)

    def relayer(self, wide: int, out: int) -> nn.Module:
        return nn.Conv2d(wide, out, 1) if self.x.dim() == 4 else nn.Linear(wide, out)

    def layer(self, out: int) -> nn.Module:
        return self.conv(out, self.one(1, 3)) if self.x.dim() == 4 else nn.Linear(self.width, out, bias=self.flip())


def _dim(x: Tensor) -> int:
    return 1 if x.dim() == 4 else -1


def _residual(d: _Draw) -> nn.Module:
    inner = d.size()
    return Lambda(lambda m, x: x + m.b(m.act(m.a(x))), a=d.layer(inner), b=d.relayer(inner, d.width), act=d.act())


def _concat(d: _Draw) -> Op:
    near = [i for i, v in enumerate(d.values) if v.dim() == d.x.dim() and v.is_floating_point() and _joins(v, d.x)]
    other = near[int(d.rng.integers(len(near)))]
    return Lambda(lambda _, a, b: torch.cat([a, b], _dim(a))), (d.at, other)


def _joins(a: Tensor, b: Tensor) -> bool:
    dim = _dim(a) % a.dim()
    return all(i == dim or m == n for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)))


def _split(d: _Draw) -> nn.Module:
    half = d.size(2, 5)
    layer = d.layer(2 * half)
    if d.flip():
        return Lambda(lambda m, x: tuple(m.a(x).chunk(2, _dim(x))), a=layer)
    cut = d.size(1, 2 * half)
    return Lambda(lambda m, x: tuple(m.a(x).split([cut, 2 * half - cut], _dim(x))), a=layer)


def _twice(d: _Draw) -> nn.Module:
    half = d.size(2, 5)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        p, q = m.a(x).chunk(2, _dim(x))
        return torch.cat([p, q, m.b(torch.relu(q))], _dim(x))

    return Lambda(run, a=d.layer(2 * half), b=d.relayer(half, half))


def _reuse(d: _Draw) -> Op:
    other = d.partner()
    return Lambda(lambda m, a, b: m.a(a).relu() - m.a(b).tanh(), a=d.layer(d.size())), (d.at, other)


def _again(d: _Draw) -> nn.Module:
    return Lambda(lambda m, x: torch.tanh(m.a(torch.relu(m.a(x)))), a=d.relayer(d.width, d.width))


def _scale(d: _Draw) -> nn.Module:
    return Lambda(lambda m, x: x * m.gain, gain=d.parameter(d.rng.uniform(0.5, 1.5, d.unit_shape)))


def _slice(d: _Draw) -> nn.Module:
    stop = max(2, d.width - 1)
    return Lambda(lambda _, x: x.narrow(_dim(x), 0, stop))


def _squeeze_excite(d: _Draw) -> nn.Module:
    inner = d.size(2, 5)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True) if x.dim() == 4 else x
        return x * torch.sigmoid(m.up(torch.relu(m.down(pooled))))

    return Lambda(run, down=d.relayer(d.width, inner), up=d.relayer(inner, d.width))


_ANY: tuple[Draws, ...] = (
    lambda d: nn.Sequential(d.layer(d.size()), d.act()),
    lambda d: nn.Sequential(d.layer(d.size()), d.act()),
    _residual,
    lambda d: (Lambda(lambda _, a, b: a + 0.5 * b), (d.at, d.partner())),
    lambda d: (Lambda(lambda _, a, b: a * torch.sigmoid(b)), (d.at, d.partner())),
    _concat,
    _split,
    _twice,
    lambda d: Lambda(lambda m, x: F.glu(m.a(x), _dim(x)), a=d.layer(2 * d.size(2, 6))),
    _reuse,
    _again,
    _scale,
    lambda d: Lambda(lambda m, x: torch.relu(x + m.bias), bias=d.parameter(d.rng.normal(size=d.unit_shape))),
    _slice,
    _squeeze_excite,
    lambda d: Lambda(lambda m, x: x - m.a(x).mean(_dim(x), keepdim=True), a=d.layer(d.size())),
    lambda d: Lambda(lambda m, x: torch.softmax(m.a(x), _dim(x)), a=d.layer(d.size())),
)


_FLAT: tuple[Draws, ...] = (  # (batch, features)
    *_ANY,
    lambda d: nn.Sequential(nn.BatchNorm1d(d.width), d.act()),
    lambda d: nn.Sequential(nn.BatchNorm1d(d.width), d.act()),
    lambda d: (Lambda(lambda _, x, y: x * (x * y).sum(-1, keepdim=True)), (d.at, d.partner())),
)


def _recurrent(d: _Draw) -> nn.Module:
    kind = (nn.LSTM, nn.GRU, nn.RNN)[d.one(0, 1, 2)]
    rnn = kind(d.width, d.size(3, 6), num_layers=d.one(1, 1, 2), bidirectional=d.flip(), batch_first=True)
    return Lambda(lambda m, x: m.rnn(x)[0], rnn=rnn)


def _attention(d: _Draw) -> nn.Module:
    heads, size = d.one(2, 3), d.one(2, 4)
    inner = heads * size

    def run(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, size)).transpose(1, 2) for f in (m.q, m.k, m.v))
        return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    q, k, v = (nn.Linear(d.width, inner, bias=d.flip()) for _ in range(3))
    return Lambda(run, q=q, k=k, v=v, out=nn.Linear(inner, d.size()))


def _multihead(d: _Draw) -> nn.Module:
    heads = d.one(2, 3)
    inner = heads * d.one(2, 3)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        h = m.into(x)
        return m.mha(h, h, h, need_weights=False)[0]

    return Lambda(run, into=nn.Linear(d.width, inner), mha=nn.MultiheadAttention(inner, heads, batch_first=True))


def _time_conv(d: _Draw) -> nn.Module:
    conv = nn.Conv1d(d.width, d.size(), 3, padding=2)
    return Lambda(lambda m, x: torch.relu(m.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2), conv=conv)


def _pool_time(d: _Draw) -> nn.Module:
    mean = d.flip()
    return Lambda(lambda _, x: x.mean(1) if mean else x[:, -1])


_SEQUENCE: tuple[Draws, ...] = (  # (batch, time, features)
    *_ANY,
    lambda d: nn.LayerNorm(d.width) if d.flip() else nn.RMSNorm(d.width),
    _recurrent,
    _recurrent,
    lambda d: Lambda(lambda m, x: m.rnn(x)[1][-1], rnn=nn.GRU(d.width, d.size(3, 6), batch_first=True, bidirectional=d.flip())),
    _attention,
    _multihead,
    _time_conv,
    _pool_time,
    lambda _: nn.Flatten(),
)


def _conv_block(d: _Draw) -> nn.Module:
    out = d.size()
    return nn.Sequential(d.conv(out, 3), nn.BatchNorm2d(out, affine=d.flip()), d.act())


def _grouped(d: _Draw) -> nn.Module:
    groups = d.one(2, 3)
    inner = groups * d.one(1, 2)
    body = nn.Conv2d(inner, groups * d.one(1, 2, 3), 3, padding=1, groups=groups)
    return nn.Sequential(d.conv(inner), nn.ReLU(), body)


_MAPS: tuple[Draws, ...] = (  # (batch, channels, height, width)
    *_ANY,
    _conv_block,
    _conv_block,
    _grouped,
    lambda d: nn.Sequential(nn.Conv2d(d.width, d.width * d.one(1, 2), 3, padding=1, groups=d.width), d.act()),
    lambda d: nn.InstanceNorm2d(d.width, affine=d.flip(), track_running_stats=d.flip()),
    lambda d: nn.Sequential(nn.ConvTranspose2d(d.width, d.size(), 2, stride=2), nn.AvgPool2d(2)),
    lambda d: nn.Sequential(d.conv(4 * d.size(2, 4)), nn.PixelShuffle(2), nn.MaxPool2d(2)),
    lambda d: nn.Sequential(d.conv(2 * d.size(2, 4)), nn.ChannelShuffle(2)),
    lambda _: Lambda(lambda _, x: F.adaptive_avg_pool2d(x, 1).flatten(1)),
    lambda _: Lambda(lambda _, x: x.flatten(2).transpose(1, 2)),
    lambda _: nn.Flatten(),
)
_TABLES = {2: _FLAT, 3: _SEQUENCE, 4: _MAPS}


def seeds(count: int, step: int) -> range:
    """Every `step`-th of `count` seeds, or all of them if `SPARSEKIT_ALL_SEEDS` is set: minutes in place of seconds."""
    return range(0, count, 1 if os.environ.get("SPARSEKIT_ALL_SEEDS") else step)


def build(seed: int) -> tuple[Network, Tensor]:
    """A network in float64 and eval mode, with statistics, scales and biases away from what they start as, and its input."""
    rng = np.random.default_rng([20250, seed])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return _build(rng)
        finally:
            torch.set_default_dtype(before)


def _build(rng: Rng) -> tuple[Network, Tensor]:
    network = Network().eval()
    kind = rng.integers(4)
    x = (torch.randn(4, 5), torch.randn(3, 4, 5), torch.randn(2, 3, 4, 4), torch.randint(11, (3, 4)))[kind]
    values = [x]
    with torch.no_grad():
        if kind == 3:
            network.append(nn.Embedding(11, int(rng.integers(4, 8))).eval(), (0,), values)
        for _ in range(int(rng.integers(4, 10))):
            # Mostly go on from what was made last, sometimes branch off from before.
            floats = [i for i, value in enumerate(values) if value.is_floating_point()]
            at = floats[-1] if rng.random() < 0.7 else floats[int(rng.integers(len(floats)))]
            draw = _Draw(rng, values, at)
            if draw.width < 2:
                continue
            table = _TABLES[draw.x.dim()]
            drawn = table[int(rng.integers(len(table)))](draw)
            op, reads = drawn if isinstance(drawn, tuple) else (drawn, (at,))
            network.append(op.eval(), reads, values)
        for name, entry in network.state_dict().items():
            if entry.dim() == 1 and entry.is_floating_point():
                entry.copy_(torch.rand(entry.shape) + 0.5 if "running_var" in name else entry + 0.3 * torch.randn(entry.shape))
        heads = [len(values) - 1] + ([int(rng.integers(1, len(values)))] if rng.random() < 0.3 and len(values) > 2 else [])
        for at in dict.fromkeys(heads):
            draw = _Draw(rng, values, at)
            if values[at].is_floating_point():
                network.append(draw.layer(2).eval(), (at,), values)
                network.outputs += (len(values) - 1,)
    return network, x
