"""The state of an optimizer under a change of units: test_equals_masked_training trains with it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from optimizers import Lookahead
from torch import nn
from torch.optim import Optimizer

from sparsekit.surgery.optimizer_state import carried_state, entries_that_stay, first_value

MAKE: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", MAKE)
def test_state_of_units_that_enter_begins_as_the_optimiser_begins_it(name: str) -> None:
    usual, faster = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = MAKE[name]([usual])
    optimizer.add_param_group({"params": [faster], "lr": 0.25})  # a group with a rate of its own
    fresh = dict.fromkeys(("exp_avg", "momentum_buffer", "square_avg", "prev", "acc_delta"), 0.0)
    fresh |= {"sum": 0.1} if name == "adagrad" else {}
    for leaf, rate in ((usual, 0.01), (faster, 0.25)):
        expected = fresh | ({"step_size": rate} if name == "rprop" else {})
        assert {kind: first_value(optimizer, kind, leaf) for kind in expected} == expected


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Lookahead])
def test_state_that_is_not_one_value_for_each_entry_starts_fresh_whatever_its_shape(make: Any) -> None:
    leaf = nn.Parameter(torch.ones(1, 1))
    optimizer = make([leaf])
    leaf.square().sum().backward()
    optimizer.step()
    stay = entries_that_stay(torch.Size([3, 1]), {0: torch.tensor([1])}, {0: torch.tensor([0, 1])})
    assert stay is not None
    assert carried_state(optimizer, optimizer.state[leaf], leaf, leaf.shape, stay) == {}
