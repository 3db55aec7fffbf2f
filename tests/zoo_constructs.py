"""The zoo, part four: constructs that are known to break structured pruning, by name, each exact or fixed with its reason."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from zoo_base import Lambda, add, images, tokens

# ---- recurrent layers


def _recurrent(rnn: nn.Module, width: int) -> nn.Module:
    return Lambda(lambda m, x: m.head(m.rnn(x)[0]), rnn=rnn, head=nn.Linear(width, 2))


add("lstm-projected", images(5, 2, 3), {}, fixed=("recurrent layers with a projection keep their units",))(
    lambda: _recurrent(nn.LSTM(3, 8, proj_size=4), 4)
)
add("rnn-relu", images(5, 2, 3), {"rnn": 6})(lambda: _recurrent(nn.RNN(3, 6, nonlinearity="relu"), 6))
add("lstm-unbatched", images(5, 3), {"rnn": 6})(lambda: _recurrent(nn.LSTM(3, 6), 6))


class CellLoop(nn.Module):
    """A cell called step by step, its outputs written into one tensor."""

    def __init__(self, cell: nn.Module, width: int | None = None) -> None:
        super().__init__()
        self.cell, self.head, self.width = cell, nn.Linear(6, 2), width

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, _ = x.shape
        size = self.cell.hidden_size if self.width is None else self.width
        out = x.new_zeros(batch, steps, size)
        h = c = x.new_zeros(batch, size)
        for t in range(steps):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[t], (h, c))
            else:
                h = self.cell(x[t], h)
            out[:, t] = h
        result: Tensor = self.head(out)
        return result


for _name, _cell in (("lstm", nn.LSTMCell), ("gru", nn.GRUCell), ("rnn", nn.RNNCell)):
    add(f"{_name}-cell-loop", images(4, 2, 3), {"cell": 6})(lambda cell=_cell: CellLoop(cell(3, 6)))
add("cell-of-fixed-width", images(4, 2, 3), {}, fixed=("zoo_constructs.py:",))(lambda: CellLoop(nn.LSTMCell(3, 6), 6))
add("packed-and-padded", images(3, 4, 3), {"embed": 4, "rnn": 6, "rnn#2": 6}, ties=(("rnn", "rnn#2"),))(
    lambda: Lambda(
        lambda m, x: m.head(
            pad_packed_sequence(
                m.rnn(pack_padded_sequence(m.embed(x), torch.tensor([4, 1, 3]), batch_first=True, enforce_sorted=False))[0],
                batch_first=True,
            )[0]
        ),
        embed=nn.Linear(3, 4),
        rnn=nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True),
        head=nn.Linear(12, 2),
    )
)
add("last-states-by-layer", images(5, 2, 3), {}, fixed=("stacked states of several layers used as a whole by 'view'",))(
    lambda m, x: m.head(m.rnn(x)[1].view(2, 2, x.shape[1], -1)[-1].transpose(0, 1).flatten(1)),
    rnn=lambda: nn.GRU(3, 6, num_layers=2, bidirectional=True),
    head=(12, 2),
)
add("last-states-sliced", images(5, 2, 3), {"rnn": 6, "rnn#2": 6}, ties=(("rnn", "rnn#2"),))(
    lambda: Lambda(
        lambda m, x: m.head(m.rnn(x)[1][-2:].transpose(0, 1).flatten(1)),
        rnn=nn.GRU(3, 6, num_layers=2, bidirectional=True),
        head=nn.Linear(12, 2),
    )
)
add("last-states-of-both-directions", images(5, 2, 3), {"rnn": 6})(
    lambda m, x: m.head(torch.cat([(h := m.rnn(x)[1][0])[-2], h[-1]], -1)),
    rnn=lambda: nn.LSTM(3, 6, bidirectional=True),
    head=(12, 2),
)
add("conv-then-lstm", images(2, 1, 5, 7), {"conv": 5, "rnn": 6})(
    lambda m, x: m.head(m.rnn(F.relu(m.conv(x)).permute(0, 3, 1, 2).flatten(2))[0][:, -1]),
    conv=(1, 5, 3),
    rnn=lambda: nn.LSTM(15, 6, batch_first=True),
    head=(6, 2),
)
add("learned-first-state", images(5, 2, 3), {"rnn": 6})(
    lambda m, x: m.head(m.rnn(x, m.h0.expand(-1, x.shape[1], -1).contiguous())[0]),
    rnn=lambda: nn.GRU(3, 6),
    h0=lambda: nn.Parameter(torch.randn(1, 1, 6)),
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

# ---- weights that are computed


def _behind(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def _quietly(old: Callable[..., nn.Module], layer: nn.Module, *args: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return old(layer, *args)


add("weight-norm", images(4, 3), {"0": 6, "2": 5})(lambda: _behind(parametrizations.weight_norm(nn.Linear(3, 6))))
add("weight-norm-throughout", images(4, 2, 9), {}, fixed=("normalised over its units by 'weight_norm'",))(
    lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Conv1d(2, 6, 3)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Conv1d(6, 5, 3)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.ConvTranspose1d(5, 4, 3), dim=1),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Conv1d(4, 2, 1)),
    )
)
add("weight-norm-depthwise", images(2, 2, 6), {"0": 6})(
    lambda: nn.Sequential(
        nn.Conv1d(2, 6, 1), parametrizations.weight_norm(nn.Conv1d(6, 6, 3, groups=6)), nn.ReLU(), nn.Conv1d(6, 2, 1)
    )
)
add("weight-norm-hook", images(4, 3), {"0": 6, "2": 5})(lambda: _behind(_quietly(nn.utils.weight_norm, nn.Linear(3, 6))))
add("weight-norm-of-all", images(4, 3), {"2": 5}, fixed=("'0' (6 units) kept whole: weight_norm over the whole weight",))(
    lambda: _behind(parametrizations.weight_norm(nn.Linear(3, 6), dim=None))
)
add(
    "spectral-norm",
    images(4, 3),
    {"2": 5},
    fixed=("'0' (6 units) kept whole: spectral_norm divides by a norm of the whole weight",),
)(lambda: _behind(parametrizations.spectral_norm(nn.Linear(3, 6))))
add("spectral-norm-hook", images(4, 3), {"2": 5}, fixed=("spectral_norm divides by a norm of the whole weight",))(
    lambda: _behind(_quietly(nn.utils.spectral_norm, nn.Linear(3, 6)))
)
add("spectral-norm-behind", images(4, 3), {}, fixed=("spectral_norm divides by a norm of the whole weight",))(
    lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 2))
)
add(
    "orthogonal",
    images(4, 3),
    {"2": 5},
    fixed=("'0' (6 units) kept whole: rows and columns of an orthogonal weight depend on each other",),
)(lambda: _behind(parametrizations.orthogonal(nn.Linear(3, 6))))


class Softplus(nn.Module):
    """A parametrisation entry by entry."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


