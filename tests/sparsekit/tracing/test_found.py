"""Units are found behind every operator that keeps them apart, and tensors along an axis of units are cut with them."""

import copy
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import CompactFileError, NoUnitsError
from sparsekit.graph.edit import compact_graph
from sparsekit.tracing.passes import Snapshot
from sparsekit.tracing.session import Session

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
    "steps of a slice": (lambda h: h[..., ::2] * h[..., 1::2].sigmoid(), 6),
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


Put = Callable[[Any, Tensor], None]
# How a module holds a tensor, and how it reads it again.
HOLDERS: dict[str, tuple[Put, Callable[[Any], Tensor]]] = {
    "a buffer": (lambda m, t: m.register_buffer("t", t), lambda m: m.t),
    "a buffer that is not saved": (lambda m, t: m.register_buffer("t", t, persistent=False), lambda m: m.t),
    "an attribute": (lambda m, t: setattr(m, "t", t), lambda m: m.t),
    "a list": (lambda m, t: setattr(m, "t", [None, t]), lambda m: m.t[1]),
    "a tuple": (lambda m, t: setattr(m, "t", (1, t)), lambda m: m.t[1]),
    "a dict": (lambda m, t: setattr(m, "t", {"k": t}), lambda m: m.t["k"]),
    "containers in each other": (lambda m, t: setattr(m, "t", {"k": [(t,)]}), lambda m: m.t["k"][0][0]),
    "an object": (lambda m, t: setattr(m, "t", types.SimpleNamespace(inner=t)), lambda m: m.t.inner),
    "a closure": (lambda m, t: setattr(m, "t", lambda: t), lambda m: m.t()),
}


class Shifted(nn.Module):
    def __init__(self, kind: str, table: Tensor) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(3, 12) if table.dim() == 1 else nn.Conv2d(3, 12, 1)
        self.kind = kind
        HOLDERS[kind][0](self, table)

    def table(self) -> Tensor:
        return HOLDERS[self.kind][1](self)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return torch.relu(self.layer(x) + (self.table() if shift is None else shift))


class Net(nn.Module):
    def __init__(self, kind: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        shared, own = torch.randn(shape), torch.randn(shape)
        self.a, self.b, self.c = (Shifted(kind, shared if k < 2 else torch.zeros(shape)) for k in range(3))
        HOLDERS[kind][0](self, own)
        self.kind = kind
        self.head: nn.Module = nn.Linear(36, 2) if len(shape) == 1 else nn.Conv2d(36, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.a(x), self.b(x), self.c(x, HOLDERS[self.kind][1](self))], 1))


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"linear": ((12,), (4, 3)), "conv": ((12, 1, 1), (4, 3, 2, 2))}


@pytest.mark.parametrize("layers", SHAPES)
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_constant_is_cut_in(kind: str, layers: str, tmp_path: Path) -> None:
    shape, given = SHAPES[layers]
    model, x = Net(kind, shape).eval(), torch.randn(given)
    graph, told = trace(model, x)
    assert told == []
    # One tensor for two layers: their units go together.
    assert [group.size for group in graph.groups.values()] == [12, 12]
    mask = random_mask(graph, 0.5, 0)
    check_masked_equals_compact(model, (x,), {}, graph, mask, gradients=False)
    small = sk.compact(model, graph, mask)
    assert compact_graph(graph, mask).constants == trace(small, x)[0].constants
    expected = small(x)
    assert small.a.table() is small.b.table() or kind == "a closure"
    assert model.a.table().shape == shape

    # The constants of another model of this class differ: those of the file count.
    sk.save_compact(small, tmp_path / "small.safetensors")
    assert torch.equal(sk.load_compact(tmp_path / "small.safetensors", Net(kind, shape).eval())(x), expected)

    narrow = sk.NarrowModel(model, graph)
    for m in (random_mask(graph, 0.3, 1), mask):
        narrow.set_mask(m)
    assert torch.allclose(narrow.module(x), expected, atol=1e-6)

    twin = copy.deepcopy(model)
    assert torch.equal(sk.compact(twin, graph, mask, inplace=True)(x), expected)
    assert model.a.table().shape == shape  # which a closure shares


