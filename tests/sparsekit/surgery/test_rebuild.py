"""Copies of modules with other tensors are what deepcopy would make of them, and cuts are the kept positions."""

from typing import Any

import torch
from torch import nn

from sparsekit.surgery.rebuild import copy_with


class Odd(nn.Module):
    def __init__(self, parent: list[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.again = [self.weight]
        self.parent = parent
        self.me = [self]
        self.table = {"a": [1], "b": self.weight}
        self.same_table = self.table
        self.register_buffer("scale", torch.ones(2))


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
    assert odd.scale.data_ptr() != model["odd"].scale.data_ptr()
