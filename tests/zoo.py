"""The small architectures that the tests share, by name, with example inputs and the groups that must be found."""

from typing import Any

import zoo_attention  # noqa: F401 (fills the zoo)
import zoo_constructs  # noqa: F401
from torch import nn
from zoo_base import ZOO, Architecture, Lambda, build

from sparsekit import UnitGraph, trace_units
from sparsekit.tracing.inputs import ModelInputs

__all__ = ["ZOO", "Architecture", "Lambda", "build", "traced"]


def traced(name: str, **options: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], UnitGraph]:
    """A seeded model of the zoo, its inputs, and its units."""
    model, args, kwargs = build(name)
    return model, args, kwargs, trace_units(model, ModelInputs(args, kwargs), **options)
