"""Random networks from layers and wiring, each from one integer: what the fuzz test traces and cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import Lambda

__all__ = ["Network", "build"]

Rng = np.random.Generator
Op = tuple[nn.Module, tuple[int, ...]]
"""A module and the numbers of the values that it reads."""

_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.SiLU, nn.ELU, nn.Softplus, nn.Identity, nn.Hardswish)


class Network(nn.Module):
    """Runs its operations one after the other; each reads values that were made before and appends what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = nn.ModuleList()
        self.wiring: list[tuple[int, ...]] = []
        self.outputs: tuple[int, ...] = ()

    def append(self, op: nn.Module, reads: tuple[int, ...], values: list[Tensor]) -> None:
        """Add an operation and run it on the example values."""
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
    """What an operation is drawn from.

    Args:
        rng: The only source of chance.
        values: What was made so far.
        at: The value to go on with.
    """

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
        """Values of the same shape, this one included."""
        return [i for i, value in enumerate(self.values) if value.shape == self.x.shape and value.is_floating_point()]

    def partner(self) -> int:
        found = self.twins()
        return found[int(self.rng.integers(len(found)))]

    def conv(self, out: int, kernel: int = 1, groups: int = 1) -> nn.Module:
        return nn.Conv2d(self.width, out, kernel, padding=kernel // 2, groups=groups, bias=self.flip())

    def layer(self, out: int) -> nn.Module:
        """A layer of `out` units that reads this value."""
        return self.conv(out, self.one(1, 3)) if self.x.dim() == 4 else nn.Linear(self.width, out, bias=self.flip())


def _dim(x: Tensor) -> int:
    return 1 if x.dim() == 4 else -1


# What follows reads any layout.


def _layer(d: _Draw) -> Op:
    return nn.Sequential(d.layer(d.size()), d.act()), (d.at,)


def _residual(d: _Draw) -> Op:
    inner = d.size()
    return Lambda(lambda m, x: x + m.b(m.act(m.a(x))), a=d.layer(inner), b=_relayer(d, inner, d.width), act=d.act()), (d.at,)


def _relayer(d: _Draw, wide: int, out: int) -> nn.Module:
    return nn.Conv2d(wide, out, 1) if d.x.dim() == 4 else nn.Linear(wide, out)


def _sum(d: _Draw) -> Op:
    return Lambda(lambda _, a, b: a + 0.5 * b), (d.at, d.partner())


def _product(d: _Draw) -> Op:
    return Lambda(lambda _, a, b: a * torch.sigmoid(b)), (d.at, d.partner())


def _concat(d: _Draw) -> Op:
    near = [i for i, v in enumerate(d.values) if v.dim() == d.x.dim() and v.is_floating_point() and _joins(v, d.x)]
    other = near[int(d.rng.integers(len(near)))]
    return Lambda(lambda _, a, b: torch.cat([a, b], _dim(a))), (d.at, other)


def _joins(a: Tensor, b: Tensor) -> bool:
    dim = _dim(a) % a.dim()
    return all(i == dim or m == n for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)))


def _split(d: _Draw) -> Op:
    half = d.size(2, 5)
    layer = d.layer(2 * half)
    if d.flip():
        return Lambda(lambda m, x: tuple(m.a(x).chunk(2, _dim(x))), a=layer), (d.at,)
    cut = d.size(1, 2 * half)
    return Lambda(lambda m, x: tuple(m.a(x).split([cut, 2 * half - cut], _dim(x))), a=layer), (d.at,)


def _twice(d: _Draw) -> Op:
    half = d.size(2, 5)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        p, q = m.a(x).chunk(2, _dim(x))
        return torch.cat([p, q, m.b(torch.relu(q))], _dim(x))

    return Lambda(run, a=d.layer(2 * half), b=_relayer(d, half, half)), (d.at,)


def _glu(d: _Draw) -> Op:
    return Lambda(lambda m, x: F.glu(m.a(x), _dim(x)), a=d.layer(2 * d.size(2, 6))), (d.at,)


def _reuse(d: _Draw) -> Op:
    other = d.partner()
    return Lambda(lambda m, a, b: m.a(a).relu() - m.a(b).tanh(), a=d.layer(d.size())), (d.at, other)


def _again(d: _Draw) -> Op:
    inner = _relayer(d, d.width, d.width)
    return Lambda(lambda m, x: torch.tanh(m.a(torch.relu(m.a(x)))), a=inner), (d.at,)


