"""Tracer: watches one forward pass operator by operator and hands each to the function that knows what it does to units."""

from __future__ import annotations

import linecache
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsekit.units.graph import Kind
from sparsekit.units.labels import NO_UNIT, Cause, Entry, IntArray, Labels, Ledger, TensorLabels

__all__ = ["Call", "Handler", "Outputs", "Tracer", "user_line"]

Outputs: TypeAlias = TensorLabels | Sequence[TensorLabels | None] | None

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))


def user_line(frames: Sequence[tuple[str, int]]) -> str:
    """` at file.py:12 ("code")` for the innermost frame outside torch and this package, or an empty string.

    Args:
        frames: (file name, line number), innermost first.
    """
    for filename, line in frames:
        if not filename.startswith(_LIBRARIES) and not filename.startswith("<"):
            code = textwrap.shorten(linecache.getline(filename, line), 80, placeholder=" …")
            return f" at {os.path.basename(filename)}:{line}" + (f" ({code})" if code else "")
    return ""


@dataclass(frozen=True, eq=False)
class Call:
    """One operator call as seen by its handler.

    Args:
        tracer: The trace.
        func: The operator.
        name: Its base name without the trailing underscore of in-place forms: `add` for `aten::add_.Tensor`.
        arguments: Arguments by their schema names.
        outputs: The tensors that it returned, in order.
    """

    tracer: Tracer
    func: Any
    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument by schema name."""
        value = self.arguments.get(name, default)
        return default if value is None else value

    def labels(self, name: str) -> TensorLabels | None:
        """Labels of a tensor argument; an unlabelled tensor has an ordinary axis everywhere."""
        value = self.arguments.get(name)
        return self.tracer.labels(value) if isinstance(value, Tensor) else None

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensor arguments, those in lists included."""
        return [leaf for leaf in tree_leaves(tuple(self.arguments.values())) if isinstance(leaf, Tensor)]

    def freeze_inputs(self, reason: str, *, quiet: bool = False) -> None:
        """Keep whole every unit that enters the call."""
        for tensor in self.tensors:
            self.tracer.freeze(self.tracer.labels(tensor), reason, quiet=quiet)


Handler: TypeAlias = Callable[[Call], Outputs]


