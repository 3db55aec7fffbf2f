"""FollowNumbers: while a model is traced, integers that it holds and lengths of axes remember where they were read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit.graph.held import Path, map_numbers
from sparsekit.labels.numbers import Given, Held, Number, Size
from sparsekit.labels.tracer import Tracer
from sparsekit.layers import LayerRule, find_rule

_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_UNFLATTEN = (Tensor.unflatten, torch.unflatten)
_ITSELF = Size()


def hold_numbers(tracer: Tracer, model: nn.Module, rules: Mapping[type[nn.Module], LayerRule] | None) -> None:
    """Put numbers in place of the integers that the modules of a private copy hold; those of opaque layers stay."""
    for name, module in model.named_modules():
        rule = find_rule(module, rules)
        if rule is not None and rule.opaque:
            continue
        held: list[Held] = []
        by_rule = () if rule is None else rule.sizes

        def remember(path: Path, value: int, name: str = name, held: list[Held] = held, by_rule: Any = by_rule) -> int:
            if value < 2:
                return value
            if path[0] in by_rule:
                return Number(value, {frozenset({_ITSELF}): value})
            held.append(Held(name, path, value))
            return Number(value, {frozenset(held[-1:]): value})

        for attribute, value in map_numbers(module, remember).items():
            vars(module)[attribute] = value
        tracer.held[name] = held


class FollowNumbers(TorchFunctionMode):
    """Tells the tracer the integers of every call, and hands out the lengths of axes as numbers."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _SHAPE:
            return torch.Size(self._lengths(args[0]))
        if func is Tensor.size:
            found = func(*args, **kwargs)
            lengths = self._lengths(args[0])
            return torch.Size(lengths) if isinstance(found, tuple) else lengths[args[1] if len(args) > 1 else kwargs["dim"]]
        given = Given.of(args, kwargs)
        if func in _UNFLATTEN:
            dim, sizes = (args[k] if len(args) > k else kwargs[name] for k, name in ((1, "dim"), (2, "sizes")))
            before_it = dim % args[0].dim()
            given = replace(given, shape=(*[-1] * before_it, *sizes, *[-1] * (args[0].dim() - 1 - before_it)))
        before, self.tracer.given = self.tracer.given, given
        try:
            return func(*args, **kwargs)
        finally:
            self.tracer.given = before

    def _lengths(self, tensor: Tensor) -> list[int]:
        labels = self.tracer.known(tensor)
        axes = (None,) * tensor.dim() if labels is None or labels.parts is not None else labels.units
        lengths: list[int] = []
        for size, axis in zip(tensor.shape, axes, strict=True):
            own = axis is not None and not (axis.nodes < 0).any()
            source = Size(axis.nodes, self.tracer.equals) if axis is not None and own else _ITSELF
            lengths.append(Number(size, {frozenset({source}): size}) if size > 1 else size)
        return lengths
