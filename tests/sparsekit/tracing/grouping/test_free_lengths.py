"""Heads behind lengths that code reads off its input: `B, N, C = x.shape` … `reshape(B, N, C)`, however it is written."""

import copy
import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask, trace
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import CompactFileError, ForeignMaskError
from sparsekit.runtime.free_lengths import free_lengths

_CODE = """
import functools

import torch
from torch import nn

factor = 1.0


class Attention(nn.Module):
    def __init__(self, dim, heads, size):
        super().__init__()
        self.num_heads, self.size = heads, size
        self.qkv, self.proj = nn.Linear(dim, 3 * heads * size), nn.Linear(heads * size, dim)

    {decorator}
    def forward(self, x, scale=0.3, *, more=factor):
        {first}
        q, k, v = {split}.permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) * scale * more).softmax(-1) @ v
        return self.proj({join})


class Child(Attention):
    def forward(self, x):
        return super().forward(x).relu()


class Block(nn.Module):
    def __init__(self, dim, heads, size, kind=Attention):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), kind(dim, heads, size)

    def forward(self, x):
        return x + self.attn(self.norm(x))


def make(kind=Attention, size=4):
    return nn.Sequential(nn.Linear(5, 12), Block(12, 3, size, kind), Block(12, 3, size, kind), nn.Linear(12, 2))
"""
_SPLIT = "self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)"
_FIRST = "B, N, C = x.shape"
_JOIN = "y.transpose(1, 2).reshape(B, N, C)"


def _written(folder: Path, first: str = _FIRST, split: str = _SPLIT, join: str = _JOIN, decorator: str = "") -> ModuleType:
    """A module of Python with attention in it, as its user has it on disk."""
    number = sum(name.startswith("written_") for name in sys.modules)
    path = folder / f"written_{number}.py"
    text = _CODE.replace("{first}", first).replace("{split}", split).replace("{join}", join).replace("{decorator}", decorator)
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


_SPELLINGS: list[dict[str, str]] = [
    {},
    {"first": "B, N, C = x.size()"},
    {"first": "(B, N), C = x.shape[:2], x.shape[-1]"},
    {"first": "B, N, C = (x.size(d) for d in range(3))"},
    {"first": "B, N, C = x.shape; size = C // self.num_heads", "split": "self.qkv(x).view(B, N, 3, self.num_heads, size)"},
    {"split": "self.qkv(x).reshape(B, N, 3, self.num_heads, -1)"},
    {"split": "self.qkv(x).reshape(B, N, 3, self.num_heads, self.size)"},
    {"split": "self.qkv(x).reshape(B, N, 3, -1, C // self.num_heads)"},
    {"split": "(\n            self.qkv(x)\n            .reshape(B, N, 3, self.num_heads, C // self.num_heads)\n        )"},
    {"join": "(\n            y\n            .transpose(1, 2).reshape(B, N, C)\n        )"},
    {"split": "torch.reshape(self.qkv(x), (B, N, 3, self.num_heads, C // self.num_heads))"},
    {"join": "y.transpose(1, 2).contiguous().view(B, N, C)"},
    {"join": "y.transpose(1, 2).reshape([B, N, C])"},
    {"join": "torch.reshape(y.transpose(1, 2), (B, N, C))"},
    {"join": "y.transpose(1, 2).reshape(x.shape)"},
    {"join": "y.transpose(1, 2).reshape(*x.shape)"},
    {"join": "y.transpose(1, 2).reshape(*x.shape[:2], C)"},
    {"join": "y.transpose(1, 2).reshape(B, *x.shape[1:2], C)"},
    {"join": "y.transpose(1, 2).reshape(B * N, C).reshape(B, N, C)"},
    {"join": "y.transpose(-1, -2).reshape(B, C, N).transpose(1, 2)"},
    {"join": "y.transpose(1, 2).reshape(B, N, C) if N > 1 else y.reshape(B, N, C)"},
]


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_heads_are_found_however_the_length_is_written(spelling: dict[str, str], tmp_path: Path) -> None:
    code = _written(tmp_path, **spelling)
    model, x = code.make(), torch.randn(2, 4, 5)
    graph, _ = trace(model, x)
    assert {name: (group.size, group.kind) for name, group in graph.groups.items()} == {
        f"{block}.attn.qkv": (3, "head") for block in (1, 2)
    }
    for seed in range(2):
        mask = random_mask(graph, 0.7, seed)
        for train in (False, True):
            check_masked_equals_compact(model, (x,), {}, graph, mask, train=train)
        check_nothing_is_lost(model, graph, mask)


