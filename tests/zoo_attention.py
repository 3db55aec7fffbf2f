"""The zoo, part three: attention, whose unit is a whole head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import add, images, tokens


class Separate(nn.Module):
    def __init__(self, dim: int, heads: int, size: int, *, fused: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.fused = heads, size, fused
        self.q, self.v = nn.Linear(dim, heads * size), nn.Linear(dim, heads * size)
        self.k = nn.Linear(dim, heads * size, bias=False)
        self.out = nn.Linear(heads * size, dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], -1, self.num_heads, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.head_dim), dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = heads, dim // heads, dim
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attention = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(b, n, self.attn_dim))


class Chunked(nn.Module):
    """One layer for all three, cut in thirds; causal. The number of heads is what `-1` finds."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, -1, self.size).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, dim: int, attention: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = attention
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Vision(nn.Module):
    def __init__(self, dim: int, *blocks: nn.Module) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 2, stride=2)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 5, dim))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Language(nn.Module):
    def __init__(self, dim: int, *blocks: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, dim), nn.Embedding(6, dim)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


NORMED = ("normalized over its units",)

add(
    "vit-separate",
    images(2, 1, 4, 4),
    {"blocks.0.attn.q": 4, "blocks.0.fc1": 12, "blocks.1.attn.q": 4, "blocks.1.fc1": 10},
    fixed=NORMED,
)(lambda: Vision(8, Block(8, Separate(8, 4, 2), 12), Block(8, Separate(8, 4, 2, fused=False), 10)))
add("vit-fused-qkv", images(2, 1, 4, 4), {"blocks.0.attn.qkv": 3, "blocks.0.fc1": 10}, fixed=NORMED)(
    lambda: Vision(12, Block(12, Fused(12, 3), 10))
)
add(
    "gpt",
    tokens(11, 2, 6),
    {"blocks.0.attn.c_attn": 3, "blocks.0.fc1": 10, "blocks.1.attn.c_attn": 6, "blocks.1.fc1": 8},
    fixed=NORMED,
)(lambda: Language(12, Block(12, Chunked(12, 4), 10), Block(12, Chunked(12, 2), 8)))


class Hardcoded(nn.Module):
    """The width of the input is taken for the width of the heads, as in many a tutorial: they go together, or stay."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


_TOLD = ("its width is read from units that cannot be pruned at zoo_attention.py", "write -1 in place")
add("gpt-hard-coded-width", tokens(11, 2, 6), {"blocks.0.fc1": 10}, fixed=_TOLD)(
    lambda: Language(8, Block(8, Hardcoded(8, 4), 10))
)
add("hard-coded-width", images(2, 5, 3), {"stem": 4, "attn.c_proj": 8})(
    lambda m, x: m.head(F.relu(m.attn(F.relu(m.stem(x))))), stem=(3, 8), attn=lambda: Hardcoded(8, 4), head=(8, 2)
)
add("heads-at-positions", images(1, 5, 3, 3), {"stem": 8, "attn.q": 4, "attn.out": 8})(
    lambda m, x: m.head(F.relu(m.attn((m.stem(x) + m.position).flatten(0, 1)))),
    stem=(3, 8),
    position=lambda: nn.Parameter(torch.randn(1, 5, 1, 1)),
    attn=lambda: Separate(8, 4, 2, fused=False),
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


class Grouped(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, size
        self.n_rep = heads // kv_heads
        self.wq = nn.Linear(dim, heads * size, bias=False)
        self.wk, self.wv = (nn.Linear(dim, kv_heads * size, bias=False) for _ in range(2))
        self.wo = nn.Linear(heads * size, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        angles = torch.arange(t, dtype=x.dtype)[:, None] * 10.0 ** -torch.arange(self.head_dim // 2, dtype=x.dtype)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        q = _rotated(self.wq(x).view(b, t, self.n_heads, self.head_dim), angles).transpose(1, 2)
        k = _rotated(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim), angles).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (y.repeat_interleave(self.n_rep, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(5))
        self.attn = nn.ModuleList([Grouped(8, 6, 3, 4), Grouped(8, 4, 4, 2)])
        self.gate, self.up, self.down = (
            nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(2)) for a, b in ((8, 10), (8, 10), (10, 8))
        )
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in range(2):
            x = x + self.attn[i](self.norms[2 * i](x))
            h = self.norms[2 * i + 1](x)
            x = x + self.down[i](F.silu(self.gate[i](h)) * self.up[i](h))
        return self.head(self.norms[4](x))


add("llama", tokens(11, 2, 5), {"attn.0.wq": 3, "gate.0": 10, "attn.1.wq": 4, "gate.1": 10}, fixed=("'mean'",))(Llama)


class Interleaved(nn.Module):
    """Rotary positions as complex numbers, with norms over the head and attention over a bias-free product."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.q, self.k, self.v = (nn.Linear(6, 12) for _ in range(3))
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.RMSNorm(4)
        self.out = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        turn = torch.polar(torch.ones(t, 1, 2, dtype=x.dtype), torch.arange(t, dtype=x.dtype)[:, None, None].expand(t, 1, 2))
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.reshape(b, t, -1, 2, 2)) * turn).flatten(3)
            for y in (self.q_norm(q), self.k_norm(k))
        )
        weights = torch.einsum("bthd,bshd->bhts", q, k).div(2.0).softmax(-1)
        return self.out(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


add("rotary-complex", images(2, 5, 6), {"q": 3})(Interleaved)


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
