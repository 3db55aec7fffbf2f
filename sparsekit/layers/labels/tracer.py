"""Tracer: the labels of the tensors of one forward pass, and the words to describe what happens to units."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from sparsekit.graph.groups import Kind
from sparsekit.layers.labels.joint import collapsed
from sparsekit.layers.labels.source import user_line
from sparsekit.layers.labels.store import Cause, LabelStore, Split
from sparsekit.layers.labels.values import NO_UNIT, NOT_ZERO, Entry, IntArray, Joint, Labels, TensorLabels


class Tracer:
    """What a trace says about tensors: the words with which handlers and layer rules describe units."""

    def __init__(self, store: LabelStore, *, kept_norms: bool = False) -> None:
        self.store = store
        self.kept_norms = kept_norms  # norms are taken over kept units, so that units may leave them
        self.modules: list[str] = [""]
        self.watching = True
        self.numbers: dict[int, int] = {}  # id of the tensor of each state entry → number of the entry
        self.used: set[int] = set()  # numbers of the entries that some operator has met
        self.alive: list[Tensor] = []  # ids and storages must not be reused while the trace runs
        self._known: dict[int, TensorLabels] = {}
        self._objects: dict[str, nn.Module] = {}

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
        found = self.known(tensor)
        return found if found is not None else TensorLabels((None,) * tensor.dim())

    def known(self, tensor: Tensor) -> TensorLabels | None:
        """Labels of a tensor as they are, or None where nothing has been said of it."""
        return self._known.get(id(tensor))

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
            self.fix(nodes.reshape(-1), "reshaped together with values that belong to no unit")
        owner = self.running
        numbers = {} if owner is None else {name: value for name, value in vars(owner).items() if type(value) is int}
        self.store.splits.append(Split(nodes, self.module, numbers))

    def entry(self, tensor: Tensor) -> Entry | None:
        """The state entry that a tensor is or rearranges, if any."""
        return self.joint_labels(tensor).entry

    def set(self, tensor: Tensor, labels: TensorLabels | None) -> None:
        """Attach labels to a tensor."""
        if labels is None or (not labels.has_units and all(axis is None for axis in labels.axes)):
            self.forget(tensor)
            return
        if labels.parts is None and len(labels.axes) != tensor.dim():
            raise AssertionError(f"labels of {len(labels.axes)} axes for a tensor of {tensor.dim()}")
        if id(tensor) not in self._known:
            self.alive.append(tensor)
        self._known[id(tensor)] = labels

    def forget(self, tensor: Tensor) -> TensorLabels | None:
        """Take the labels of a tensor away and return them."""
        return self._known.pop(id(tensor), None)

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

    def fix(self, what: TensorLabels | Labels | IntArray | None, reason: str, *, quiet: bool = False) -> None:
        """Keep units whole."""
        if what is None:
            return
        nodes = what.all_nodes() if isinstance(what, TensorLabels) else what.nodes if isinstance(what, Labels) else what
        if nodes.size and (nodes >= 0).any():
            self.store.fix(nodes, self.cause(reason, quiet=quiet))

    def unite(self, a: IntArray, b: IntArray, *, quiet: bool = False) -> None:
        """Make two runs of nodes one unit, position by position; fix those that meet no unit.

        Args:
            a: A run of nodes.
            b: Another, of the same length.
            quiet: Meeting no unit is normal and needs no warning.
        """
        if a.shape != b.shape:
            self.fix(np.concatenate([a, b]), f"sizes {a.size} and {b.size} do not match")
            return
        lonely = (a == NO_UNIT) != (b == NO_UNIT)
        if lonely.any():
            self.fix(np.maximum(a, b)[lonely], "combined with values that belong to no unit", quiet=quiet)
        pairs = (a >= 0) & (b >= 0) & (a != b)
        if pairs.any():
            self.store.united.append((a[pairs], b[pairs]))

    def read(self, values: Labels, columns: IntArray | None) -> None:
        """Note a reader of units.

        Args:
            values: The units as they are read.
            columns: Nodes of the parameter axis that multiplies them; None if nothing of a parameter does, so that the
                values themselves must be zero where a unit is dropped.
        """
        cause = None
        if columns is None:
            cause = self.cause("read by an operator without weights although the values of dropped units are not zero")
        else:
            self.store.columns.append(columns[columns >= 0])
        where = values.nodes >= 0
        self.store.reads.append((values.nodes[where], values.sources[where], cause))

    def make(self, labels: TensorLabels, dim: int, kind: Kind | None = None) -> None:
        """Note that axis `dim` of a state entry makes units; nothing is noted for other tensors."""
        axis = labels.axes[dim]
        if labels.entry is not None and axis is not None:
            self.make_nodes(axis.nodes, kind)

    def make_nodes(self, nodes: IntArray, kind: Kind | None = None) -> None:
        """Note that these entry positions make the values of their units."""
        nodes = nodes[nodes >= 0]
        if nodes.size:
            self.store.made.append((nodes, self.module, kind))

    def count(self, nodes: IntArray, module: str, attribute: str) -> None:
        """Note that an attribute of a layer counts these units, and that no parameter tells its value."""
        self.store.counts.append((nodes, module, attribute))

    @property
    def running(self) -> nn.Module | None:
        """The innermost module that runs now."""
        return self._objects.get(self.module)

    def contract(self, a: TensorLabels, a_dim: int, b: TensorLabels, b_dim: int) -> None:
        """Sum of products over an axis of `a` and an axis of `b`: the units on both are one, and are read here."""
        left, right = a.axes[a_dim], b.axes[b_dim]
        for mine, others, owner in ((left, right, a), (right, left, b)):
            if mine is not None and not mine.is_uniform and others is None:
                quiet = owner.entry is not None or owner.from_state
                self.fix(mine, "multiplied with values that belong to no unit", quiet=quiet)
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

    def follow(self, model: nn.Module) -> None:
        """Keep `self.modules` up to date while `model`, a private copy, runs."""
        for name, module in model.named_modules():
            self._objects[name] = module
            module.register_forward_pre_hook(lambda _m, _a, _name=name: self.modules.append(_name), prepend=True)
            module.register_forward_hook(lambda _m, _a, _o: self._leave(), always_call=True)

    def _leave(self) -> None:
        if len(self.modules) > 1:
            self.modules.pop()
