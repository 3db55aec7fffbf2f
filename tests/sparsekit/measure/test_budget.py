"""Budgets: what may be asked for, and how it is read."""

from typing import Any

import pytest

import sparsekit as sk
from sparsekit.errors import InvalidValueError


def test_a_string_is_a_share_and_a_number_is_absolute() -> None:
    budget = sk.Budget(flops="25%", latency_ms=4)
    assert budget.metrics == ("flops", "latency_ms")
    assert budget.limits({"flops": 1000.0, "latency_ms": 9.0}) == {"flops": 250.0, "latency_ms": 4.0}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "needs a metric"),
        ({"flops": "150%"}, r"\(0, 100\] %"),
        ({"flops": "0%"}, "what stays"),
        ({"flops": "half"}, 'share such as "50%"'),
        ({"flops": "50"}, 'share such as "50%"'),
        ({"params": 0.5}, 'pass "50%"'),
        ({"bytes": -3}, "above 0"),
        ({"bytes": float("nan")}, "above 0"),
        ({"flops": True}, "of bool"),
        ({"latency_ms": 4, "runtime": "tensorrt"}, "one of eager, compile, export, onnx"),
        ({"flops": "50%", "runtime": "onnx"}, "is not limited"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_advice(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidValueError, match=told):
        sk.Budget(**given)


def test_a_part_of_the_way_lies_between_the_dense_model_and_the_budget() -> None:
    budget, dense = sk.Budget(flops="50%"), {"flops": 1000.0}
    assert budget.part(0.0, dense).limits(dense) == {"flops": 1000.0}
    assert budget.part(0.5, dense).limits(dense) == {"flops": 750.0}
    assert budget.part(1.0, dense) is budget


def test_the_runtime_goes_with_a_budget_wherever_it_goes() -> None:
    budget = sk.Budget.of("latency_ms=50%,runtime=onnx")
    assert budget == sk.Budget.of({"latency_ms": "50%", "runtime": "onnx"}) == sk.Budget(latency_ms="50%", runtime="onnx")
    assert budget.metrics == ("latency_ms",)
    assert budget.limits({"latency_ms": 8.0}) == {"latency_ms": 4.0}
    assert budget.part(0.5, {"latency_ms": 8.0}) == sk.Budget(latency_ms=6.0, runtime="onnx")
    assert str(budget) == "latency_ms ≤ 50%, run by onnx"
