"""Units are found behind every operator that keeps them apart: a rule that loses them in silence fails here."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.errors import NoUnitsError

Move = Callable[[Tensor], Tensor]


def shuffled(h: Tensor) -> Tensor:
    return h.view(len(h), 2, -1, *h.shape[2:]).transpose(1, 2).reshape(h.shape)


def crossed(h: Tensor) -> Tensor:
    """C2f of YOLO: parts of a chunk are read again beside each other."""
    p, q = h.chunk(2, 1)
    return torch.cat([p, q, q.tanh()], 1)


def heads(h: Tensor) -> Tensor:
    """(batch, positions, 3 heads of 4) to (batch, heads, positions, head size)."""
    return h.unflatten(-1, (-1, 4)).transpose(1, 2)


def halves(h: Tensor) -> Tensor:
    """Two heads of whatever the width leaves: both lose the same features."""
    return h.unflatten(-1, (2, -1)).transpose(1, 2)


def joined(h: Tensor) -> Tensor:
    return h.transpose(1, 2).flatten(2)


# What twelve units go through, and as how many they come out: those whose positions must go together count once.
FLAT: dict[str, tuple[Move, int]] = {
    "chunk": (lambda h: math.prod(h.chunk(3, 1)), 4),
    "chunk, read again": (crossed, 6),
    "channel shuffle": (shuffled, 6),
    "repeat interleaved": (lambda h: h[:, :, None].expand(-1, -1, 2).reshape(4, -1), 12),
    "repeat": (lambda h: h.repeat(1, 2), 12),
    "flip": (lambda h: h.flip(1), 12),
    "concatenation behind constants": (lambda h: torch.cat([torch.ones(4, 2), h, h.tanh()], 1), 12),
    "stack": (lambda h: torch.stack([h, h.tanh()]), 12),
    "pad": (lambda h: F.pad(h, (1, 0)), 12),
    "copy": (lambda h: h.new_empty(2, *h.shape).copy_(h), 12),
    "scale of an example": (lambda h: h * torch.arange(1.0, 5.0)[:, None], 12),
    "chosen examples": (lambda h: h[torch.tensor([2, 0])], 12),
    "masked fill": (lambda h: h.masked_fill(h > 0.5, 0.0), 12),
    "where": (lambda h: torch.where(h > 0.5, h, 0.0), 12),
    "maxout": (lambda h: h.view(4, -1, 2).amax(-1), 6),
}
SEQUENCES: dict[str, tuple[Move, int]] = {
    "merged batch and time": (lambda h: h.flatten(0, 1), 12),
    "largest in time": (lambda h: h.max(1)[0], 12),
    "halves and back": (lambda h: joined(halves(h).relu() * 2.0), 6),
    "a sum of halves": (lambda h: joined(halves(h) + halves(h * 2.0)), 6),
    "heads with a part": (lambda h: joined(heads(h)[..., 1:]), 3),
    "heads with one feature": (lambda h: heads(h)[..., 0].transpose(1, 2), 3),
    "heads summed up": (lambda h: h.unflatten(-1, (3, -1)).transpose(1, 2).sum(1), 4),
    "heads summed over": (lambda h: heads(h).sum(-1).transpose(1, 2), 3),
    "heads under a scale": (lambda h: joined(heads(h) * torch.arange(20.0).view(5, 4)), 3),
    "heads doubled": (lambda h: joined(torch.cat([heads(h), heads(h)], -1)), 3),
    "a cut of a cut": (lambda h: h.view(2, 5, -1, 6).view(2, 5, -1, 3, 2).sum((3, 4)), 2),
    "complex pairs": (lambda h: torch.view_as_complex(h.view(2, 5, -1, 2)).abs(), 6),
    "attention": (lambda h: joined(F.scaled_dot_product_attention(heads(h), heads(h), heads(h), is_causal=True)), 3),
}
MAPS: dict[str, tuple[Move, int]] = {
    "chunk": (lambda h: h.chunk(2, 1)[0] * h.chunk(2, 1)[1].sigmoid(), 6),
    "channel shuffle": (shuffled, 6),
    "adaptive average": (lambda h: F.adaptive_avg_pool2d(h, (None, 1)), 12),
    "adaptive largest in channels-last": (
        lambda h: F.adaptive_max_pool2d(h.contiguous(memory_format=torch.channels_last), (1, None)), 12,
    ),
    "pooling beside the axis of units": (lambda h: F.adaptive_avg_pool2d(h.permute(0, 3, 1, 2), (None, 1)).squeeze(-1), 12),
}  # fmt: skip
MADE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "flat": (lambda: nn.Linear(3, 12), (4, 3)),
    "sequences": (lambda: nn.Linear(3, 12), (2, 5, 3)),
    "maps": (lambda: nn.Conv2d(3, 12, 3, padding=1), (2, 3, 4, 5)),
}
CASES = [(kind, name) for kind, moves in (("flat", FLAT), ("sequences", SEQUENCES), ("maps", MAPS)) for name in moves]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_units_are_found_behind(kind: str, name: str) -> None:
    torch.manual_seed(0)
    make, shape = MADE[kind]
    move, units = {"flat": FLAT, "sequences": SEQUENCES, "maps": MAPS}[kind][name]
    a, x = make(), torch.randn(shape)
    out = move(a(x).relu())
    head = nn.Conv2d(out.shape[1], 2, 1) if out.dim() == 4 and kind == "maps" else nn.Linear(out.shape[-1], 2)
    model = Lambda(lambda m, x: m.head(move(m.a(x).relu())), a=a, head=head)
    # Without the verification: what rules say is to be right by itself.
    graph, told = trace(model, x, verify=False)
    assert (graph.fingerprint(), told) == ((("a", units),), [])
    for seed in range(2):
        check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, seed), gradients=False)


# Behind these a sum over units, which has no weights to gate, stays exact: zero stays zero. Behind the others it does not.
ZERO: list[Move] = [
    F.relu, torch.tanh, F.gelu, torch.neg, lambda h: h * 3, lambda h: h + h, lambda h: h.sigmoid() * h, lambda h: h.pow(2),
    lambda h: h / 2, lambda h: h.clamp(-1, 1), lambda h: torch.cat([h, 2 * h]), lambda h: torch.stack([torch.zeros_like(h), h]),
    lambda h: h.masked_fill(h > 0.5, 0.0), lambda h: torch.where(torch.arange(4)[:, None] > 1, h, 2 * h),
    lambda h: F.prelu(h, h.new_full((1,), 0.3)), lambda h: F.pad(h, (0, 0, 0, 1)),
]  # fmt: skip
NOT_ZERO: list[Move] = [
    torch.sigmoid, torch.exp, lambda h: h + 1, lambda h: 1 - h, lambda h: h.clamp(0.5, 1), lambda h: h.sigmoid() + h,
    lambda h: torch.cat([h, h + 1]), lambda h: h.masked_fill(h > 0.5, 1.0), lambda h: torch.where(h > 0.5, h, torch.ones(6)),
    lambda h: F.pad(h, (0, 0, 0, 1), value=-1.0),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
@pytest.mark.parametrize("move", [*ZERO, *NOT_ZERO])
def test_a_sum_over_units_is_exact_where_zero_stays_zero(move: Move) -> None:
    model, x = Lambda(lambda m, x: move(m.a(x)).sum(-1, keepdim=True), a=(3, 6)), torch.randn(4, 3)
    if move in NOT_ZERO:
        with pytest.raises(NoUnitsError, match="not zero"):
            trace(model, x, verify=False)
    else:
        graph, _ = trace(model, x, verify=False)
        assert graph.fingerprint() == (("a", 6),)
        check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), gradients=False)
