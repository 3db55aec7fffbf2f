"""untouched(): whatever runs inside leaves a model and the global generators as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import DispatchMode, operator_schema, storage_id, tree_leaves, tree_map_only
from sparsekit.rng import same_random_state
from sparsekit.surgery.rebuild import named_entries

_STATISTICS = frozenset({"running_mean", "running_var"})
"""Arguments of batch norms that are written to, though the schemas of the older ones do not say so."""


@cache
def _arguments(func: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """The arguments of an operator, and those that it writes to."""
    arguments = operator_schema(func).arguments
    names = tuple(argument.name for argument in arguments)
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return names, frozenset(written | _STATISTICS.intersection(names))


class _ReadOnly(DispatchMode):
    """Lets operators write to copies in place of some tensors.

    A copy of a large model lends the parameters of the original, and a lambda that holds the original calls it as it is.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._storages = {storage_id(tensor) for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names, written = _arguments(func)
        if written:
            args = tuple(self._apart(v) if name in written else v for name, v in zip(names, args, strict=False))
            kwargs = {name: self._apart(v) if name in written else v for name, v in kwargs.items()}
        return func(*args, **kwargs)

    def _apart(self, value: Any) -> Any:
        if not any(isinstance(leaf, Tensor) and storage_id(leaf) in self._storages for leaf in tree_leaves(value)):
            return value
        return tree_map_only(Tensor, lambda t: t.clone() if storage_id(t) in self._storages else t, value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Keep what runs inside away from the state of `model` and from the global generators.

    Args:
        model: The user's own. Its values stay, bit for bit, whatever copies that share its tensors do.
    """
    tensors = [*named_entries(model).values(), *model.buffers()]
    with same_random_state(), torch.no_grad(), _ReadOnly(tensors):
        yield