@pytest.mark.parametrize("join", ["y.transpose(1, 2).reshape(B, N, C)", "y.transpose(1, 2).reshape(x.shape)"])
def test_a_model_with_free_lengths_is_copied_saved_exported_trained_and_cut_again(join: str, tmp_path: Path) -> None:
    code = _written(tmp_path, join=join)
    model, x = code.make(), torch.randn(2, 4, 5)
    graph, _ = trace(model, x)
    mask = random_mask(graph, 0.7, 0)
    small = sk.compact(model, graph, mask).eval()
    expected = small(x)
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small)), torch.export.export(small, (x,)).module()):
        torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
    assert isinstance(small[1].attn, code.Attention)
    sk.save_compact(small, tmp_path / "small.safetensors", example_inputs=(x,))
    torch.testing.assert_close(sk.load_compact(tmp_path / "small.safetensors", code.make)(x), expected, rtol=0, atol=0)
    again, _ = trace(small, x)
    assert all(again.groups[name].size == count for name, count in mask.counts().items() if count > 1)
    for method in (sk.LearnableMask(model, (x,), ratio=0.5), sk.prune(model, (x,), budget="params=80%").model):
        method(x).sum().backward()


def test_the_class_of_the_user_is_not_changed_and_other_lengths_work(tmp_path: Path) -> None:
    code = _written(tmp_path)
    forward, model, x = code.Attention.forward, code.make(), torch.randn(2, 4, 5)
    graph, _ = trace(model, x)
    small = sk.compact(model, graph, random_mask(graph, 0.7, 0))
    assert code.Attention.forward is forward
    assert type(model[1].attn) is code.Attention
    assert type(small[1].attn).__qualname__ == "Attention"
    assert small(torch.randn(3, 1, 5)).shape == (3, 1, 2)
    assert small[1].attn.forward.__kwdefaults__ == {"more": 1.0}


_REFUSED: list[dict[str, str]] = [
    {"join": "y.transpose(1, 2).reshape(-1, N, C)"},
    {"join": "torch.ones(B, N, C) * y.transpose(1, 2).flatten(2)"},
    {"decorator": "@functools.lru_cache"},
    {
        "first": "B, N, C = x.shape; proj, self_ = self.proj, self; join = lambda y: y.reshape(B, N, C)",
        "join": "join(y.transpose(1, 2))",
    },
]


@pytest.mark.parametrize("spelling", _REFUSED)
def test_heads_stay_whole_where_the_length_cannot_be_left_out(spelling: dict[str, str], tmp_path: Path) -> None:
    code = _written(tmp_path, **spelling)
    model, x = nn.Sequential(code.make(), nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4, 5)
    graph, told = trace(model, x)
    assert list(graph.groups) == ["0.3", "1"]
    assert not graph.free
    assert any("attn.qkv" in text for text in told)


def test_a_method_that_a_subclass_hides_is_not_rewritten(tmp_path: Path) -> None:
    code = _written(tmp_path)
    model, x = nn.Sequential(code.make(code.Child), nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4, 5)
    graph, _ = trace(model, x)
    assert list(graph.groups) == ["0.3", "1"]


def test_other_code_than_that_of_the_trace_is_refused(tmp_path: Path) -> None:
    code, other = _written(tmp_path), _written(tmp_path, join="y.transpose(1, 2).flatten(2)")
    model, x = code.make(), torch.randn(2, 4, 5)
    graph, _ = trace(model, x)
    sk.save_compact(sk.compact(model, graph, random_mask(graph, 0.7, 0)), tmp_path / "small.safetensors")
    with pytest.raises((CompactFileError, ForeignMaskError), match=r"no 'y\.transpose\(1, 2\)\.reshape\(B, N, C\)'"):
        sk.load_compact(tmp_path / "small.safetensors", other.make)


def test_a_closure_and_super_stay_as_they_are() -> None:
    width = 3

    class Base(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + width

    class Net(Base):
        def forward(self, x: Tensor, *, more: float = 2.0) -> Tensor:
            """Names of all kinds."""
            C = x.shape[-1]
            return super().forward(x.reshape(2, C)) * more * width

    model: Any = Net()
    x = torch.randn(2, 3)
    before = model(x)
    free_lengths(model, [("forward", "x.reshape(2, C)", 1)])
    assert type(model) is not Net
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    assert model(torch.randn(4, 3).T.reshape(2, 6)).shape == (2, 6)
    with pytest.raises(ForeignMaskError, match=r"has no 'x\.view"):
        free_lengths(model, [("forward", "x.view(2, C)", 1)])
