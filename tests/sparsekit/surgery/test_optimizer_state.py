"""The state of units that enter a mask begins as a fresh optimizer's does; the oracle of masked training asks the same code."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from sparsekit.surgery.optimizer_state import first_value


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
