"""random_tokens(): example tokens that are all zero are drawn at random, within what the embeddings know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit.tracing.inputs import ModelInputs, find_tensors, map_tensors

__all__ = ["random_tokens"]


class _Lookups(TorchFunctionMode):
    """Notes how many rows the tables have that some tensors are looked up in."""

    def __init__(self, places: Mapping[int, int]) -> None:
        super().__init__()
        self._places = places  # where a tensor lies in memory → its number
        self.rows: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, torch.embedding):
            named = dict(zip(("input", "weight") if func is F.embedding else ("weight", "indices"), args)) | dict(kwargs)
            table, tokens = named["weight"], named["input" if func is F.embedding else "indices"]
            number = self._places.get(tokens.untyped_storage().data_ptr())
            if number is not None:
                self.rows[number] = min(self.rows.get(number, table.shape[0]), table.shape[0])
        return func(*args, **kwargs)


def _is_blank(tensor: Tensor) -> bool:
    integers = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    return integers and not tensor.is_meta and tensor.numel() > 1 and not bool(tensor.any())


def random_tokens(model: nn.Module, inputs: ModelInputs, generator: torch.Generator) -> ModelInputs:
    """Draw tokens where the example has nothing but zeros, since equal tokens make all positions of a sequence equal.

    Args:
        model: In eval mode; run once, and only where some integer input is all zero.
        inputs: What it is called on.
        generator: For the draws.

    Returns:
        The same inputs, with zeros that are looked up in an embedding replaced by tokens in [0, rows of the table).
    """
    tensors = find_tensors((inputs.args, dict(inputs.kwargs)))
    if not any(map(_is_blank, tensors)):
        return inputs
    numbers: dict[int, int] = {}

    def entered(tensor: Tensor) -> Tensor:
        twin = tensor.detach().clone()
        if _is_blank(tensor):
            numbers[twin.untyped_storage().data_ptr()] = len(numbers)
        return twin

    args, kwargs = map_tensors(entered, (inputs.args, dict(inputs.kwargs)))
    lookups = _Lookups(numbers)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), lookups:
        model(*args, **kwargs)
    seen = [-1]

    def drawn(tensor: Tensor) -> Tensor:
        if not _is_blank(tensor):
            return tensor
        seen[0] += 1
        rows = lookups.rows.get(seen[0])
        if rows is None:
            return tensor
        return torch.randint(0, rows, tensor.shape, generator=generator, dtype=torch.int64).to(tensor)

    args, kwargs = map_tensors(drawn, (inputs.args, dict(inputs.kwargs)))
    return type(inputs)(args, kwargs)
