"""FollowNumbers: while a model is traced, integers that it holds and lengths of axes remember where they were read."""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import Token
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import modules_of
from sparsekit.graph.groups import FreeLength
from sparsekit.graph.held import Path, map_numbers
from sparsekit.labels.facts import LIBRARIES
from sparsekit.labels.numbers import USED, Given, Held, Number, Size, find_integers, note_use, parts_of
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import is_from_inputs
from sparsekit.layers import LayerRule, find_rule
from sparsekit.runtime.free_lengths import place_of
from sparsekit.tracing.branches import is_branch

_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_UNFLATTEN = (Tensor.unflatten, torch.unflatten)
_RESHAPES = (Tensor.reshape, Tensor.view, torch.reshape)
_COUNTS = (Tensor.numel, torch.numel, Tensor.nelement)
_MAKERS = (torch.tensor, torch.as_tensor, torch.full, torch.scalar_tensor, Tensor.new_tensor, Tensor.new_full, Tensor.fill_)
_ITSELF = Size()
_DECISIONS = (Tensor.__bool__, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero)
_TAKEN_OUT = (Tensor.item, Tensor.__float__, Tensor.__int__)


@contextmanager
def _einops_uncached() -> Iterator[None]:
    """Disable the cache of einops inside the block: it returns equal numbers that were read from another layer."""
    home: Any = sys.modules.get("einops.einops")
    cached: Any = getattr(home, "_reconstruct_from_shape", None)
    if not hasattr(cached, "__wrapped__"):
        yield
        return
    home._reconstruct_from_shape = cached.__wrapped__
    try:
        yield
    finally:
        home._reconstruct_from_shape = cached


def hold_numbers(tracer: Tracer, model: nn.Module, rules: Mapping[type[nn.Module], LayerRule] | None) -> None:
    """Replace integers in the modules of a private copy by `Number`, except in opaque layers."""
    for name, module in modules_of(model):
        rule = find_rule(module, rules)
        if rule is not None and rule.opaque:
            continue
        held: list[Held] = []
        by_rule = () if rule is None else rule.sizes

        def remember(path: Path, value: int, name: str = name, held: list[Held] = held, by_rule: Any = by_rule) -> int:
            if value < 2:
                return value
            if path[0] in by_rule:
                return Number(value, {frozenset({Size(module=name)}): value})
            held.append(Held(name, path, value))
            return Number(value, {frozenset(held[-1:]): value})

        for attribute, value in map_numbers(module, remember).items():
            vars(module)[attribute] = value
        tracer.held[name] = held


def _is_borrowed(number: Number) -> bool:
    return any(isinstance(source, Size) and source.nodes.size for source in number.factors)


def _caller() -> FrameType:
    """Return the innermost frame outside of this package. It is not in torch, whose functions are written in C++."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(LIBRARIES[1]) and frame.f_back is not None:
        frame = frame.f_back
    return frame


class FollowNumbers(TorchFunctionMode):
    """Passes the integers of every call to the tracer, and returns lengths of axes as `Number`."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self._tokens: list[Token[Any]] = []
        self._uncached = ExitStack()
        self._length = Size(decided=self._decide)  # of an axis of an input without units

    def __enter__(self) -> "FollowNumbers":
        self._tokens.append(USED.set(self.tracer.note_compared))
        self._uncached.enter_context(_einops_uncached())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        USED.reset(self._tokens.pop())
        self._uncached.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS:
            note_use(*find_integers((args, kwargs)))
        elif func is Tensor.__len__:
            note_use(*self._lengths(args[0])[:1])
        token = USED.set(None)
        try:
            made = self._followed(func, args, kwargs)
        finally:
            USED.reset(token)
        if func in (*_DECISIONS, *_TAKEN_OUT) and any(is_from_inputs(t) for t in args if isinstance(t, Tensor)):
            self._decide(_caller(), made, is_test=func in _DECISIONS)
        return made

    def _decide(self, frame: FrameType, outcome: Any, *, is_test: bool = False) -> None:
        """Record the line if code branches on a value or on the length of an input, with the outcome."""
        if is_branch(frame, is_test=is_test):
            self.tracer.decisions.setdefault((frame.f_code.co_filename, frame.f_lineno), set()).add(outcome)

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == _SHAPE:
            return torch.Size(self._lengths(args[0]))
        if func is Tensor.size:
            found = func(*args, **kwargs)
            lengths = self._lengths(args[0])
            return torch.Size(lengths) if isinstance(found, tuple) else lengths[args[1] if len(args) > 1 else kwargs["dim"]]
        if func in _COUNTS:
            return math.prod(self._lengths(args[0]))
        given = Given.of(args, kwargs)
        self.tracer.read_from.update(*(factors for number in given.shape for factors in parts_of(number)))
        if func in _UNFLATTEN:
            dim, sizes = (args[k] if len(args) > k else kwargs[name] for k, name in ((1, "dim"), (2, "sizes")))
            before_it = dim % args[0].dim()
            given = replace(given, shape=(*[-1] * before_it, *sizes, *[-1] * (args[0].dim() - 1 - before_it)))
        if func in _RESHAPES and -1 not in given.shape and any(_is_borrowed(number) for number in given.numbers.values()):
            given = self._placed(given, _caller())
        before, self.tracer.given = self.tracer.given, given
        try:
            return func(*args, **kwargs)
        finally:
            self.tracer.given = before

    def _placed(self, given: Given, caller: FrameType) -> Given:
        module, name = self.tracer.running, self.tracer.module

        def place(dim: int, rank: int) -> FreeLength | None:
            found = place_of(module, caller, dim, rank)
            return None if found is None else FreeLength(name, *found)

        return replace(given, place=place, site=(id(caller.f_code), caller.f_lasti))

    def _lengths(self, tensor: Tensor) -> list[int]:
        labels = self.tracer.known(tensor)
        axes = (None,) * tensor.dim() if labels is None or labels.parts is not None else labels.units
        lengths: list[int] = []
        for size, axis in zip(tensor.shape, axes, strict=True):
            nodes = None if axis is None else axis.nodes[axis.nodes >= 0]
            source = _ITSELF
            if axis is not None and nodes is not None and nodes.size:
                source = Size(nodes, self.tracer.note_equal) if nodes.size == axis.nodes.size else Size(nodes)
            elif axis is None and is_from_inputs(tensor):
                source = self._length
            is_told = size > 1 or (size == 1 and source is self._length)
            lengths.append(Number(size, {frozenset({source}): size}) if is_told else size)
        return lengths