def _scale(d: _Draw) -> Op:
    shape = (d.width, 1, 1) if d.x.dim() == 4 else (d.width,)
    gain = nn.Parameter(torch.from_numpy(d.rng.uniform(0.5, 1.5, shape)))
    return Lambda(lambda m, x: x * m.gain, gain=gain), (d.at,)


def _shift(d: _Draw) -> Op:
    shape = (d.width, 1, 1) if d.x.dim() == 4 else (d.width,)
    return Lambda(lambda m, x: torch.relu(x + m.bias), bias=nn.Parameter(torch.from_numpy(d.rng.normal(size=shape)))), (d.at,)


def _slice(d: _Draw) -> Op:
    stop = max(2, d.width - 1)
    return Lambda(lambda _, x: x.narrow(_dim(x), 0, stop)), (d.at,)


def _squeeze_excite(d: _Draw) -> Op:
    inner = d.size(2, 5)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True) if x.dim() == 4 else x
        return x * torch.sigmoid(m.up(torch.relu(m.down(pooled))))

    return Lambda(run, down=_relayer(d, d.width, inner), up=_relayer(d, inner, d.width)), (d.at,)


def _mean(d: _Draw) -> Op:
    return Lambda(lambda m, x: x - m.a(x).mean(_dim(x), keepdim=True), a=d.layer(d.size())), (d.at,)


def _softmax(d: _Draw) -> Op:
    return Lambda(lambda m, x: torch.softmax(m.a(x), _dim(x)), a=d.layer(d.size())), (d.at,)


def _tied(d: _Draw) -> Op:
    if d.x.dim() == 4:
        return _again(d)
    return Lambda(lambda m, x: F.linear(torch.relu(m.a(x)), m.a.weight.t()), a=nn.Linear(d.width, d.size())), (d.at,)


def _raw(d: _Draw) -> Op:
    if d.x.dim() == 4:
        return _scale(d)
    weight = nn.Parameter(torch.from_numpy(d.rng.normal(size=(d.width, d.size()))))
    return Lambda(lambda m, x: torch.tanh(x @ m.w), w=weight), (d.at,)


# What follows reads (batch, features).


def _batch_norm(d: _Draw) -> Op:
    return nn.Sequential(nn.BatchNorm1d(d.width), d.act()), (d.at,)


def _fold(d: _Draw) -> Op:
    rows = d.one(2, 3)
    return Lambda(lambda m, x: m.a(x).unflatten(-1, (rows, -1)), a=nn.Linear(d.width, rows * d.size())), (d.at,)


def _dot(d: _Draw) -> Op:
    return Lambda(lambda _, x, y: x * (x * y).sum(-1, keepdim=True)), (d.at, d.partner())


# What follows reads (batch, time, features).


def _layer_norm(d: _Draw) -> Op:
    return (nn.LayerNorm(d.width) if d.flip() else nn.RMSNorm(d.width)), (d.at,)


def _recurrent(d: _Draw) -> Op:
    kind = (nn.LSTM, nn.GRU, nn.RNN)[d.one(0, 1, 2)]
    rnn = kind(d.width, d.size(3, 6), num_layers=d.one(1, 1, 2), bidirectional=d.flip(), batch_first=True)
    return Lambda(lambda m, x: m.rnn(x)[0], rnn=rnn), (d.at,)


def _last_state(d: _Draw) -> Op:
    rnn = nn.GRU(d.width, d.size(3, 6), batch_first=True, bidirectional=d.flip())
    return Lambda(lambda m, x: m.rnn(x)[1][-1], rnn=rnn), (d.at,)


def _attention(d: _Draw) -> Op:
    heads, size = d.one(2, 3), d.one(2, 4)
    inner = heads * size

    def run(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, size)).transpose(1, 2) for f in (m.q, m.k, m.v))
        return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    q, k, v = (nn.Linear(d.width, inner, bias=d.flip()) for _ in range(3))
    return Lambda(run, q=q, k=k, v=v, out=nn.Linear(inner, d.size())), (d.at,)


def _multihead(d: _Draw) -> Op:
    heads = d.one(2, 3)
    inner = heads * d.one(2, 3)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        h = m.into(x)
        return m.mha(h, h, h, need_weights=False)[0]  # type: ignore[no-any-return]

    return Lambda(run, into=nn.Linear(d.width, inner), mha=nn.MultiheadAttention(inner, heads, batch_first=True)), (d.at,)


