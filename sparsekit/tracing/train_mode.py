"""What a model does differently in training: found by comparing the operators of a pass in eval mode and one in train mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import DispatchMode, DropoutNd, InstanceNorm, tree_leaves
from sparsekit.tracing.inputs import ModelInputs

__all__ = ["TrainMode", "WithoutDropout", "compare_modes", "train_without_dropout"]


def train_without_dropout(model: nn.Module) -> nn.Module:
    """Put a private copy into train mode, but for dropout, which says nothing about units, and instance norms.

    An instance norm keeps channels apart in both modes; in train mode it also writes its statistics by operators of its own.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, DropoutNd | InstanceNorm):
            module.eval()
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return model


class WithoutDropout(TorchFunctionMode):
    """Makes functional dropout, and that inside attention, do nothing, as in eval mode."""

    _FUNCTIONS = frozenset(
        getattr(home, name)
        for home in (torch, F)
        for name in dir(home)
        if name.rstrip("_123d").endswith("dropout") and not name.startswith(("_", "native"))
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


class _OperatorList(DispatchMode):
    """Lists the operators that run, with the numbers that they are given; flags, by which a norm knows of training, aside."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, tuple[float, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counts = bool(args) and isinstance(args[0], Tensor) and args[0].dim() == 0 and not args[0].is_floating_point()
        if not counts:  # a batch norm counts its batches in training
            numbers = tuple(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in (int, float))
            self.operators.append((func, numbers))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class TrainMode:
    """What a model does in train mode.

    Args:
        differs: Whether it runs other operators than in eval mode or gives them other numbers, dropout aside.
        doubled: Whether it needs two rows of the example, which came with one.
        error: Why it refuses the example inputs, even doubled; None if it does not.
    """

    differs: bool
    doubled: bool = False
    error: Exception | None = None

    def inputs(self, inputs: ModelInputs) -> ModelInputs:
        """The inputs to call it on in train mode."""
        return inputs.doubled() if self.doubled else inputs


def compare_modes(model: nn.Module, inputs: ModelInputs) -> TrainMode:
    """Compare the operators of a pass in train mode with those of one in eval mode.

    Args:
        model: A private copy, whose mode and statistics change.
        inputs: What it is called on; doubled if train mode refuses them, since a batch norm refuses a single example.
    """
    refused: Exception | None = None
    for doubled in (False, True):
        try:
            lists = [_operators(model, inputs.doubled() if doubled else inputs, training) for training in (True, False)]
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
            refused = refused or error
        else:
            return TrainMode(lists[0] != lists[1], doubled)
    return TrainMode(differs=False, error=refused)


def _operators(model: nn.Module, inputs: ModelInputs, training: bool) -> list[tuple[Any, tuple[float, ...]]]:
    model = train_without_dropout(model) if training else model.eval()
    seen = _OperatorList()
    with torch.no_grad(), WithoutDropout(), seen:
        inputs.call(model)
    return seen.operators
