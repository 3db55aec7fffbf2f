"""Integers that count units are found by what they do, wherever code keeps them; not if the model is wrong with them."""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import NoUnitsError
from sparsekit.graph.edit import compact_graph
from sparsekit.graph.held import held_numbers
from sparsekit.surgery.compaction import compact, compact_state, expand
from sparsekit.tracing.trace import UnprunableWarning, trace_units


@dataclass(frozen=True)
class Config:
    width: int = 6


class Shape(NamedTuple):
    width: int
    rest: int


class OfClass(nn.Module):
    width = 6


class WithProperty(nn.Module):
    @property
    def width(self) -> int:
        return int(self.a.out_features)


def cut(y: Tensor, width: int) -> Tensor:
    return y.reshape(2, 3, width)


def closed(width: int) -> Any:
    return lambda y: cut(y, width)


def checked(m: Any, y: Tensor) -> Tensor:
    assert y.shape[-1] == m.width
    return y


# How code writes a width of 6 units: what the module holds, and what it does with it.
SPELLINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "attribute": ({"width": 6}, lambda m, y: cut(y, m.width)),
    "private": ({"_w": 6}, lambda m, y: cut(y, m._w)),
    "any name": ({"A": 6}, lambda m, y: cut(y, m.A)),
    "tuple": ({"shape": (6, 1)}, lambda m, y: y.reshape(2, 3, *m.shape).flatten(2)),
    "named tuple": ({"shape": Shape(6, 1)}, lambda m, y: y.reshape(2, 3, *m.shape).flatten(2)),
    "size": ({"shape": torch.Size([2, 3, 6])}, lambda m, y: y.flatten().view(m.shape)),
    "list": ({"sizes": [6]}, lambda m, y: cut(y, m.sizes[0])),
    "dict": ({"conf": {"width": 6}}, lambda m, y: cut(y, m.conf["width"])),
    "nested": ({"conf": {"a": [Config()]}}, lambda m, y: cut(y, m.conf["a"][0].width)),
    "dataclass": ({"cfg": Config()}, lambda m, y: cut(y, m.cfg.width)),
    "namespace": ({"cfg": SimpleNamespace(width=6)}, lambda m, y: cut(y, m.cfg.width)),
    "partial": ({"cut": functools.partial(cut, width=6)}, lambda m, y: m.cut(y)),
    "closure": ({"cut": closed(6)}, lambda m, y: m.cut(y)),
    "another module": ({"child": Lambda(lambda _m, y: y, width=6)}, lambda m, y: cut(y, m.child.width)),
    "another layer": ({}, lambda m, y: cut(y, m.b.in_features)),
    "twice": ({"twice": 12}, lambda m, y: cut(y, m.twice // 2)),
    "one half": ({"half": 3}, lambda m, y: y.reshape(2, 3, 2, m.half).flatten(2)),
    "product": ({"all": 18}, lambda m, y: y.reshape(2, m.all).reshape(2, 3, -1)),
    "two factors": ({"heads": 3, "size": 2}, lambda m, y: cut(y.view(2, 3, m.heads, m.size), m.heads * m.size)),
    "integer of numpy": ({"width": np.int64(6)}, lambda m, y: cut(y, m.width)),
    "buffer": ({"width": torch.tensor(6)}, lambda m, y: cut(y, int(m.width))),
    "module": ({"un": nn.Unflatten(-1, (6, 1))}, lambda m, y: m.un(y).flatten(2)),
    "split": ({"c": 3}, lambda m, y: torch.cat(y.split((m.c, m.c), -1)[::-1], -1)),
    "uneven split": ({"c": 2, "d": 4}, lambda m, y: torch.cat(y.split((m.c, m.d), -1)[::-1], -1)),
    "slice": ({"c": 3}, lambda m, y: torch.cat([y[..., : m.c].tanh(), y[..., m.c :]], -1)),
    "last of slice": ({"c": 2}, lambda m, y: torch.cat([y[..., : -m.c].tanh(), y[..., -m.c :]], -1)),
    "narrow": ({"c": 3}, lambda m, y: y.narrow(-1, 0, m.c).repeat(1, 1, 2)),
    "assert": ({"width": 6}, checked),
    "expand": ({"width": 6}, lambda m, y: y + m.one.expand(m.width)),
    "repeat": ({"width": 6}, lambda m, y: y * m.one.repeat(m.width)),
    "zeros": ({"width": 6}, lambda m, y: torch.maximum(y - 0.1, y.new_zeros(m.width))),
    "full": ({"width": 6}, lambda m, y: y + torch.full((m.width,), 0.5).to(y)),
    "groups": ({"width": 6}, lambda m, y: F.conv1d(y.mT, m.k.expand(m.width, 1, 3), padding=1, groups=m.width).mT),
    "groups of a norm": ({"g": 3}, lambda m, y: F.group_norm(y.mT, m.g).mT),
    "unflatten": ({"heads": 3}, lambda m, y: (z := y.unflatten(-1, (m.heads, -1))).mul(z.sum(-1, keepdim=True)).flatten(2)),
}


class Spelled(Lambda):
    def __init__(self, name: str) -> None:
        held, run = SPELLINGS[name]
        super().__init__(lambda m, x: m.b(run(m, m.a(x).sigmoid())))
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("one", torch.full((1,), 0.7))
        self.register_buffer("k", torch.randn(1, 1, 3))
        for key, value in held.items():
            self.register_buffer(key, value) if isinstance(value, Tensor) else setattr(self, key, copy.deepcopy(value))


def classes() -> dict[str, nn.Module]:
    made = {}
    for kind in (OfClass, WithProperty):
        made[kind.__name__] = type(kind.__name__, (kind,), {"forward": lambda m, x: m.b(cut(m.a(x).sigmoid(), m.width))})()
        made[kind.__name__].a, made[kind.__name__].b = nn.Linear(4, 6), nn.Linear(6, 2)
    return made


class Everything(nn.Module):
    """All spellings beside each other, so that one trace finds them all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Spelled(name) for name in SPELLINGS} | classes())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts.values()])


def test_a_width_is_found_however_it_is_written_and_the_users_own_objects_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Everything(), torch.randn(2, 3, 4)
    before = {name: held_numbers(module) for name, module in model.named_modules()}
    graph, warned = trace(model, x)
    found: dict[str, int] = {}
    for name, group in graph.groups.items():
        found[name.split(".")[1]] = found.get(name.split(".")[1], 0) + group.size
    fewer = {"one half": 3, "split": 3, "slice": 3, "narrow": 3, "groups of a norm": 3, "unflatten": 3, "two factors": 2}
    expected = {name: fewer.get(name, 6) for name in model.parts}
    assert {name: found.get(name) for name in expected} == expected, warned

    mask = random_mask(graph, 0.5, 1)
    small = compact(model.eval(), graph, mask)
    check_masked_equals_compact(model, (x,), {}, graph, mask)
    assert {name: held_numbers(module) for name, module in model.named_modules()} == before
    left = compact_graph(graph, mask)
    assert torch.equal(compact(small, left, sk.UnitMask.full(left))(x), small(x))

    sk.save_compact(small, tmp_path / "small.safetensors")
    loaded = sk.load_compact(tmp_path / "small.safetensors", Everything)
    assert torch.equal(loaded.eval()(x), small(x))

    state = compact_state(model.state_dict(), graph, mask)
    assert all(torch.equal(state[name], entry) for name, entry in small.state_dict().items())
    back = expand(state, graph, mask, into=model.state_dict())
    assert all(torch.equal(back[name], entry) for name, entry in model.state_dict().items())


class Attention(nn.Module):
    def __init__(self, config: Any, used: Any = lambda y, _: y) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.config, self.used = config, used

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.config.heads, 2)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], self.config.heads * 2)
        return self.out(self.used(y, self.config))


def two(**used: Any) -> tuple[nn.Module, Any]:
    config = SimpleNamespace(heads=3)
    return nn.Sequential(nn.Linear(4, 6), Attention(config, **used), Attention(config), nn.Linear(6, 2)), config


def test_layers_that_share_a_configuration_keep_numbers_of_heads_of_their_own() -> None:
    model, config = two()
    graph, _ = trace(model, torch.randn(2, 5, 4))
    keep = {name: torch.ones(group.size, dtype=torch.bool) for name, group in graph.groups.items()}
    keep["1.q"][1], keep["2.q"][:2] = False, False
    small = compact(model, graph, sk.UnitMask(keep), inplace=True)
    assert small is model
    assert (small[1].config.heads, small[2].config.heads, config.heads) == (2, 1, 3)
    assert small(torch.randn(2, 5, 4)).shape == (2, 5, 2)


class PackedHeads(nn.Module):
    """Queries, and keys and values of fewer heads, in one projection, taken apart by products of two integers."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.config, self.key_heads, self.size = SimpleNamespace(heads=heads, head_size=99), key_heads, 4
        self.packed, self.out = nn.Linear(6, (heads + 2 * key_heads) * 4), nn.Linear(heads * 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y, first = self.packed(x), self.config.heads * self.size
        parts = y[..., :first], y[..., first : first + self.key_heads * self.size], y[..., first + self.key_heads * self.size :]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (4, 4), (6, 2)])