def _time_conv(d: _Draw) -> Op:
    conv = nn.Conv1d(d.width, d.size(), 3, padding=2)
    return Lambda(lambda m, x: torch.relu(m.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2), conv=conv), (d.at,)


def _pool_time(d: _Draw) -> Op:
    mean = d.flip()
    return Lambda(lambda _, x: x.mean(1) if mean else x[:, -1]), (d.at,)


def _stack(d: _Draw) -> Op:
    return Lambda(lambda _, a, b: torch.stack([a, torch.relu(b)], 1).sum(1)), (d.at, d.partner())


def _einsum(d: _Draw) -> Op:
    weight = nn.Parameter(torch.from_numpy(d.rng.normal(size=(d.width, d.size()))))
    return Lambda(lambda m, x: torch.einsum("...i,ij->...j", x, m.w), w=weight), (d.at,)


def _flatten(d: _Draw) -> Op:
    return nn.Flatten(), (d.at,)


# What follows reads (batch, channels, height, width).


def _conv_block(d: _Draw) -> Op:
    out = d.size()
    return nn.Sequential(d.conv(out, 3), nn.BatchNorm2d(out, affine=d.flip()), d.act()), (d.at,)


def _grouped(d: _Draw) -> Op:
    groups = d.one(2, 3)
    inner = groups * d.one(1, 2)
    body = nn.Conv2d(inner, groups * d.one(1, 2, 3), 3, padding=1, groups=groups)
    return nn.Sequential(d.conv(inner), nn.ReLU(), body), (d.at,)


def _depthwise(d: _Draw) -> Op:
    return nn.Sequential(nn.Conv2d(d.width, d.width * d.one(1, 2), 3, padding=1, groups=d.width), d.act()), (d.at,)


def _group_norm(d: _Draw) -> Op:
    groups = d.one(2, 3)
    inner = groups * d.one(1, 2)
    return nn.Sequential(d.conv(inner), nn.GroupNorm(groups, inner), d.act()), (d.at,)


def _instance_norm(d: _Draw) -> Op:
    return nn.InstanceNorm2d(d.width, affine=d.flip(), track_running_stats=d.flip()), (d.at,)


def _transposed(d: _Draw) -> Op:
    return nn.Sequential(nn.ConvTranspose2d(d.width, d.size(), 2, stride=2), nn.AvgPool2d(2)), (d.at,)


def _shuffle(d: _Draw) -> Op:
    return nn.Sequential(d.conv(4 * d.size(2, 4)), nn.PixelShuffle(2), nn.MaxPool2d(2)), (d.at,)


def _resample(d: _Draw) -> Op:
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.AvgPool2d(2)), (d.at,)


def _channel_shuffle(d: _Draw) -> Op:
    return nn.Sequential(d.conv(2 * d.size(2, 4)), nn.ChannelShuffle(2)), (d.at,)


def _prelu(d: _Draw) -> Op:
    return nn.PReLU(d.width), (d.at,)


def _tokens(d: _Draw) -> Op:
    return Lambda(lambda _, x: x.flatten(2).transpose(1, 2)), (d.at,)


def _pool(d: _Draw) -> Op:
    return Lambda(lambda _, x: F.adaptive_avg_pool2d(x, 1).flatten(1)), (d.at,)


_ANY = (
    _layer, _layer, _residual, _sum, _product, _concat, _split, _twice, _glu, _reuse, _again, _scale, _shift, _slice,
    _squeeze_excite, _mean, _softmax, _tied, _raw,
)  # fmt: skip
_FLAT = (*_ANY, _batch_norm, _batch_norm, _fold, _dot, _stack, _einsum)
_SEQUENCE = (
    *_ANY, _layer_norm, _recurrent, _recurrent, _last_state, _attention, _multihead, _time_conv, _pool_time, _flatten,
    _einsum,
)  # fmt: skip
_MAPS = (
    *_ANY, _conv_block, _conv_block, _grouped, _depthwise, _group_norm, _instance_norm, _transposed, _shuffle, _resample,
    _channel_shuffle, _prelu, _pool, _tokens, _flatten,
)  # fmt: skip
_TABLES: dict[int, tuple[Callable[[_Draw], Op], ...]] = {2: _FLAT, 3: _SEQUENCE, 4: _MAPS}


def build(seed: int) -> tuple[Network, Tensor]:
    """A network in float64 and its input.

    Args:
        seed: Everything follows from it.

    Returns:
        The network in eval mode, with batch statistics, scales and biases away from what they start as.
    """
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
            op, reads = table[int(rng.integers(len(table)))](draw)
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