def _positive(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Softplus())
    return layer


add("parametrised-entry-by-entry", images(4, 3), {"0": 6, "2": 5})(
    lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), _positive(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 2))
)
add("pruned-by-mask", images(4, 3), {"0": 6, "2": 5})(
    lambda: _behind(prune.random_unstructured(nn.Linear(3, 6), "weight", 0.5))
)

# ---- how a model is run


def _autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype == torch.float32):
        out: Tensor = m.net(x)
        return out


add("data-parallel", images(4, 3), {"module.0": 6, "module.2": 5})(lambda: nn.DataParallel(_behind(nn.Linear(3, 6))))
add("autocast", images(4, 3, 6), {"net.0": 6, "net.3": 4})(
    _autocast,
    net=lambda: nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 1), nn.GELU(), nn.Conv1d(4, 2, 1)
    ),
)


def _checkpointed(reentrant: bool) -> nn.Module:
    return Lambda(
        lambda m, x: m.head(checkpoint(lambda y: F.relu(m.b(F.relu(m.a(y)))), m.stem(x), use_reentrant=reentrant)),
        stem=nn.Linear(3, 4),
        a=nn.Linear(4, 6),
        b=nn.Linear(6, 5),
        head=nn.Linear(5, 2),
    )


add("checkpointed", images(4, 3), {"stem": 4, "a": 6, "b": 5})(lambda: _checkpointed(False))
add("checkpointed-reentrant", images(4, 3), {"stem": 4, "a": 6, "b": 5})(lambda: _checkpointed(True))
add("one-layer-not-trained", images(4, 3), {"0": 6, "2": 5})(
    lambda: nn.Sequential(nn.Linear(3, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
)
add("consumer-behind-detach", images(4, 3), {"a": 6})(lambda m, x: m.head(F.relu(m.a(x)).detach()), a=(3, 6), head=(6, 2))

# ---- norms over channels


def _normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))


