"""Dispatcher: runs one forward pass, and passes each operator to the handler of its effect on units."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit._torch import DispatchMode, operator_schema, storage_id
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import Labels, TensorLabels, mark_results
from sparsekit.tracing.ops import MAKE_CONSTANTS, SAME_IN_TRAIN_MODE, find_handler
from sparsekit.tracing.ops.call import Call, Outputs, tensors_of
from sparsekit.tracing.ops.probe import probe
from sparsekit.tracing.passes import signature

_MOST_WORK = 300_000_000  # positions processed in one pass: about ten seconds; a transformer of 7e9 parameters needs 5e7
_WORK_OF_A_CALL = 2_000  # time of an operator call, in positions


class Dispatcher(DispatchMode):
    """A dispatch mode that propagates labels. An operator without a handler is probed; units that it mixes are unprunable."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self._work = 0
        self._viewed: set[int] = set()  # storages that have views

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((*args, *kwargs.values()))
        for tensor in given:
            self.tracer.meet(tensor)
        moved = self._moved_in_place(func, args, kwargs)
        result = func(*args, **kwargs)
        mark_results(tensors_of((result,)), given)
        if not self.tracer.watching:
            return result
        if moved is not None:
            self._propagate(replace(moved, outputs=tuple(given[:1])), mutates=False)
            return result
        schema = operator_schema(func)
        arguments = dict(zip(signature(func).names, args, strict=False)) | kwargs
        outputs = tuple(tensors_of((result,)))
        name = schema.name.split("::")[-1]
        mutates = schema.is_mutable
        call = Call(self.tracer, func, name.rstrip("_") if mutates else name, arguments, outputs)
        if func.is_view:
            self._note_views(call)
        if mutates or call.name in MAKE_CONSTANTS or any(self.tracer.known(tensor) is not None for tensor in call.tensors):
            self._propagate(call, mutates)
        return result

    def _moved_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return the call of `squeeze` for `squeeze_`, and so on: an operator that turns its own tensor into a view of it."""
        if torch.Tag.inplace_view not in func.tags or not self.tracer.watching or self.tracer.known(args[0]) is None:
            return None
        name, names = operator_schema(func).name.split("::")[-1].removesuffix("_"), signature(func).names
        packet = getattr(torch.ops.aten, name, None)
        overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
        returning = next((overload for overload in overloads if signature(overload).names == names), None)
        if returning is None:
            return None
        before = args[0].detach()  # keeps the present shape
        self.tracer.set(before, self.tracer.known(args[0]))
        arguments = dict(zip(names, (before, *args[1:]), strict=False)) | kwargs
        return Call(self.tracer, returning, name, arguments, ())

    def _propagate(self, call: Call, mutates: bool) -> None:
        key, decides = self._key(call)
        before = None if key is None or key not in self.tracer.answers else self.tracer.answers[key][1]
        if before is not None and decides:
            self._attach(call, before, mutates)
            return
        entering = [self.tracer.known(tensor) for tensor in call.tensors]
        found = self._ask(call)
        if found is None:
            return
        if before is not None and len(found) == len(before) and all(map(_are_same, found, before)):
            found = before  # the same objects, which keys of later calls refer to
        elif key is not None:
            self.tracer.answers[key] = entering, found
        self._attach(call, found, mutates)

    def _key(self, call: Call) -> tuple[tuple[Any, ...] | None, bool]:
        """Return a cache key of a call, and whether it decides the answer of the handler, unlike values, such as an index."""
        key: list[Any] = [call.func, self.tracer.module, self.tracer.given.key]
        decides = True
        for name, value in call.arguments.items():
            if isinstance(value, Tensor):
                labels = self.tracer.known(value)
                decides &= labels is not None or value.is_floating_point()
                key.append((name, id(labels), value.shape))
            elif isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
                known = [self.tracer.known(item) if isinstance(item, Tensor) else None for item in value]
                decides &= None not in known
                key.append(
                    (name, tuple((id(each), getattr(item, "shape", item)) for each, item in zip(known, value, strict=True)))
                )
            elif call.name not in SAME_IN_TRAIN_MODE:
                key.append((name, tuple(value) if isinstance(value, list) else value))
        try:
            hash(found := tuple(key))
        except TypeError:
            return None, False
        return found, decides

    def _ask(self, call: Call) -> list[TensorLabels | None] | None:
        """Return the labels of the outputs; None if labels were given up because of too much work."""
        handler = find_handler(call.func, call.name)
        entering = [self.tracer.joint_labels(tensor) for tensor in call.tensors]
        if self._exhausted(entering):
            return None
        stacked = any(labels.parts is not None for labels in entering)
        units = any(labels.has_units for labels in entering)
        for each in entering:
            self.tracer.fix(each.mixed, f"mixed over units before they are used by {call.name!r}")
        answer: Outputs
        if stacked and call.name not in ("select", "unbind", "slice"):
            call.fix_inputs(f"stacked states of several layers used as a whole by {call.name!r}")
            answer = None
        elif handler is None:
            answer = None
            if units and (call.outputs or signature(call.func).written):  # else it is a check, which returns nothing
                for each in map(self.tracer.labels, call.tensors):
                    if each.entry is not None and each.axes:
                        self.tracer.make(each, 0)  # rows of a parameter from which a weight is computed
                answer = probe(call, f"operator {call.name!r} is not known to keep units apart")
        else:
            try:
                answer = handler(call)
            except Exception as error:  # noqa: BLE001 - arguments that the handler does not support
                call.fix_inputs(f"operator {call.name!r} is used in a way that is not known ({type(error).__name__}: {error})")
                answer = None
        found = list(answer) if isinstance(answer, Sequence) else [answer] * len(call.outputs)
        if all(labels.entry is not None or labels.from_state for labels in entering):
            found = [None if labels is None else replace(labels, from_state=True) for labels in found]
        return found

    def _attach(self, call: Call, found: Sequence[TensorLabels | None], mutates: bool) -> None:
        for tensor, labels in zip(call.outputs, found, strict=False):
            if not mutates or not any(tensor is given for given in call.tensors):
                self.tracer.set(tensor, labels)
        if mutates:
            self._mutate(call, found[0] if found else None)

    def _exhausted(self, entering: Sequence[TensorLabels]) -> bool:
        """Count the work. If there is too much, make all units unprunable, so that every trace ends."""
        self._work += _WORK_OF_A_CALL + sum(axis.size for labels in entering for axis in labels.axes if axis is not None)
        if self._work > _MOST_WORK:
            reason = f"following units through {self._work:,} positions was given up here; the model has too many steps"
            self.tracer.fix(np.arange(self.tracer.nodes, dtype=np.int64), reason)
            self.tracer.watching = False
        return self._work > _MOST_WORK

    def _mutate(self, call: Call, after: TensorLabels | None) -> None:
        names, changed, *_ = signature(call.func)
        written = [call.arguments[name] for name in names if name in changed and name in call.arguments]
        for tensor in written:
            if not isinstance(tensor, Tensor):
                call.fix_inputs(f"operator {call.name!r} writes into several tensors")
                return
            before = self.tracer.known(tensor)
            if after is not None and len(after.axes) != tensor.dim():  # its handler saw the new shape
                call.fix_inputs(f"the shape of a tensor is changed in place by {call.name!r}")
                after = None
            if before is not None and before.entry is not None and before.entry.constants and after is not None:
                self._write_constant(tensor, before, self.tracer.settle(after))
            elif before is not None and before.entry is not None:
                call.fix_inputs(f"the model's state is overwritten in place by {call.name!r}")
            elif len(written) > 1 or storage_id(tensor) in self._viewed:
                self._mutate_viewed(call, tensor, before, after)
            else:
                self.tracer.set(tensor, None if after is None else after.computed())

    def _write_constant(self, tensor: Tensor, before: TensorLabels, after: TensorLabels) -> None:
        """Label a tensor outside the state, such as scratch memory, with the units that are written to it."""
        for own, new in zip(before.axes, after.units, strict=True):
            if own is not None and new is not None:
                self.tracer.unite(own.nodes, new.nodes)
        storage = storage_id(tensor)
        for other in [other for other in self.tracer.alive if storage_id(other) == storage]:
            known = self.tracer.known(other)
            self.tracer.set(other, None if known is None else known.computed())
        if tensor.nbytes == tensor.untyped_storage().nbytes():
            self.tracer.set(tensor, after.computed())

    def _mutate_viewed(self, call: Call, tensor: Tensor, before: TensorLabels | None, after: TensorLabels | None) -> None:
        # The other tensors on this memory change too. That is harmless only if the labels say nothing new.
        after = None if after is None else self.tracer.settle(after)
        if before is not None and before.same(after) and not any(axis is not None and axis.is_uniform for axis in before.axes):
            return
        storage = storage_id(tensor)
        views = [other for other in self.tracer.alive if storage_id(other) == storage]
        shared = [other for other in views if self.tracer.known(other) is not None]
        known = before is not None and after is not None and len(shared) == len(views)
        reason = f"written in place through a view by {call.name!r}"
        if known and after is not None:
            found = {other: _written_over(self.tracer, other, tensor, after, reason) for other in (*shared, tensor)}
            if all(found.values()):
                for other, labels in found.items():
                    self.tracer.set(other, labels)
                return
        if after is not None and after.has_units:
            call.fix_inputs(reason)
        for other in [*shared, tensor]:
            self.tracer.fix(self.tracer.forget(other), reason)

    def _note_views(self, call: Call) -> None:
        for tensor in call.outputs:
            self._viewed.add(storage_id(tensor))
            self.tracer.alive.append(tensor)


def _are_same(own: TensorLabels | None, other: TensorLabels | None) -> bool:
    if own is None or other is None:
        return own is other
    numbers = [[axis and axis.numbers for axis in labels.axes] for labels in (own, other)]
    return (
        own.same(other)
        and own.entry is other.entry
        and own.mixed is other.mixed
        and own.from_state == other.from_state
        and numbers[0] == numbers[1]
    )


def _written_over(tracer: Tracer, tensor: Tensor, target: Tensor, written: TensorLabels, reason: str) -> TensorLabels | None:
    """Return the labels of a tensor after values with labels `written` were written to `target`, a view of the same memory.

    Units at equal positions become one. Units along an axis of ordinary values, such as part of a key, become unprunable for
    `reason`; units along other axes, such as heads, do not. None if ordinary values were written over units.
    """
    before = tracer.joint_labels(tensor)
    if before.parts or before.joint or before.entry or written.parts or written.joint:
        return None
    axes: list[Labels | None] = [None] * tensor.dim()
    for k, labels in enumerate(written.axes):
        if labels is None:
            continue
        d = _same_axis(tensor, target, k)
        own = before.axes[d] if d is not None else None
        if d is None or own is None:
            if not labels.is_uniform:  # constants change nothing on axes without units
                tracer.fix(labels, reason)
            continue
        if own.is_uniform and labels.is_uniform:
            continue  # two constants together are not constant
        if not own.is_uniform and not labels.is_uniform:
            tracer.unite(own.nodes, labels.nodes)
        axes[d] = Labels(labels.nodes if own.is_uniform else own.nodes, tracer.both(own.sources, labels.sources))
    lost = any(own is not None and new is None for own, new in zip(before.units, axes, strict=True))
    return None if lost else TensorLabels(tuple(axes))


def _same_axis(tensor: Tensor, target: Tensor, k: int) -> int | None:
    """Return the axis of `tensor` with the same positions as axis `k` of `target`."""
    size, stride = target.shape[k], target.stride(k)
    found = [d for d in range(tensor.dim()) if tensor.shape[d] == size and tensor.stride(d) == stride]
    if len(found) != 1 or stride == 0 or size < 2:
        return None
    # In a layout without overlap, an address determines the position along an axis.
    for owner, axis in ((tensor, found[0]), (target, k)):
        others = [(owner.shape[d], owner.stride(d)) for d in range(owner.dim()) if d != axis and owner.shape[d] > 1]
        inner = sum((n - 1) * s for n, s in others if s < stride)
        if inner >= stride or any(s % (size * stride) for _, s in others if s >= stride):
            return None
    apart = abs(int(target.storage_offset()) - int(tensor.storage_offset()))
    return found[0] if apart // stride % size == 0 else None
