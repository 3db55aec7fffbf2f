"""Budget: upper limits for the sparse model, in one metric or in several at once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from numbers import Real
from typing import Any

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest

_SHARE = re.compile(r"\s*(?:\d+(?:\.\d*)?|\.\d+)\s*%\s*")


class BudgetError(InvalidValueError):
    """A budget that cannot be met. `least` has the smallest reachable cost by metric."""

    def __init__(self, message: str, least: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.least = dict(least or {})


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Upper limits for the sparse model. Several metrics hold at once.

    A string such as `"50%"` is a share of the cost of the dense model, a number is absolute.

    Args:
        flops: FLOPs of a forward pass, per example; one multiply-add is 2.
        params: Parameters, tied ones once.
        bytes: Bytes of all parameters and buffers, as a saved file holds them.
        latency_ms: Milliseconds of a forward pass of the example inputs on this device.
        runtime: The runtime of these passes: "eager", "compile" (torch.compile), "export" (a program of torch.export) or "onnx"
            (ONNX Runtime on the CPU). Choose the one used in deployment.

    Raises:
        InvalidValueError: no metric is given, a share outside (0, 100] %, a number that is not above 0 (for other metrics than
            latency_ms, below 1), or a runtime without a limit of milliseconds.
    """

    flops: str | float | None = None
    params: str | float | None = None
    bytes: str | float | None = None
    latency_ms: str | float | None = None
    runtime: str = "eager"

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None and name != "runtime"}
        if not given:
            raise InvalidValueError(f'a budget needs a metric, as in Budget(flops="50%"); metrics: {", ".join(METRICS)}')
        for name, value in given.items():
            _check(name, value)
        if self.runtime not in RUNTIMES:
            raise InvalidValueError(f"a runtime must be one of {', '.join(RUNTIMES)}, got {self.runtime!r}")
        if self.runtime != "eager" and self.latency_ms is None:
            raise InvalidValueError(f"runtime={self.runtime!r} says what runs the passes of latency_ms, which is not limited")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that are limited."""
        return tuple(name for name in METRICS if getattr(self, name) is not None)

    def limits(self, dense: Mapping[str, float]) -> dict[str, float]:
        """Return metric → largest cost that is allowed, for the metrics of this budget.

        Args:
            dense: Metric → cost of the dense model.

        Raises:
            InvalidValueError: `dense` lacks a metric.
            BudgetError: The dense model has nothing to limit, such as no FLOPs.
        """
        found: dict[str, float] = {}
        for name in self.metrics:
            value = getattr(self, name)
            if name not in dense:
                raise InvalidValueError(
                    f"{name!r} of the budget does not follow from the widths, as {', '.join(dense) or 'nothing'} does; prune()"
                    " meets latency_ms by measuring models"
                )
            if not dense[name]:
                raise BudgetError(
                    f"{name} cannot be limited: the dense model has none on the example inputs; choose another metric, or"
                    " inputs on which its layers run"
                )
            found[name] = float(_share(value) * Fraction(dense[name])) if isinstance(value, str) else float(value)
        return found

    def told(self, metric: str, limit: float) -> str:
        """Return a limit as text, as the user gave it; a share is followed by the absolute limit."""
        given, absolute = getattr(self, metric), format_cost(metric, limit)
        return f"{given} ({absolute})" if isinstance(given, str) else absolute

    def question(self, *metrics: str) -> str:
        """Return "Did you mean 50 % …?" for a message if a limit of these metrics may lack its percent sign, else ""."""
        given = ((name, getattr(self, name)) for name in metrics)
        found = [(name, value) for name, value in given if not isinstance(value, str) and 1 <= value <= 100]
        return "".join(f' Did you mean {value:g} % of the dense model? Then pass {name}="{value:g}%".' for name, value in found)

    def part(self, progress: float, dense: Mapping[str, float]) -> Budget:
        """Return absolute limits between the costs of the dense model, at `progress` 0, and this budget, at 1; linear.

        `dense` is metric → cost of the dense model.
        """
        if progress >= 1.0:
            return self
        limits = self.limits(dense)
        values: dict[str, Any] = {
            name: dense[name] + max(0.0, progress) * (min(end, dense[name]) - dense[name]) for name, end in limits.items()
        }
        return replace(self, **values)

    @staticmethod
    def of(budget: Budget | Mapping[str, str | float] | str | Sequence[str]) -> Budget:
        """Return a budget unchanged, or parse one: `"flops=50%,params=2e6"`, several such texts, or metric → share or number.

        Raises:
            InvalidValueError: another type, no metric, one given twice, or a value that is neither a share nor a number.
            UnknownNameError: a metric that does not exist.
        """
        if isinstance(budget, Budget):
            return budget
        if isinstance(budget, Mapping):
            budget = [f"{name}={value}" for name, value in budget.items()]
        if not isinstance(budget, Sequence) or not all(isinstance(text, str) for text in budget):
            raise InvalidValueError(
                f'budget must be a Budget, as in Budget(flops="50%"), got {budget!r} of {type(budget).__name__}'
            )
        texts = [budget] if isinstance(budget, str) else budget
        found: dict[str, Any] = {}
        for pair in (part for text in texts for part in text.split(",") if part.strip()):
            name, sign, value = (part.strip() for part in pair.partition("="))
            if not sign or not value:
                raise InvalidValueError(f"a budget is written as metric=value, as in flops=50% or latency_ms=4, got {pair!r}")
            if name not in (*METRICS, "runtime"):
                raise UnknownNameError(f"unknown metric {name!r} in the budget; {nearest(name, METRICS)}")
            if name in found:
                raise InvalidValueError(f"the budget gives {name!r} twice; leave one of them out")
            found[name] = value if value.endswith("%") or name == "runtime" else _number(name, value)
        return Budget(**found)

    def __str__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.metrics)
        told = ", ".join(f"{name} ≤ {value if isinstance(value, str) else format_cost(name, value)}" for name, value in values)
        return told if self.runtime == "eager" else f"{told}, run by {self.runtime}"


METRICS = tuple(field.name for field in fields(Budget) if field.name != "runtime")
RUNTIMES = ("eager", "compile", "export", "onnx")
"""Runtimes of a model: its own forward pass, torch.compile, torch.export, ONNX Runtime."""


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidValueError(
            f"{name} of a budget must be a number or a share such as 50%, got {text!r}; write 2 MB as 2e6"
        ) from None


def _share(text: str) -> Fraction:
    return Fraction(text.replace("%", "").strip()) / 100


def _check(name: str, value: object) -> None:
    if isinstance(value, str):
        if _SHARE.fullmatch(value) is None:
            raise InvalidValueError(
                f'{name} must be a share such as "50%" or a number, got the string {value!r};'
                " a number is absolute and goes without quotes"
            )
        if not 0 < _share(value) <= 1:
            raise InvalidValueError(
                f"{name} must be a share in (0, 100] % of the dense model, got {value!r};"
                ' a budget is what stays: to save 30 % pass "70%"'
            )
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidValueError(f'{name} must be a share such as "50%" or a number, got {value!r} of {type(value).__name__}')
    if not math.isfinite(value) or value <= 0:
        raise InvalidValueError(f'{name} must be above 0, got {value!r}; a number is absolute, for a share pass "50%"')
    if name != "latency_ms" and value < 1:
        raise InvalidValueError(
            f'{name}={value!r} is less than one; a number is absolute, so for that share of the model pass "{value * 100:g}%"'
        )


def format_cost(metric: str, value: float) -> str:
    """Return a cost as text, such as `3.20 GFLOPs`, `1.21 M` for parameters, `4.70 MB` or `2.31 ms`."""
    if metric == "latency_ms":
        return f"{value:.3g} ms"
    unit = {"flops": "FLOPs", "params": ""}.get(metric, "B")
    for letter, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {letter}{unit}"
    return f"{value:.0f} {unit}".rstrip()
