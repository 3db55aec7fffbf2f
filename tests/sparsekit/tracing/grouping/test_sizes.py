"""Integers that count heads are found by name and value, and given up when the model is wrong with them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import trace
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact


class Attention(nn.Module):
    """Three heads of two; how sizes are kept is up to `numbers`, and how they are used to `shape` and `width`."""

    def __init__(self, shape: str = "self.heads, 2", width: str = "-1", **numbers: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.shape, self.width = shape, width
        for name, number in numbers.items():
            setattr(self, name, number)

    def forward(self, x: Tensor) -> Tensor:
        shape = eval(f"({self.shape})")
        q, k, v = (layer(x).view(*x.shape[:2], *shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(y.reshape(*x.shape[:2], eval(self.width)))


def traced(attention: nn.Module) -> tuple[nn.Module, UnitGraph]:
    model = nn.Sequential(nn.Linear(4, 6), attention, nn.Linear(6, 2))
    return model, trace(model, torch.randn(2, 5, 4))[0]


def sizes(graph: UnitGraph) -> dict[str, int]:
    return {size.name: size.per_unit for size in graph.sizes}


@pytest.mark.parametrize("name", ["num_heads", "n_head", "nhead", "heads", "h", "_num_attention_heads", "n_heads"])
def test_names_of_numbers_of_heads(name: str) -> None:
    _, graph = traced(Attention(f"self.{name}, 2", **{name: 3}))
    assert graph.groups["1.q"].size == 3
    assert sizes(graph) == {name: 1}


@pytest.mark.parametrize("name", ["inner_dim", "all_head_size", "attn_dim", "split_size", "embed_dim", "d"])
def test_names_of_the_width_of_all_heads(name: str) -> None:
    model, graph = traced(Attention(width=f"self.{name}", **{"heads": 3, name: 6}))
    assert sizes(graph) == {"heads": 1, name: 2}
    keep = {key: torch.arange(group.size) != 1 for key, group in graph.groups.items()}
    small = compact(model, graph, UnitMask(keep))
    assert (small[1].heads, getattr(small[1], name)) == (2, 4)


def test_a_number_with_another_name_is_not_touched_and_keeps_the_heads() -> None:
    _, graph = traced(Attention("self.many, 2", many=3))
    assert list(graph.groups) == ["0", "1.out"]
    assert graph.sizes == ()


def test_two_attentions_that_share_an_attribute_keep_equally_many_heads() -> None:
    def two(m: Any, x: Tensor) -> Any:
        a, b = (layer(x).view(*x.shape[:2], m.heads, 2).transpose(1, 2) for layer in (m.a, m.b))
        a, b = (F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2) for y in (a, b))
        return m.out_a(a) + m.out_b(b)

    _, graph = traced(Lambda(two, heads=3, **{name: nn.Linear(6, 6) for name in ("a", "b", "out_a", "out_b")}))
    assert graph.ties == (("1.a", "1.b"),)
    assert sizes(graph) == {"heads": 1}
