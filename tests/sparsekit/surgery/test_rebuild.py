"""Copies of modules with other tensors are what deepcopy would make of them, and cuts are the kept positions."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import zoo
from torch import nn

from sparsekit.surgery.rebuild import copy_with, named_entries


class Odd(nn.Module):
    """Refers to itself, to its parent, to shared tables and to one tensor by several ways."""

    def __init__(self, parent: list[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.again = [self.weight]
        self.parent = parent
        self.me = [self]
        self.table = {"a": [1], "b": self.weight}
        self.same_table = self.table
        self.ordered = OrderedDict(x=[2])
        self.empty: OrderedDict[str, int] = OrderedDict()
        self.empty.note = "kept"  # type: ignore[attr-defined]
        self.numbers = {1, 2}
        self.register_buffer("scale", torch.ones(2))


class Own(nn.Module):
    """Copies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        twin = Own()
        twin.weight = copy.deepcopy(self.weight, memo)
        twin.copies = self.copies + 1
        return twin


def test_references_inside_a_copy_stay_inside() -> None:
    holder: list[nn.Module] = []
    model = nn.ModuleDict({"odd": Odd(holder), "plain": nn.Linear(2, 2)})
    holder.append(model)
    new = torch.full((3,), 7.0)
    twin = copy_with(model, {"odd.weight": new})
    odd: Any = twin["odd"]
    assert odd.parent[0] is twin
    assert odd.me[0] is odd
    assert odd.weight.data_ptr() == new.data_ptr()
    assert odd.again[0] is odd.weight
    assert odd.table["b"] is odd.weight
    assert odd.same_table is odd.table
    assert odd.table["a"] == [1]
    assert odd.table["a"] is not model["odd"].table["a"]
    assert (odd.ordered, odd.empty.note, odd.numbers) == (OrderedDict(x=[2]), "kept", {1, 2})
    assert odd.numbers is not model["odd"].numbers
    assert odd.scale.data_ptr() != model["odd"].scale.data_ptr()


@pytest.mark.parametrize("name", ["resnet-small", "tied-lstm", "gru-deep", "mha", "group-norm", "dict-input"])
def test_a_copy_has_the_attributes_of_a_deepcopy(name: str) -> None:
    model = zoo.build(name)[0]
    expected, twin = copy.deepcopy(model), copy_with(model, {})
    for a, b in zip(expected.modules(), twin.modules(), strict=True):
        assert type(a) is type(b)
        assert {k: type(v) for k, v in vars(a).items()} == {k: type(v) for k, v in vars(b).items()}
    pointers = {t.data_ptr() for t in named_entries(model).values()}
    assert not pointers & {t.data_ptr() for t in named_entries(twin).values()}
    first = {k: id(v) for k, v in named_entries(twin).items()}
    assert len(set(first.values())) == len({id(v) for v in named_entries(model).values()})
