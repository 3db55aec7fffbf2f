"""A tensor that a module holds along an axis of units is cut with them, wherever the module holds it."""

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import CompactFileError, NoUnitsError
from sparsekit.graph.edit import compact_graph, only
from sparsekit.tracing.session import Session

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

    class Global(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) + torch.from_numpy(table))

    with pytest.raises(NoUnitsError, match=r"combined by 'add' with .*no module holds.*register_buffer"):
        trace(Global(), torch.randn(2, 3))


class Scratch(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(3, 6), nn.Linear(6, 2), write
        self.register_buffer("memory", torch.zeros(4, 8, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.write(self.memory, torch.relu(self.a(x))))


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
    model, x = Scratch(write), torch.randn(4, steps, 3)
    graph, told = trace(model, x)
    assert (graph.fingerprint(), told) == ((("a", 6),), [])
    mask = random_mask(graph, 0.5, 0)
    check_masked_equals_compact(model, (x,), {}, graph, mask, gradients=False)
    narrow = sk.NarrowModel(model, graph)
    narrow.set_mask(mask)
    with torch.no_grad():
        narrow.module(x)
    written = narrow.module.memory.clone()
    narrow.set_mask(sk.UnitMask.full(graph))  # what steps have written stays
    assert bool(written.any())
    assert torch.equal(narrow.module.memory[..., mask["a"]], written)


class Cached(nn.Module):
    def __init__(self, keep: Callable[["Cached", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.keep = nn.Linear(3, 6), nn.Linear(6, 2), keep
        self.made: dict[str, Tensor] = {}
        self.one: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.b(h * self.keep(self, h))


def in_an_attribute(model: Cached, h: Tensor) -> Tensor:
    model.one = torch.ones_like(h[0]) * 2 if model.one is None else model.one
    return model.one


CACHES = {"an attribute": in_an_attribute, "a dict": lambda model, h: model.made.setdefault("k", torch.full_like(h[0], 3.0))}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_the_first_pass_makes_is_no_obstacle(name: str) -> None:
    model, x = Cached(CACHES[name]), torch.randn(4, 3)
    for _ in range(2):  # the second time it is filled
        graph, told = trace(model, x)
        assert (graph.fingerprint(), told) == ((("a", 6),), [])
        check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), gradients=False)
        model(x)


class Recorded(nn.Module):
    """Reads what a hook recorded, and installs the hook in its first pass, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)
        self.seen: list[Tensor] = []
        self.is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.a.register_forward_hook(lambda _module, _inputs, output: self.seen.append(output))
            self.is_ready = True
        self.seen.clear()
        self.a(x)
        (recorded,) = self.seen
        return self.b(recorded)


def test_a_hook_that_the_first_pass_installs_is_installed_once() -> None:
    graph, told = trace(Recorded(), torch.randn(4, 3))
    assert (graph.fingerprint(), told) == ((("a", 6),), [])


def test_a_pass_leaves_no_hook_on_the_copy_that_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    run, left = Session.run, list[object]()

    def noted(session: Session, model: nn.Module, **options: Any) -> Any:
        session.by_module = True  # passes are recorded by hooks
        record = run(session, model, **options)
        left.extend(hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks))
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


def test_the_graph_of_a_cut_model_has_its_constants_cut() -> None:
    model, x = Net("a dict", (12,)).eval(), torch.randn(4, 3)
    graph, _ = trace(model, x)
    mask = random_mask(graph, 0.5, 0)
    again, _ = trace(sk.compact(model, graph, mask), x)
    assert compact_graph(graph, mask).constants == again.constants
    assert only(graph, [next(iter(graph.groups))]).constants.keys() < graph.constants.keys()