def test_heads_in_one_projection_are_found_if_queries_are_half_of_it_too(heads: int, key_heads: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 6), PackedHeads(heads, key_heads)), torch.randn(2, 5, 3)
    graph, told = trace(model, x)
    assert (dict(graph.fingerprint())["1.packed"], told) == (key_heads, [])
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), gradients=False)


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width, self.heads, self.packed, self.out = 12, 3, nn.Linear(6, 36), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.packed(x).chunk(3, -1)
        q, k, v = (t.view(*x.shape[:2], self.heads, self.width // self.heads).transpose(1, 2) for t in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_width_that_is_divided_by_the_number_of_heads_follows_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 6), Divided()), torch.randn(2, 5, 3)
    graph, told = trace(model, x)
    assert (dict(graph.fingerprint())["1.packed"], told) == (3, [])
    assert {size.name for size in graph.sizes} == {"width", "heads"}
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.4, 0), gradients=False)


def test_an_integer_that_means_something_else_too_keeps_its_units() -> None:
    model, _ = two(used=lambda y, config: y / config.heads)
    graph, warned = trace(model, torch.randn(2, 5, 4))
    assert "2.q" in graph.groups
    assert "1.q" not in graph.groups
    assert len(warned) == 1


def test_two_groups_that_one_integer_counts_keep_equally_many_units() -> None:
    def run(m: Any, x: Tensor) -> Any:
        a, b = (layer(x).view(*x.shape[:2], m.heads, 2).transpose(1, 2) for layer in (m.a, m.b))
        a, b = (F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2) for y in (a, b))
        return m.out_a(a) + m.out_b(b)

    layers = {name: nn.Linear(6, 6) for name in ("a", "b", "out_a", "out_b")}
    graph, _ = trace(nn.Sequential(nn.Linear(4, 6), Lambda(run, heads=3, **layers), nn.Linear(6, 2)), torch.randn(2, 5, 4))
    assert graph.ties == (("1.a", "1.b"),)
    assert {size.name: size.per_unit for size in graph.sizes} == {"heads": 1}


