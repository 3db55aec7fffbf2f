"""Example inputs of a model, and the tensors inside whatever it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

__all__ = ["ModelInputs", "find_tensors"]


def find_tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, mappings, dataclasses and plain objects, in a fixed order."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (str, bytes, int, float, bool, type(None), torch.dtype, torch.device, nn.Module)):
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
        args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), (self.args, dict(self.kwargs)))
        return model(*args, **kwargs)

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

        def packed(sequence: PackedSequence) -> PackedSequence:
            return PackedSequence(one(sequence.data), *sequence[1:])

        args, kwargs = tree_map_only(
            (Tensor, PackedSequence),
            lambda x: packed(x) if isinstance(x, PackedSequence) else one(x),
            (self.args, dict(self.kwargs)),
        )
        return ModelInputs(args, kwargs)