add("group-norm-plain", images(2, 1, 5, 5), {"0": 4, "3": 6})(lambda: _normed(nn.GroupNorm(4, 8, affine=False)))
add("group-norm-of-each-plain", images(2, 1, 5, 5), {"0": 8, "3": 6})(lambda: _normed(nn.GroupNorm(8, 8, affine=False)))
add("group-norm-of-all", images(2, 1, 5, 5), {"3": 6}, fixed=("normalised over all its units by 'group_norm' in '1'",))(
    lambda: _normed(nn.GroupNorm(1, 8))
)
add("group-norm-of-features", images(4, 3), {"0": 4})(
    lambda: nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(4, 8), nn.Linear(8, 2))
)
add("group-norm-residual", images(2, 1, 5, 5), {"a": 4})(
    lambda m, x: m.head(F.relu(m.norm(m.b(h := F.relu(m.a(x)))) + h)),
    a=(1, 8, 3),
    b=(8, 8, 1),
    norm=lambda: nn.GroupNorm(4, 8),
    head=(8, 2, 1),
)
add("group-norm-functional", images(4, 3), {}, fixed=("a fixed number of groups at zoo_constructs.py",))(
    lambda m, x: m.head(F.group_norm(m.a(x), 4)), a=(3, 8), head=(8, 2)
)
add("instance-norm-plain", images(2, 1, 5, 5), {"0": 8, "3": 6})(lambda: _normed(nn.InstanceNorm2d(8)))
add("instance-norm-statistics", images(2, 1, 5, 5), {"0": 8, "3": 6})(
    lambda: _normed(nn.InstanceNorm2d(8, track_running_stats=True))
)
add("instance-norm-scale", images(2, 1, 5, 5), {"0": 8, "3": 6})(lambda: _normed(nn.InstanceNorm2d(8, affine=True)))
add("local-response-norm", images(2, 1, 5, 5), {"3": 6}, fixed=("in '1'",))(lambda: _normed(nn.LocalResponseNorm(3)))
add("softmax-of-channels", images(2, 1, 5, 5), {"3": 6}, fixed=("softmax over its units in '1'",))(
    lambda: _normed(nn.Softmax2d())
)

# ---- splitting, joining, moving


class C2f(nn.Module):
    """Halves of one convolution, of which one is used twice, as in YOLO."""

    def __init__(self, sizes: Any = None) -> None:
        super().__init__()
        self.cv1, self.cv2, self.sizes = nn.Conv2d(2, 8, 1), nn.Conv2d(16, 2, 1), sizes
        self.m = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.cv1(x)
        parts = list(h.chunk(2, 1) if self.sizes is None else h.split(self.sizes, 1))
        parts.extend(F.silu(m(parts[-1])) for m in self.m)
        out: Tensor = self.cv2(torch.cat(parts, 1))
        return out


