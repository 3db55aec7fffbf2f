"""Tracer: watches one forward pass operator by operator and hands each to the function that knows what it does to units."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsekit.graph.graph import Kind
from sparsekit.labels.call import Call, Handler, Outputs, user_line
from sparsekit.labels.joint import collapsed
from sparsekit.labels.store import Cause, LabelStore, Split
from sparsekit.labels.values import NO_UNIT, NOT_ZERO, Entry, IntArray, Joint, Labels, TensorLabels
from sparsekit.labels.views import written_over

__all__ = ["Tracer"]


_MOST_WORK = 300_000_000  # positions looked at in one pass: some ten seconds; a transformer of 7e9 parameters takes 5e7
_WORK_OF_A_CALL = 2_000  # positions that take as long as what is done for each call


class Tracer(TorchDispatchMode):
    """A dispatch mode that propagates labels. An operator without handler freezes the units that enter it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the dispatcher so that its first call imports the compiler, which takes seconds.
        return False

    def __init__(
        self, ledger: LabelStore, find_handler: Callable[[Any, str], Handler | None], creators: frozenset[str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.find_handler = find_handler
        self.creators = creators
        self.modules: list[str] = [""]
        self.watching = True
        self.work, self.most_work = 0, _MOST_WORK
        self._known: dict[int, TensorLabels] = {}
        self._alive: list[Tensor] = []  # ids and storages must not be reused while the trace runs
        self._viewed: set[int] = set()
        self._objects: dict[str, nn.Module] = {}
        self.used: set[int] = set()  # numbers of the state entries that some operator has met

    # ---- what handlers and rules use

    @property
    def module(self) -> str:
        """Qualified name of the innermost module that runs now."""
        return self.modules[-1]

    def labels(self, tensor: Tensor, *whole: int) -> TensorLabels:
        """Labels of a tensor. Joint labels are settled: one axis tells units apart from here on, the others are tied.

        Args:
            tensor: Any tensor of the trace.
            whole: Axes that are tied first; else the first axis is that of the units.
        """
        found = self.joint_labels(tensor)
        if found.joint is None:
            return found
        for dim in whole:
            found = self.tie(found, dim % tensor.dim())
        found = self.settle(found)
        self.set(tensor, found)
        return found

    def settle(self, labels: TensorLabels) -> TensorLabels:
        """Joint labels with all axes but the first tied."""
        while labels.joint is not None:
            labels = self.tie(labels, labels.joint.dims[-1])
        return labels

    def joint_labels(self, tensor: Tensor) -> TensorLabels:
        """Labels of a tensor, joint ones as they are."""
        found = self._known.get(id(tensor))
        return found if found is not None else TensorLabels((None,) * tensor.dim())

    def tie(self, labels: TensorLabels, dim: int) -> TensorLabels:
        """Make the positions of joint labels along one axis one unit, so that units differ along the other axes alone."""
        joint = labels.joint
        if joint is None or joint.nodes.shape[dim] == 1:
            return labels
        nodes, sources = joint.nodes.take([0], dim), joint.sources.take([0], dim)
        self.unite(np.broadcast_to(nodes, joint.nodes.shape).reshape(-1), joint.nodes.reshape(-1))
        agreed = (joint.sources == sources).all(axis=dim, keepdims=True)
        return collapsed(replace(labels, joint=Joint(nodes, np.where(agreed, sources, NOT_ZERO))))

    def split(self, nodes: IntArray) -> None:
        """Note that the module which runs now lays one axis of units over several, or several over one."""
        if nodes.ndim > 1 and (nodes < 0).any():
            self.freeze(nodes.reshape(-1), "reshaped together with values that belong to no unit")
        owner = self._objects.get(self.module)
        numbers = {} if owner is None else {name: value for name, value in vars(owner).items() if type(value) is int}
        self.ledger.splits.append(Split(nodes, self.module, numbers))

    def entry(self, tensor: Tensor) -> Entry | None:
        """The state entry that a tensor is or rearranges, if any."""
        return self.joint_labels(tensor).entry

    def set(self, tensor: Tensor, labels: TensorLabels | None) -> None:
        """Attach labels to a tensor."""
        if labels is None or (not labels.has_units and all(axis is None for axis in labels.axes)):
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

    def count(self, nodes: IntArray, module: str, attribute: str, *, needed: bool = True) -> None:
        """Note that an attribute of a layer counts these units, and that no parameter tells its value."""
        self.ledger.counts.append((nodes, module, attribute, needed))

    def count_groups(self, rows: IntArray) -> bool:
        """Note that units go by whole norm groups, (groups, channels each), and no scale tells how many there are.

        Returns:
            False if the running module is no group norm, whose attribute could be set.
        """
        if not isinstance(self._objects.get(self.module), nn.GroupNorm):
            return False
        self.count(rows[:, 0], self.module, "num_groups")
        self.count(rows.reshape(-1), self.module, "num_channels", needed=False)
        return True

    def contract(self, a: TensorLabels, a_dim: int, b: TensorLabels, b_dim: int) -> None:
        """Sum of products over an axis of `a` and an axis of `b`: the units on both are one, and are read here."""
        left, right = a.axes[a_dim], b.axes[b_dim]
        for mine, others, owner in ((left, right, a), (right, left, b)):
            if mine is not None and not mine.is_uniform and others is None:
                quiet = owner.entry is not None or owner.from_state
                self.freeze(mine, "multiplied with values that belong to no unit", quiet=quiet)
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
        entering = [self.joint_labels(tensor) for tensor in call.tensors]
        if self._exhausted(entering):
            return
        stacked = any(labels.parts is not None for labels in entering)
        units = any(labels.has_units for labels in entering)
        for each in entering:
            self.freeze(each.mixed, f"mixed over units before they are used by {call.name!r}")
        answer: Outputs
        if stacked and call.name not in ("select", "unbind", "view", "_unsafe_view", "slice"):
            call.freeze_inputs(f"stacked states of several layers used as a whole by {call.name!r}")
            answer = None
        elif handler is None:
            if units:
                call.freeze_inputs(f"operator {call.name!r} is not known to keep units apart")
                for each in map(self.labels, call.tensors):
                    if each.entry is not None and each.axes:
                        self.make(each, 0)  # a weight that is computed from parameters: their rows are what stays
            answer = None
        else:
            answer = handler(call)
        found = list(answer) if isinstance(answer, Sequence) else [answer] * len(call.outputs)
        if all(labels.entry is not None or labels.from_state for labels in entering):
            found = [None if labels is None else replace(labels, from_state=True) for labels in found]
        if not mutates:
            for tensor, labels in zip(call.outputs, found, strict=False):
                self.set(tensor, labels)
            return
        self._mutate(call, found[0] if found else None)

    def _exhausted(self, entering: Sequence[TensorLabels]) -> bool:
        """Count the work and give up on all units when there is too much of it, so that no model makes a trace hang."""
        self.work += _WORK_OF_A_CALL + sum(axis.size for labels in entering for axis in labels.axes if axis is not None)
        if self.work <= self.most_work:
            return False
        everything = np.arange(self.ledger.nodes, dtype=np.int64)
        self.freeze(
            everything, f"following units through {self.work:,} positions was given up here; the model has too many steps"
        )
        self.watching = False
        return True

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
        views = [other for other in self._alive if other.untyped_storage()._cdata == storage]
        shared = [other for other in views if id(other) in self._known]
        known = before is not None and after is not None and len(shared) == len(views)
        if known and after is not None and self._overwrite([*shared, tensor], tensor, after):
            return
        reason = f"written in place through a view by {call.name!r}"
        if after is not None and after.has_units:
            call.freeze_inputs(reason)
        for other in [*shared, tensor]:
            self.freeze(self._known.pop(id(other), None), reason)

    def _overwrite(self, tensors: list[Tensor], target: Tensor, after: TensorLabels) -> bool:
        """Label tensors on one memory after a write to one of them; False if that cannot be said exactly."""
        found: list[tuple[Tensor, TensorLabels]] = []
        pairs: list[tuple[IntArray, IntArray]] = []
        for tensor in {id(t): t for t in tensors}.values():
            labels = written_over(
                tensor, self.joint_labels(tensor), target, after, lambda a, b: pairs.append((a, b)), self.ledger.both
            )
            if labels is None:
                return False
            found.append((tensor, labels))
        for a, b in pairs:
            self.unite(a, b)
        for tensor, labels in found:
            self.set(tensor, labels)
        return True

    def _note_views(self, call: Call) -> None:
        for tensor in call.outputs:
            self._viewed.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)

    # ---- modules

    def follow(self, model: nn.Module) -> None:
        """Keep `self.modules` up to date while `model`, a private copy, runs."""
        for name, module in model.named_modules():
            self._objects[name] = module
            module.register_forward_pre_hook(lambda _m, _a, _name=name: self.modules.append(_name), prepend=True)
            module.register_forward_hook(lambda _m, _a, _o: self._leave(), always_call=True)

    def _leave(self) -> None:
        if len(self.modules) > 1:
            self.modules.pop()
