"""Budgets of devices: the largest ratio whose uniform submodel fits, and never a larger one."""

from __future__ import annotations

from typing import Any

import pytest

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit.measure.budget import BudgetError
from sparsekit_fl.testing import tiny_problem


def test_the_ratio_is_the_largest_that_fits() -> None:
    devices = fl.DeviceBudgets(tiny_problem())
    assert devices.costs(1.0)["flops"] == 2 * (6 * 8 + 8 * 3)
    assert devices.capability(flops=2 * (6 * 5 + 5 * 3)).ratio == 5 / 8
    assert devices.capability(flops=2 * (6 * 5 + 5 * 3) - 1).ratio == 4 / 8
    assert devices.capability(flops=1e9).ratio == 1.0


@pytest.mark.parametrize("budget", [{"flops": 100.0}, {"memory_bytes": 400.0}, {"flops": 120.0, "memory_bytes": 300.0}])
def test_no_budget_is_exceeded(budget: dict[str, float]) -> None:
    devices = fl.DeviceBudgets(tiny_problem())
    capability = devices.capability(**budget, flops_per_second=1e9)
    assert capability.flops_per_second == 1e9
    assert all(devices.costs(capability.ratio)[name] <= limit for name, limit in budget.items())
    wider = devices.costs(min(1.0, capability.ratio + 1 / 8))
    assert any(wider[name] > limit for name, limit in budget.items())


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({}, InvalidValueError, "needs a metric"),
        ({"flops": -1.0}, InvalidValueError, "above 0"),
        ({"flops": 100.0, "ratio": 0.5}, InvalidValueError, "leave `ratio` out"),
        ({"flops": 3.0}, BudgetError, "one unit of each group already costs 18 FLOPs"),
    ],
)
def test_what_cannot_be_met_or_meant_is_refused(given: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        fl.DeviceBudgets(tiny_problem()).capability(**given)