add("split-used-twice", images(2, 2, 5, 5), {"cv1": 4, "m.0": 4, "m.1": 4})(C2f)
add(
    "split-of-fixed-size",
    images(2, 2, 5, 5),
    {"m.0": 4, "m.1": 4},
    fixed=("'cv1' (4 units) kept whole: the compacted model fails",),
)(lambda: C2f((4, 4)))
add("split-unevenly", images(4, 3), {"p": 5}, fixed=("split into fixed sizes [2, 4] at zoo_constructs.py",))(
    lambda m, x: m.head(F.relu(m.p((s := m.a(x).split([2, 4], -1))[0]) + m.q(s[1]))), a=(3, 6), p=(2, 5), q=(4, 5), head=(5, 2)
)
add("glu-of-channels", images(2, 2, 6), {"0": 4})(lambda: nn.Sequential(nn.Conv1d(2, 8, 3), nn.GLU(1), nn.Conv1d(4, 2, 1)))
add("swiglu", images(4, 3), {"w1": 6})(lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x)), w1=(3, 6), w3=(3, 6), w2=(6, 2))
add("pixel-unshuffle", images(2, 1, 4, 4), {"0": 4})(
    lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.PixelUnshuffle(2), nn.ReLU(), nn.Conv2d(16, 2, 1))
)