def test_a_constant_that_no_module_holds_is_named_with_a_remedy() -> None:
    table = torch.randn(6).numpy()

    model = Lambda(lambda m, x: m.b(m.a(x) + torch.from_numpy(table)), a=(3, 6), b=(6, 2))
    with pytest.raises(NoUnitsError, match=r"combined by 'add' with .*no module holds.*register_buffer"):
        trace(model, torch.randn(2, 3))


def written_in_part(memory: Tensor, h: Tensor) -> Tensor:
    memory[:, : h.shape[1]] = h
    return memory[:, : h.shape[1]] * 2


WRITES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "in part": (written_in_part, 5),
    "as a whole": (lambda memory, h: memory.copy_(h).sin(), 8),
    "as a sum": (lambda memory, h: memory.mul_(0.5).add_(h), 8),
}


@pytest.mark.parametrize("name", WRITES)
def test_scratch_memory_is_cut_with_what_is_written_to_it(name: str) -> None:
    write, steps = WRITES[name]
    memory = nn.Module()
    memory.register_buffer("all", torch.zeros(4, 8, 6), persistent=False)  # every pass writes it before it is read
    model = Lambda(lambda m, x: m.b(write(m.memory.all, m.a(x).relu())), a=(3, 6), b=(6, 2), memory=memory)
    x = torch.randn(4, steps, 3)
    graph, told = trace(model, x)
    assert (graph.fingerprint(), told) == ((("a", 6),), [])
    mask = random_mask(graph, 0.5, 0)
    check_masked_equals_compact(model, (x,), {}, graph, mask, gradients=False)
    narrow = sk.NarrowModel(model, graph)
    narrow.set_mask(mask)
    with torch.no_grad():
        narrow.module(x)
    written = narrow.module.memory.all.clone()
    narrow.set_mask(sk.UnitMask.full(graph))  # what steps have written stays
    assert bool(written.any())
    assert torch.equal(narrow.module.memory.all[..., mask["a"]], written)


def in_an_attribute(m: Any, h: Tensor) -> Tensor:
    m.one = torch.ones_like(h[0]) * 2 if m.one is None else m.one
    return m.one


def recorded(m: Any, x: Tensor) -> Tensor:
    """Read what a hook recorded, and install the hook in the first pass, as transformers' models do."""
    if not m.is_ready:
        m.a.register_forward_hook(lambda _module, _inputs, output: m.seen.append(output))
        m.is_ready = True
    m.seen.clear()
    m.a(x)
    (found,) = m.seen
    return m.b(found)


FIRST_PASS = {
    "a tensor in an attribute": lambda m, x: m.b((h := m.a(x).relu()) * in_an_attribute(m, h)),
    "a tensor in a dict": lambda m, x: m.b((h := m.a(x).relu()) * m.made.setdefault("k", torch.full_like(h[0], 3.0))),
    "a hook": recorded,
}


@pytest.mark.parametrize("name", FIRST_PASS)
def test_what_the_first_pass_makes_is_no_obstacle(name: str) -> None:
    model, x = Lambda(FIRST_PASS[name], a=(3, 6), b=(6, 2), one=None, made={}, seen=[], is_ready=False), torch.randn(4, 3)
    for _ in range(1 if name == "a hook" else 2):  # the second time it is there; a hook would write to the model, not a copy
        graph, told = trace(model, x)
        assert (graph.fingerprint(), told) == ((("a", 6),), [])
        check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), gradients=False)
        model(x)


def test_a_pass_leaves_no_hook_on_the_copy_that_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    run, left = Session.run, list[object]()

    def noted(session: Session, copied: Snapshot, **options: Any) -> Any:
        session.by_module = True  # passes are recorded by hooks
        record = run(session, copied, **options)
        left.extend(hook for module in copied.modules for hook in (*module._forward_hooks, *module._forward_pre_hooks))
        return record

    monkeypatch.setattr(Session, "run", noted)
    trace(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(4, 3))
    assert left == []


def test_a_constant_for_which_the_factory_has_no_place_is_refused(tmp_path: Path) -> None:
    model = Shifted("a list", torch.randn(12))
    sk.save_compact(model, tmp_path / "model.safetensors")
    other = Shifted("a list", torch.randn(12))
    other.t = []
    with pytest.raises(CompactFileError, match=r"has the tensor 't\[1\]' of 'the top', and Shifted of the factory has no"):
        sk.load_compact(tmp_path / "model.safetensors", other)
