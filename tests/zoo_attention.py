"""The zoo: attention, whose unit is a whole head."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import Lambda, add, images, tokens

Mix = Callable[..., Tensor]
sdpa: Mix = F.scaled_dot_product_attention
causal: Mix = functools.partial(sdpa, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


def separate(dim: int, heads: int, size: int, mix: Mix = sdpa) -> nn.Module:
    """Query, key and value from layers of their own."""

    def run(m: Any, x: Tensor) -> Tensor:
        shape = (x.shape[0], -1, m.num_heads, m.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (m.q, m.k, m.v))
        return m.out(mix(q, k, v).transpose(1, 2).flatten(2))

    inner, k = heads * size, nn.Linear(dim, heads * size, bias=False)
    return Lambda(run, num_heads=heads, head_dim=size, q=(dim, inner), v=(dim, inner), k=k, out=(inner, dim))


def fused(dim: int, heads: int) -> nn.Module:
    """One layer for all three, cut as in a vision transformer."""

    def run(m: Any, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = m.qkv(x).reshape(b, n, 3, m.num_heads, m.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attention = ((q * m.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return m.proj((attention @ v).transpose(1, 2).reshape(b, n, m.attn_dim))

    size = dim // heads
    return Lambda(run, num_heads=heads, head_dim=size, attn_dim=dim, scale=size**-0.5, qkv=(dim, 3 * dim), proj=(dim, dim))


def chunked(dim: int, size: int) -> nn.Module:
    """One layer for all three, cut in thirds. The number of heads is what `-1` finds."""

    def run(m: Any, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, -1, m.size).transpose(1, 2) for y in m.c_attn(x).chunk(3, dim=-1))
        return m.c_proj(causal(q, k, v).transpose(1, 2).reshape(b, t, -1))

    return Lambda(run, size=size, c_attn=(dim, 3 * dim), c_proj=(dim, dim))


def hardcoded(dim: int, heads: int) -> nn.Module:
    """The width of the input is taken for the width of the heads, as in many a tutorial: they go together, or stay."""

    def run(m: Any, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, m.n_head, c // m.n_head).transpose(1, 2) for y in m.c_attn(x).chunk(3, dim=2))
        return m.c_proj(causal(q, k, v).transpose(1, 2).contiguous().view(b, t, c))

    return Lambda(run, n_head=heads, c_attn=(dim, 3 * dim), c_proj=(dim, dim))


def block(dim: int, attention: nn.Module, hidden: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = x + m.attn(m.norm1(x))
        return x + m.fc2(F.gelu(m.fc1(m.norm2(x))))

    norm1, norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
    return Lambda(run, norm1=norm1, norm2=norm2, attn=attention, fc1=(dim, hidden), fc2=(hidden, dim))


def vision(dim: int, *blocks: nn.Module) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.patch(x).flatten(2).transpose(1, 2)
        x = m.blocks(torch.cat([m.cls.expand(x.shape[0], -1, -1), x], dim=1) + m.position)
        return m.head(m.norm(x)[:, 0])

    cls, position = nn.Parameter(torch.randn(1, 1, dim)), nn.Parameter(torch.randn(1, 5, dim))
    ends = {"norm": nn.LayerNorm(dim), "head": (dim, 3)}
    return Lambda(run, patch=nn.Conv2d(1, dim, 2, stride=2), cls=cls, position=position, blocks=nn.Sequential(*blocks), **ends)


def language(dim: int, *blocks: nn.Module, tied: bool = False) -> nn.Module:
    def run(m: Any, ids: Tensor) -> Tensor:
        x = m.blocks(m.tokens(ids) + m.positions(torch.arange(ids.shape[1])))
        return m.head(m.norm(x))

    words, places, head = nn.Embedding(11, dim), nn.Embedding(6, dim), nn.Linear(dim, 11, bias=False)
    if tied:
        head.weight = words.weight
    return Lambda(run, tokens=words, positions=places, blocks=nn.Sequential(*blocks), norm=nn.LayerNorm(dim), head=head)


NORMED = ("normalized over its units",)
_TOLD = ("its width is read from units that cannot be pruned at zoo_attention.py", "write -1 in place")
_SEPARATE = {"blocks.0.attn.q": 4, "blocks.0.fc1": 12, "blocks.1.attn.q": 4, "blocks.1.fc1": 10}
_GPT = {"blocks.0.attn.c_attn": 3, "blocks.0.fc1": 10, "blocks.1.attn.c_attn": 6, "blocks.1.fc1": 8}

add("vit-separate", images(2, 1, 4, 4), _SEPARATE, fixed=NORMED)(
    lambda: vision(8, block(8, separate(8, 4, 2), 12), block(8, separate(8, 4, 2, written_out), 10))
)
add("vit-fused-qkv", images(2, 1, 4, 4), {"blocks.0.attn.qkv": 3, "blocks.0.fc1": 10}, fixed=NORMED)(
    lambda: vision(12, block(12, fused(12, 3), 10))
)
add("gpt", tokens(11, 2, 6), _GPT, fixed=NORMED)(
    lambda: language(12, block(12, chunked(12, 4), 10), block(12, chunked(12, 2), 8))
)
add("gpt-hard-coded-width", tokens(11, 2, 6), {"blocks.0.fc1": 10}, fixed=_TOLD)(
    lambda: language(8, block(8, hardcoded(8, 4), 10))
)
add("hard-coded-width", images(2, 5, 3), {"stem": 4, "attn.c_proj": 8})(
    lambda m, x: m.head(F.relu(m.attn(F.relu(m.stem(x))))), stem=(3, 8), attn=lambda: hardcoded(8, 4), head=(8, 2)
)
add("heads-at-positions", images(1, 5, 3, 3), {"stem": 8, "attn.q": 4, "attn.out": 8})(
    lambda m, x: m.head(F.relu(m.attn((m.stem(x) + m.position).flatten(0, 1)))),
    stem=(3, 8),
    position=lambda: nn.Parameter(torch.randn(1, 5, 1, 1)),
    attn=lambda: separate(8, 4, 2, written_out),
    head=(8, 2),
)


add("mha", images(2, 5, 3), {"inner": 8, "attn": 4, "attn.out_proj": 8})(
    lambda m, x: m.head(m.attn(y := F.relu(m.inner(x)), y, y)[0]),
    inner=(3, 8),
    attn=lambda: nn.MultiheadAttention(8, 4, batch_first=True),
    head=(8, 2),
)
add(
    "mha-masks",
    lambda: (
        torch.randn(2, 4, 6),
        torch.tensor([[False] * 4, [False] * 3 + [True]]),
        torch.ones(4, 4, dtype=torch.bool).triu(1),
    ),
    {"attn": 3, "attn.out_proj": 6},
)(
    lambda m, x, padding, mask: m.head(m.attn(x, x, x, key_padding_mask=padding, attn_mask=mask)[0]),
    attn=lambda: nn.MultiheadAttention(6, 3, batch_first=True),
    head=(6, 2),
)
add(
    "transformer-encoder",
    images(2, 5, 3),
    {"1.layers.0.self_attn": 4, "1.layers.0.linear1": 12, "1.layers.1.self_attn": 4, "1.layers.1.linear1": 12},
    fixed=NORMED,
)(
    lambda: nn.Sequential(
        nn.Linear(3, 8),
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        nn.Linear(8, 2),
    )
)
add(
    "transformer",
    lambda: (torch.randn(2, 5, 8), torch.randn(2, 3, 8)),
    {
        "encoder.layers.0.self_attn": 4,
        "encoder.layers.0.linear1": 6,
        "decoder.layers.0.self_attn": 4,
        "decoder.layers.0.multihead_attn": 4,
        "decoder.layers.0.linear1": 6,
    },
)(lambda: nn.Transformer(8, 4, 1, 1, 6, dropout=0.0, batch_first=True))


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * angles.cos() + torch.cat((-b, a), dim=-1) * angles.sin()


def grouped(dim: int, heads: int, kv_heads: int, size: int) -> nn.Module:
    """Grouped-query attention with rotary positions."""

    def run(m: Any, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        angles = torch.arange(t, dtype=x.dtype)[:, None] * 10.0 ** -torch.arange(m.head_dim // 2, dtype=x.dtype)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        q = _rotated(m.wq(x).view(b, t, m.n_heads, m.head_dim), angles).transpose(1, 2)
        k = _rotated(m.wk(x).view(b, t, m.n_kv_heads, m.head_dim), angles).transpose(1, 2)
        v = m.wv(x).view(b, t, m.n_kv_heads, m.head_dim).transpose(1, 2)
        k, v = (y.repeat_interleave(m.n_rep, dim=1) for y in (k, v))
        return m.wo(causal(q, k, v).transpose(1, 2).reshape(b, t, -1))

    widths = {"wq": (dim, heads * size), "wk": (dim, kv_heads * size), "wv": (dim, kv_heads * size), "wo": (heads * size, dim)}
    layers = {name: nn.Linear(*each, bias=False) for name, each in widths.items()}
    return Lambda(run, n_heads=heads, n_kv_heads=kv_heads, head_dim=size, n_rep=heads // kv_heads, **layers)


def _llama(m: Any, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    for i in range(2):
        x = x + m.attn[i](m.norms[2 * i](x))
        h = m.norms[2 * i + 1](x)
        x = x + m.down[i](F.silu(m.gate[i](h)) * m.up[i](h))
    return m.head(m.norms[4](x))


def _twice(wide: int, out: int) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(nn.Linear(wide, out, bias=False) for _ in range(2))


add("llama", tokens(11, 2, 5), {"attn.0.wq": 3, "gate.0": 10, "attn.1.wq": 4, "gate.1": 10}, fixed=("'mean'",))(
    _llama,
    embed=lambda: nn.Embedding(11, 8),
    norms=lambda: nn.ModuleList(nn.RMSNorm(8) for _ in range(5)),
    attn=lambda: nn.ModuleList([grouped(8, 6, 3, 4), grouped(8, 4, 4, 2)]),
    gate=_twice(8, 10),
    up=_twice(8, 10),
    down=_twice(10, 8),
    head=lambda: nn.Linear(8, 11, bias=False),
)


def _interleaved(m: Any, x: Tensor) -> Tensor:
    """Rotary positions as complex numbers, with norms over the head and attention over a bias-free product."""
    b, t, _ = x.shape
    q, k, v = (layer(x).unflatten(-1, (m.heads, -1)) for layer in (m.q, m.k, m.v))
    turn = torch.polar(torch.ones(t, 1, 2, dtype=x.dtype), torch.arange(t, dtype=x.dtype)[:, None, None].expand(t, 1, 2))
    q, k = (
        torch.view_as_real(torch.view_as_complex(y.reshape(b, t, -1, 2, 2)) * turn).flatten(3)
        for y in (m.q_norm(q), m.k_norm(k))
    )
    weights = torch.einsum("bthd,bshd->bhts", q, k).div(2.0).softmax(-1)
    return m.out(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


add("rotary-complex", images(2, 5, 6), {"q": 3})(
    _interleaved,
    heads=lambda: 3,
    q=(6, 12),
    k=(6, 12),
    v=(6, 12),
    q_norm=lambda: nn.LayerNorm(4),
    k_norm=lambda: nn.RMSNorm(4),
    out=(12, 2),
)


class Latent(nn.Module):
    """Keys of two parts, the second one shared by all heads, written into one tensor, as in DeepSeek."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 18), nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 2)
        self.shared = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, own, v = (layer(x).unflatten(-1, (-1, n)).transpose(1, 2) for layer, n in ((self.q, 6), (self.k, 4), (self.v, 4)))
        key = own.new_empty(*own.shape[:-1], 6)
        key[..., :4].copy_(own)
        key[..., 4:].copy_(self.shared(x)[:, None].expand(-1, own.shape[1], -1, -1))
        return self.out(F.scaled_dot_product_attention(q, key, v).transpose(1, 2).flatten(2))