class Chomp(nn.Module):
    """Causal convolutions whose surplus is cut off, with a positive and a negative end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 5, 3, padding=2), nn.Conv1d(5, 4, 3, padding=4, dilation=2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x)[..., : x.shape[-1]])
        h = F.relu(self.b(h)[:, :, :-4].contiguous())
        out: Tensor = self.head(h[:, :, -1])
        return out


add("chomp", images(3, 2, 6), {"a": 5, "b": 4})(Chomp)


class Shuffled(nn.Module):
    """Grouped convolutions with a channel shuffle between them."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.a, self.b = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 1, groups=2)
        self.depthwise, self.c, self.head = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.b(F.relu(self.a(x))))
        n, c, height, width = h.shape
        if self.own:
            h = h.view(n, 2, c // 2, height, width).transpose(1, 2).reshape(n, c, height, width)
        else:
            h = F.channel_shuffle(h, 2)
        out: Tensor = self.head(F.relu(self.c(self.depthwise(h))))
        return out


add("channel-shuffle", images(2, 1, 6, 6), {"a": 4, "b": 2, "c": 4})(lambda: Shuffled(own=True))
add("channel-shuffle-function", images(2, 1, 6, 6), {"a": 4, "b": 2, "c": 4})(lambda: Shuffled(own=False))


class Mixer(nn.Module):
    """Layers along the positions, then along the features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
        self.t1, self.t2, self.c1, self.c2 = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.t2(F.gelu(self.t1(h.transpose(1, 2)))).transpose(1, 2)
        h = h + self.c2(F.gelu(self.c1(h)))
        out: Tensor = self.head(h.mean(1))
        return out


add(
    "token-mixing",
    images(2, 5, 3),
    {"embed": 8, "t1": 7, "c1": 12},
    fixed=("'t2' (5 units) kept whole: combined by 'add' with values that belong to no unit",),
)(Mixer)
add("unfold-and-fold", images(2, 1, 5, 5), {"a": 6})(
    lambda m, x: m.head(F.fold(F.unfold(F.relu(m.a(x)), 2), (3, 3), 2)), a=(1, 6, 3), head=(6, 2, 1)
)
add("unfold-then-linear", images(2, 1, 5, 5), {"a": 6, "b": 5})(
    lambda m, x: m.head(F.relu(m.b(F.unfold(F.relu(m.a(x)), 2).transpose(1, 2)))), a=(1, 6, 3), b=(24, 5), head=(5, 2)
)
add("message-passing", lambda: (torch.randn(5, 3), torch.tensor([[0, 1, 2, 0, 4, 3], [1, 2, 3, 4, 0, 0]])), {"w1": 6})(
    lambda m, x, edges: m.w2(
        torch.zeros_like(h := F.relu(m.w1(x))).index_add(0, edges[1], h[edges[0]])
        + torch.zeros_like(h).scatter_add(0, edges[1][:, None].expand(-1, h.shape[1]), h[edges[0]])
        + h.gather(0, edges[0][:, None].expand(-1, h.shape[1]))[: h.shape[0]]
    ),
    w1=(3, 6),
    w2=(6, 2),
)
add("gather-along-units", images(4, 3), {}, fixed=("'gather'",))(
    lambda m, x: m.head(F.relu(m.a(x)).gather(1, m.order.expand(x.shape[0], -1))),
    a=(3, 6),
    order=lambda: torch.tensor([[3, 1, 0, 2, 5, 4]]),
    head=(6, 2),
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
add("u-net", images(2, 1, 6, 6), {"a": 4, "b": 6, "up": 5})(
    lambda m, x: m.head(torch.cat([m.up(F.relu(m.b(F.max_pool2d(h := F.relu(m.a(x)), 2)))), h], 1)),
    a=lambda: nn.Conv2d(1, 4, 3, padding=1),
    b=lambda: nn.Conv2d(4, 6, 3, padding=1),
    up=lambda: nn.ConvTranspose2d(6, 5, 2, stride=2),
    head=(9, 2, 1),
)
add("padded-shortcut", images(4, 3), {"a": 4}, fixed=("'b' (2 units) kept whole",))(
    lambda m, x: m.head(F.relu(m.b(h := F.relu(m.a(x))) + F.pad(h, (0, 2)))), a=(3, 4), b=(4, 6), head=(6, 2)
)

# ---- channels with parameters and buffers of their own

add("maxout", images(4, 3), {"a": 6})(lambda m, x: m.head(m.a(x).view(x.shape[0], -1, 2).amax(-1)), a=(3, 12), head=(6, 2))
add("standardised-by-buffers", images(2, 1, 5, 5), {"a": 6})(
    lambda m, x: m.head(F.relu((m.a(x) - m.mean.view(1, -1, 1, 1)) / m.std.view(1, -1, 1, 1))),
    a=(1, 6, 3),
    mean=lambda: torch.randn(6),
    std=lambda: torch.rand(6) + 0.5,
    head=(6, 2, 1),
)


class Unsaved(nn.Module):
    """A tensor of one number per unit outside the state: in a buffer that is not saved, or in an attribute."""

    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        if attribute:
            self.scale = torch.rand(6)
        else:
            self.register_buffer("scale", torch.rand(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.b(self.a(x) * self.scale.to(x.dtype))))
        return out


for _where in ("buffer", "attribute"):
    add(
        f"unsaved-{_where}",
        images(4, 3),
        {"b": 5},
        fixed=("'a' (6 units) kept whole: combined by 'mul' with values that belong to no unit at zoo_constructs.py",),
    )(lambda attribute=_where == "attribute": Unsaved(attribute))


class LayerScale(nn.Module):
    """A residual branch with a learned scale of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc1, self.fc2, self.head = nn.Linear(3, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.gamma = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        out: Tensor = self.head(h + self.gamma * self.fc2(F.gelu(self.fc1(h))))
        return out


add("layer-scale-residual", images(4, 3), {"stem": 6, "fc1": 8})(LayerScale)
add("scale-and-shift-of-channels", images(2, 1, 5, 5), {"a": 6})(
    lambda m, x: m.head(F.relu(m.a(x) * m.scale + m.shift)),
    a=(1, 6, 3),
    scale=lambda: nn.Parameter(torch.rand(1, 6, 1, 1)),
    shift=lambda: nn.Parameter(torch.rand(6, 1, 1)),
    head=(6, 2, 1),
)
add("prelu-of-channels", images(2, 1, 5, 5), {"0": 8, "3": 6})(lambda: _normed(nn.PReLU(8)))
add("learned-positions", images(2, 5, 3), {"a": 6, "b": 4})(
    lambda m, x: m.head(F.relu(m.b(m.a(x) + m.positions))),
    a=(3, 6),
    positions=lambda: nn.Parameter(torch.randn(1, 5, 6)),
    b=(6, 4),
    head=(4, 2),
)
for _name, _layer in (
    ("dropout-of-channels", nn.Dropout2d(0.0)),
    ("alpha-dropout", nn.AlphaDropout(0.0)),
    ("alpha-dropout-of-channels", nn.FeatureAlphaDropout(0.0)),
):
    add(_name, images(2, 1, 5, 5), {"0": 8, "3": 6})(lambda layer=_layer: _normed(layer))

# ---- other layers

add("bilinear", images(4, 3), {}, fixed=("operator '_trilinear' is not known to keep units apart",))(
    lambda m, x: m.head(F.relu(m.both(F.relu(m.a(x)), F.relu(m.b(x))))),
    a=(3, 6),
    b=(3, 5),
    both=lambda: nn.Bilinear(6, 5, 4),
    head=(4, 2),
)
add("bags-by-offset", lambda: (torch.randint(11, (9,)), torch.tensor([0, 4])), {"bag": 6, "b": 5})(
    lambda m, x, offsets: m.head(F.relu(m.b(m.bag(x, offsets)))),
    bag=lambda: nn.EmbeddingBag(11, 6, mode="sum"),
    b=(6, 5),
    head=(5, 2),
)
add("largest-of-a-bag", tokens(11, 3, 4), {"0": 6})(lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode="max"), nn.Linear(6, 2)))
add("tied-decoder", tokens(11, 3, 4), {"words": 6, "up": 8})(
    lambda m, x: F.linear((h := m.words(x)) + m.down(F.relu(m.up(h))), m.words.weight),
    words=lambda: nn.Embedding(11, 6),
    up=(6, 8),
    down=(8, 6),
)
add("raw-matrices", images(2, 4, 3), {"w": 6})(
    lambda m, x: torch.matmul(F.relu(torch.matmul(x, m.w) + m.b), m.v),
    w=lambda: nn.Parameter(torch.randn(3, 6)),
    b=lambda: nn.Parameter(torch.randn(6)),
    v=lambda: nn.Parameter(torch.randn(6, 2)),
)
add("weights-made-by-a-network", images(4, 3), {"b": 5}, fixed=("'a' (6 units) kept whole",))(
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


class TNet(nn.Module):
    """Points turned by a matrix that the network makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.turn, self.b, self.head = nn.Conv1d(3, 8, 1), nn.Linear(8, 9), nn.Conv1d(3, 6, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn(F.relu(self.a(x)).amax(2)).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        x = torch.bmm(x.transpose(1, 2), turn).transpose(1, 2)
        out: Tensor = self.head(F.relu(self.b(x)).amax(2))
        return out


add("t-net", images(2, 3, 9), {"a": 8, "b": 6}, fixed=("'turn'",))(TNet)

# ---- what goes in and comes out


@dataclasses.dataclass
class Result:
    """Two outputs."""

    logits: Tensor
    extra: Tensor


Pair = collections.namedtuple("Pair", "a b")

add("dataclass-output", images(4, 3), {"a": 6})(
    lambda m, x: Result(m.head(h := F.relu(m.a(x))), m.extra(h)), a=(3, 6), head=(6, 2), extra=(6, 2)
)
add("dataclass-input", lambda: (Result(torch.randn(4, 3), torch.randn(4, 2)),), {"a": 6})(
    lambda m, batch: m.head(F.relu(m.a(batch.logits) + m.b(batch.extra))), a=(3, 6), b=(2, 6), head=(6, 2)
)
add("namedtuple-in-and-out", lambda: (Pair(torch.randn(4, 3), torch.randn(4, 2)),), {"a": 6})(
    lambda m, pair: Pair(m.head(F.relu(m.a(pair.a) + m.b(pair.b))), None), a=(3, 6), b=(2, 6), head=(6, 2)
)
add("list-input", lambda: ([torch.randn(4, 3), torch.randn(4, 3)],), {"a": 6})(
    lambda m, xs: m.head(F.relu(sum(m.a(x) for x in xs))), a=(3, 6), head=(6, 2)
)


class Autoencoder(nn.Module):
    """A mean that is an output and is read too."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.mu, self.spread = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.dec, self.out = nn.Linear(4, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.enc(x))
        mu, spread = self.mu(h), self.spread(h)
        z = mu + torch.exp(0.5 * spread) * torch.randn(mu.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        return self.out(F.relu(self.dec(z))), mu, spread


add("variational-autoencoder", images(4, 5), {"enc": 8, "dec": 7})(Autoencoder)