def test_an_integer_that_counts_the_units_of_two_groups_is_their_sum() -> None:
    def run(m: Any, x: Tensor) -> Any:
        y = torch.cat([m.a(x).relu(), m.b(x).tanh()], -1)
        assert y.shape[-1] == m.both
        return m.out(y)

    model = Lambda(run, both=10, a=(4, 6), b=(4, 4), out=(10, 2))
    graph, _ = trace(model, torch.randn(3, 4))
    mask = sk.UnitMask({"a": torch.arange(6) < 2, "b": torch.arange(4) < 3})
    assert compact(model, graph, mask).both == 5


def test_code_that_takes_nothing_but_exact_integers_is_traced_without_following_them() -> None:
    def run(m: Any, x: Tensor) -> Any:
        if type(m.width) is not int:
            raise TypeError("width")
        return m.out(m.a(x).relu())

    graph, _ = trace(Lambda(run, width=6, a=(4, 6), out=(6, 2)), torch.randn(3, 4))
    assert graph.groups["a"].size == 6


def test_a_number_that_is_written_in_the_code_is_named_with_its_line() -> None:
    model = Lambda(lambda m, x: m.b(m.a(x).sigmoid().reshape(2, 3, 6)), a=(4, 6), b=(6, 2))
    told = r"the number 6 is written in the code at test_sizes.py:\d+ .*; write -1"
    with pytest.warns(UnprunableWarning, match=told), pytest.raises(NoUnitsError):
        trace_units(model, torch.randn(2, 3, 4))


def test_heads_that_einops_splits_are_found_in_every_layer() -> None:
    einops = pytest.importorskip("einops", reason="pip install einops")

    def run(m: Any, x: Tensor) -> Any:
        q, k, v = (einops.rearrange(t, "b n (h d) -> b h n d", h=m.heads) for t in m.packed(x).chunk(3, -1))
        return m.out(einops.rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))

    layers = [Lambda(run, heads=3, packed=nn.Linear(6, 36), out=nn.Linear(12, 6)) for _ in range(2)]
    model, x = nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 2)), torch.randn(2, 5, 4)
    model(x)  # fills the cache of einops with plain integers
    graph, told = trace(model, x)
    assert ([group.size for group in graph.groups.values()], told) == ([6, 3, 6, 3, 6], [])
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), gradients=False)