add("keys-written-in-parts", images(2, 5, 6), {"q": 3}, fixed=("written in place through a view by 'copy'",))(Latent)


class Windows(nn.Module):
    """Attention within shifted windows, with a learned bias for each head and relative position, as in Swin."""

    def __init__(self, dim: int, heads: int, side: int) -> None:
        super().__init__()
        self.num_heads, self.side = heads, side
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads))
        y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        places = torch.stack([y.flatten(), x.flatten()])
        offsets = places[:, :, None] - places[:, None, :] + side - 1
        self.register_buffer("index", offsets[0] * (2 * side - 1) + offsets[1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        s = self.side
        x = torch.roll(x, (-1, -1), (1, 2)).view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(s * s, s * s, -1).permute(2, 0, 1)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias.unsqueeze(0)).softmax(-1)
        y = self.proj((weights @ v).transpose(1, 2).flatten(2)).view(b, h // s, w // s, s, s, -1)
        return torch.roll(y.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1), (1, 1), (1, 2))


add("swin-window", images(2, 1, 4, 4), {"stem": 6, "attn.qkv": 3, "attn.proj": 6})(
    lambda m, x: m.head(F.relu(m.attn(m.stem(x).permute(0, 2, 3, 1))).mean((1, 2))),
    stem=(1, 6, 1),
    attn=lambda: Windows(6, 3, 2),
    head=(6, 2),
)


add("unflattened-channel-shuffle", images(2, 1, 4, 4), {"a": 3, "b": 4})(
    lambda m, x: m.head(F.relu(m.b(m.a(x).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))).mean((2, 3))),
    a=(1, 6, 1),
    b=lambda: nn.Conv2d(6, 4, 3, padding=1),
    head=(4, 2),
)
