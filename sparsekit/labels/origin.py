"""Marks of tensors that a pass computes from the inputs of the model: others without units are constants in the code."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from sparsekit._torch import tree_leaves

_MARK = "_sparsekit_from_inputs"


def mark_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for tensor in tree_leaves([args, dict(kwargs)]):
        if isinstance(tensor, Tensor):
            vars(tensor)[_MARK] = True


def mark_results(outputs: Iterable[Tensor], given: Iterable[Tensor]) -> None:
    if any(map(is_from_inputs, given)):
        for tensor in outputs:
            vars(tensor)[_MARK] = True


def is_from_inputs(tensor: Tensor) -> bool:
    return _MARK in vars(tensor)
