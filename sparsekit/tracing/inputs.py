"""Example inputs of a model, and the tensors inside whatever it returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["ModelInputs", "find_tensors", "map_tensors"]


_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device, nn.Module)
_STATES = frozenset({"transformers.cache_utils.Cache"})
"""What a model hands to its own next call: as wide as the model is inside, and so no output of it."""


def find_tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, mappings, dataclasses and plain objects, in a fixed order."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, _PLAIN) or any(f"{k.__module__}.{k.__qualname__}" in _STATES for k in type(item).__mro__):
            return
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Mapping):
                children = list(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                children = list(item)
            elif dataclasses.is_dataclass(item):
                children = [getattr(item, field.name) for field in dataclasses.fields(item)]
            else:
                children = list(vars(item).values()) if hasattr(item, "__dict__") else []
            for child in children:
                visit(child)

    visit(value)
    return found


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor replaced, in nested tuples, lists, mappings, dataclasses and packed sequences.

    Other objects are passed on as they are, with the tensors that they hold.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return PackedSequence(function(value.data), *value[1:])
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        twin = copy.copy(value)  # keeps the kind of mapping, such as the batches of a tokenizer
        for key, item in value.items():
            twin[key] = map_tensors(function, item)
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(same, field.name, map_tensors(function, getattr(value, field.name)))
        return same
    return value


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """What a model is called on.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def call(self, model: nn.Module) -> Any:
        """Run the model on copies of the inputs, which it may overwrite."""
        args, kwargs = map_tensors(lambda t: t.detach().clone(), (self.args, dict(self.kwargs)))
        return model(*args, **kwargs)

    def doubled(self) -> ModelInputs:
        """The same as a batch of two: every tensor with one row gets a second one, of floats the row in reverse.

        A batch norm in train mode refuses a single row, and two equal ones would hide what it reads.
        """

        def one(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != 1:
                return tensor
            return torch.cat([tensor, tensor.flip(-1) if tensor.is_floating_point() else tensor])

        args, kwargs = map_tensors(one, (self.args, dict(self.kwargs)))
        return type(self)(args, kwargs)

    def prepared(self, dtype: torch.dtype | None, generator: torch.Generator | None) -> ModelInputs:
        """The same in another floating dtype; a constant input, such as zeros, becomes random.

        Args:
            dtype: For floating tensors; None keeps theirs.
            generator: For constant inputs; None leaves them constant.
        """

        def one(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            value = tensor.detach().to(dtype or tensor.dtype)
            if generator is not None and value.numel() > 1 and bool((value == value.reshape(-1)[0]).all()):
                noise = torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device)
                value = value + noise
            return value

        args, kwargs = map_tensors(one, (self.args, dict(self.kwargs)))
        return type(self)(args, kwargs)