class Tracer(TorchDispatchMode):
    """A dispatch mode that propagates labels. An operator without handler freezes the units that enter it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the dispatcher so that its first call imports the compiler, which takes seconds.
        return False

    def __init__(self, ledger: Ledger, find_handler: Callable[[Any, str], Handler | None], creators: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.find_handler = find_handler
        self.creators = creators
        self.modules: list[str] = [""]
        self.watching = True
        self._known: dict[int, TensorLabels] = {}
        self._alive: list[Tensor] = []  # ids and storages must not be reused while the trace runs
        self._viewed: set[int] = set()
        self.used: set[int] = set()  # numbers of the state entries that some operator has met

    # ---- what handlers and rules use

    @property
    def module(self) -> str:
        """Qualified name of the innermost module that runs now."""
        return self.modules[-1]

    def labels(self, tensor: Tensor) -> TensorLabels:
        """Labels of a tensor."""
        found = self._known.get(id(tensor))
        return found if found is not None else TensorLabels((None,) * tensor.dim())

    def entry(self, tensor: Tensor) -> Entry | None:
        """The state entry that a tensor is or rearranges, if any."""
        return self.labels(tensor).entry

    def set(self, tensor: Tensor, labels: TensorLabels | None) -> None:
        """Attach labels to a tensor."""
        if labels is None or (labels.parts is None and all(axis is None for axis in labels.axes)):
            self._known.pop(id(tensor), None)
            return
        if labels.parts is None and len(labels.axes) != tensor.dim():
            raise AssertionError(f"labels of {len(labels.axes)} axes for a tensor of {tensor.dim()}")
        if id(tensor) not in self._known:
            self._alive.append(tensor)
        self._known[id(tensor)] = labels

    def cause(self, reason: str, *, quiet: bool = False) -> Cause:
        """Why units stay whole, with the user's own source line."""
        if quiet:
            return Cause(self.module, reason, True)
        frames: list[tuple[str, int]] = []
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "run_traced":
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return Cause(self.module, reason + user_line(frames), False)

    def freeze(self, what: TensorLabels | Labels | IntArray | None, reason: str, *, quiet: bool = False) -> None:
        """Keep units whole."""
        if what is None:
            return
        nodes = what.all_nodes() if isinstance(what, TensorLabels) else what.nodes if isinstance(what, Labels) else what
        if nodes.size and (nodes >= 0).any():
            self.ledger.freeze(nodes, self.cause(reason, quiet=quiet))

    def unite(self, a: IntArray, b: IntArray) -> None:
        """Make two runs of nodes one unit, position by position."""
        if a.shape != b.shape:
            self.freeze(np.concatenate([a, b]), f"sizes {a.size} and {b.size} do not match")
            return
        lonely = bool(((a == NO_UNIT) != (b == NO_UNIT)).any())
        self.ledger.unite(a, b, self.cause("combined with values that belong to no unit", quiet=not lonely))

    def read(self, values: Labels, columns: IntArray | None) -> None:
        """Note a reader of units; `columns` are the nodes of the parameter axis that multiplies them, if there is one."""
        reason = "read by an operator without weights although the values of dropped units are not zero"
        self.ledger.read(values, columns, self.cause(reason) if columns is None else None)

    def make(self, labels: TensorLabels, dim: int, kind: Kind | None = None) -> None:
        """Note that axis `dim` of a state entry makes units; nothing is noted for other tensors."""
        axis = labels.axes[dim]
        if labels.entry is not None and axis is not None:
            self.ledger.make(axis.nodes, self.module, kind)

    def contract(self, a: TensorLabels, a_dim: int, b: TensorLabels, b_dim: int) -> None:
        """Sum of products over an axis of `a` and an axis of `b`: the units on both are one, and are read here."""
        left, right = a.axes[a_dim], b.axes[b_dim]
        for mine, others, owner in ((left, right, a), (right, left, b)):
            if mine is not None and not mine.is_uniform and others is None:
                self.freeze(mine, "multiplied with values that belong to no unit", quiet=owner.entry is not None)
        if left is None or right is None:
            return
        if left.is_uniform or right.is_uniform:
            for labels in (left, right):
                if not labels.is_uniform:
                    self.read(labels, None)
            return
        self.unite(left.nodes, right.nodes)
        for values, weights, owner in ((left, right, b), (right, left, a)):
            if owner.entry is not None and owner.entry.is_parameter:
                self.read(values, weights.nodes)
                return
        # No parameter of its own multiplies the units, so their values themselves must be zero.
        sources = (
            np.where(right.sources != 0, right.sources, left.sources)
            if b.entry is not None
            else np.where(left.sources != 0, left.sources, right.sources)
        )
        self.read(Labels(left.nodes, sources), None)

    # ---- the mode itself

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.watching:
            return result
        schema = func._schema
        arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        name = schema.name.split("::")[-1]
        mutates = schema.is_mutable
        call = Call(self, func, name.rstrip("_") if mutates else name, arguments, outputs)
        if func.is_view:
            self._note_views(call)
        if mutates or call.name in self.creators or any(id(tensor) in self._known for tensor in call.tensors):
            self._propagate(call, mutates)
        return result

    def _propagate(self, call: Call, mutates: bool) -> None:
        self.used |= {entry.number for tensor in call.tensors if (entry := self.entry(tensor)) is not None}
        handler = self.find_handler(call.func, call.name)
        stacked = any(self.labels(tensor).parts is not None for tensor in call.tensors)
        units = any(self.labels(tensor).has_units for tensor in call.tensors)
        answer: Outputs
        if stacked and call.name not in ("select", "unbind"):
            call.freeze_inputs(f"stacked states of several layers used as a whole by {call.name!r}")
            answer = None
        elif handler is None:
            if units:
                call.freeze_inputs(f"operator {call.name!r} is not known to keep units apart")
                for entering in map(self.labels, call.tensors):
                    if entering.entry is not None and entering.axes:
                        self.make(entering, 0)  # a weight that is computed from parameters: their rows are what stays
            answer = None
        else:
            answer = handler(call)
        found = list(answer) if isinstance(answer, Sequence) else [answer] * len(call.outputs)
        if not mutates:
            for tensor, labels in zip(call.outputs, found, strict=False):
                self.set(tensor, labels)
            return
        self._mutate(call, found[0] if found else None)

    def _mutate(self, call: Call, after: TensorLabels | None) -> None:
        written = [
            call.arguments[argument.name]
            for argument in call.func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in call.arguments
        ]
        for tensor in written:
            if not isinstance(tensor, Tensor):
                call.freeze_inputs(f"operator {call.name!r} writes into several tensors")
                return
            before = self._known.get(id(tensor))
            if before is not None and before.entry is not None:
                call.freeze_inputs(f"the model's state is overwritten in place by {call.name!r}")
            elif len(written) > 1 or tensor.untyped_storage()._cdata in self._viewed:
                self._mutate_viewed(call, tensor, before, after)
            else:
                self.set(tensor, None if after is None else after.computed())

    def _mutate_viewed(self, call: Call, tensor: Tensor, before: TensorLabels | None, after: TensorLabels | None) -> None:
        # The other tensors on this memory change too. That is harmless only if the labels say nothing new.
        if before is not None and before.same(after) and not any(axis is not None and axis.is_uniform for axis in before.axes):
            return
        storage = tensor.untyped_storage()._cdata
        shared = [other for other in self._alive if other.untyped_storage()._cdata == storage and id(other) in self._known]
        reason = f"written in place through a view by {call.name!r}"
        if after is not None and after.has_units:
            call.freeze_inputs(reason)
        for other in [*shared, tensor]:
            self.freeze(self._known.pop(id(other), None), reason)

    def _note_views(self, call: Call) -> None:
        for tensor in call.outputs:
            self._viewed.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)

    # ---- modules

    def follow(self, model: nn.Module) -> None:
        """Keep `self.modules` up to date while `model`, a private copy, runs."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _m, _a, _name=name: self.modules.append(_name), prepend=True)
            module.register_forward_hook(lambda _m, _a, _o: self._leave(), always_call=True)

    def _leave(self) -> None:
        if len(self.modules) > 1:
            self.modules.pop()
