"""Copies of modules refer to themselves, and units that enter begin with the state of a fresh optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from sparsekit.surgery.optimizer_state import first_value
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


@pytest.mark.parametrize(
    ("make", "special"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True), {}),
        (lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1), {"sum": 0.1}),
        (lambda p: torch.optim.Rprop(p, lr=0.01), {"step_size": None}),
    ],
)
def test_state_begins_as_the_optimizer_begins_it(make: Callable[[Iterable[Any]], Any], special: dict[str, Any]) -> None:
    usual, faster = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = make([usual])
    optimizer.add_param_group({"params": [faster], "lr": 0.25})  # a group with a rate of its own
    for leaf, rate in ((usual, 0.01), (faster, 0.25)):
        expected = dict.fromkeys(("exp_avg", "momentum_buffer", "prev"), 0.0)
        expected |= {name: rate if value is None else value for name, value in special.items()}
        assert {name: first_value(optimizer, name, leaf) for name in expected} == expected
