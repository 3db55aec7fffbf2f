"""Optimizers of clients by name, with torch's defaults; and the course of the learning rate."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Literal

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.registry import load_object

if TYPE_CHECKING:
    import torch


def optimizer_names() -> dict[str, type[torch.optim.Optimizer]]:
    """Lower-case name → class, for the optimisers of torch that take a step by gradients alone."""
    import torch  # here: help texts need no torch

    found = {}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            closure = inspect.signature(kind.step).parameters.get("closure")
            if closure is None or closure.default is None:
                found[name.lower()] = kind
    return found


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return an optimiser by its name in `torch.optim`, in any case, or as `package.module:Class`.

    Raises:
        UnknownNameError: torch has none of that name.
        InvalidValueError: it is no optimiser, or needs a closure.
    """
    import torch

    if ":" not in name:
        names = optimizer_names()
        if name.lower() == "lbfgs":
            raise InvalidValueError("optimizer 'lbfgs' needs a closure that computes the loss anew; choose one that does not")
        if name.lower() not in names:
            raise UnknownNameError(f"unknown optimizer {name!r}; {nearest(name.lower(), names)}, or package.module:Class")
        return names[name.lower()]
    found = load_object(name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise InvalidValueError(f"optimizer {name!r} must be a class that inherits torch.optim.Optimizer, got {found!r}")
    return found


def optimizer_defaults(name: str) -> dict[str, float]:
    """Return the numbers that an optimizer takes where none are given, by argument.

    Raises:
        UnknownNameError: torch has none of that name.
        InvalidValueError: it is no optimizer, or needs a closure.
    """
    parameters = inspect.signature(optimizer_class(name)).parameters
    # A few take the learning rate as a tensor too, but none has one as a default.
    return {key: float(one.default) for key, one in parameters.items() if isinstance(one.default, int | float)}


Schedule = Literal["constant", "linear", "cosine", "step"]
"""Names of the courses that a learning rate may take."""


def factor(
    kind: Schedule, place: int, total: int, *, warmup: int = 0, every: int | None = None, gamma: float = 0.1, end: float = 0.0
) -> float:
    """Return the factor on the learning rate.

    Args:
        kind: "constant"; "linear" and "cosine" fall to `end` at the last place; "step" is multiplied by `gamma` at intervals.
        place: Counted from 0.
        total: Number of places.
        warmup: Number of places at the start over which the rate grows linearly to its whole value, which the course then
            begins with.
        every: Places between two steps of "step"; None: a third of all.
        gamma: Factor of each step.
        end: Factor at the last place.

    Source: linear warm-up is Goyal et al. 2017 (arXiv 1706.02677); the cosine Loshchilov and Hutter, ICLR 2017.
    """
    if place < warmup:
        return (place + 1) / (warmup + 1)
    done, left = place - warmup, max(total - warmup, 1)
    if kind == "step":
        return gamma ** (done // (every or max(1, -(-left // 3))))
    if kind == "constant":
        return 1.0
    share = min(1.0, done / max(left - 1, 1))
    if kind == "linear":
        return 1.0 - (1.0 - end) * share
    return end + (1.0 - end) * (1.0 + math.cos(math.pi * share)) / 2.0
