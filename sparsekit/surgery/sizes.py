"""set_sizes(): set the integers of a model's own modules that follow the number of units."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from sparsekit.errors import ForeignMaskError
from sparsekit.graph.graph import UnitGraph


def set_sizes(model: nn.Module, graph: UnitGraph, counts: Mapping[str, int]) -> None:
    """Set the integers that follow the number of units.

    Args:
        model: With the module names of the model that was traced.
        graph: Its units.
        counts: Group name → units kept.

    Raises:
        ForeignMaskError: a module is not there.
    """
    for size in graph.sizes:
        try:
            module = model.get_submodule(size.module)
        except AttributeError as error:
            raise ForeignMaskError(
                f"no module {size.module!r} in this {type(model).__name__}, but the graph sizes it"
            ) from error
        value = size.per_unit * counts[size.group]
        is_shape = isinstance(getattr(module, size.name, None), tuple)
        setattr(module, size.name, (value,) if is_shape else value)
