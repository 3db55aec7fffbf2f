"""Tracer: collects facts about units during a trace. Handlers and layer rules record them through its methods."""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from sparsekit._torch import modules_of
from sparsekit.graph.groups import Constant, Kind, Refusal
from sparsekit.graph.held import Path
from sparsekit.labels.facts import OUTPUT, Borrow, Cause, Compare, Count, Fact, Keep, Make, Merge, Read, user_line
from sparsekit.labels.numbers import Given, Held, Number, Size, Source, parts_of
from sparsekit.labels.values import ALWAYS_ZERO, NO_UNIT, NOT_ZERO, Entry, IntArray, Labels, TensorLabels, mark_inputs


class Tracer:
    """Collects labels of tensors, and facts about units, in some passes of a model. All methods are vectorized over units.

    `kept_norms`: norms are computed over kept units, so that units that they average over are prunable.
    """

    def __init__(self, *, kept_norms: bool = False) -> None:
        self.kept_norms = kept_norms
        self.nodes = 0  # number of nodes
        self.entries: list[Entry] = []  # parameters, buffers and constants, in the order of the state
        self.facts: list[Fact] = []
        self.held: dict[str, list[Held]] = {}  # by module
        self.read_from: set[Source] = set()  # where the integers are from that code compares or passes to an operator
        self.given = Given()
        self.used: set[int] = set()  # numbers of the entries that some operator has used
        self.decisions: dict[tuple[str, int], set[Any]] = {}  # line that branches on inputs → outcomes, or numbers of tensors
        # Call → (labels of its inputs, labels of its outputs), for another pass over the code.
        self.answers: dict[tuple[Any, ...], tuple[Any, list[TensorLabels | None]]] = {}
        # Cache: how rearranging operators, such as `permute`, move positions, for later calls on the same shapes.
        self.rearranged: dict[Any, list[IntArray]] = {}
        self._entry_labels: list[TensorLabels] = []  # by number of the entry, the same objects in every pass
        self._constants: dict[tuple[Any, ...], Entry] = {}
        self._whole: set[int] = set()  # nodes of unprunable units
        self._starts: list[int] = []  # the first node of each entry
        # By number of the source: the (entry number, axis) pairs that must all be gated for a value to be zero.
        self.sources: list[frozenset[tuple[int, int]]] = [frozenset(), frozenset()]
        self._source_ids: dict[frozenset[tuple[int, int]], int] = {frozenset(): ALWAYS_ZERO}
        self._model = nn.Module()
        self.begin({})

    def begin(self, tensors: Mapping[str, Tensor], constants: Iterable[tuple[Constant, Tensor]] = ()) -> None:
        """Begin a pass with a state. Other tensors that modules hold get nodes when an operator uses them."""
        self.modules: list[str] = [""]
        self.watching = True  # False while an opaque layer runs, whose rule describes its operators
        self.alive: list[Tensor] = []  # ids and storages must not be reused while the pass runs
        self._known: dict[int, TensorLabels] = {}
        self.numbers: dict[int, int] = {}  # id of the tensor of each state entry → number of the entry
        self._waiting: dict[int, tuple[Tensor, list[Constant]]] = {}  # by id
        for constant, tensor in constants:
            self._waiting.setdefault(id(tensor), (tensor, []))[1].append(constant)
        for entry in self.entries:
            if not entry.constants:
                tensor = tensors[entry.names[0]]
                self.numbers[id(tensor)] = entry.number
                self.set(tensor, self._entry_labels[entry.number])

    def end(self) -> None:
        """Release the tensors of the last pass, which hooks on its model would otherwise keep alive."""
        self.alive, self._known, self.numbers, self._waiting, self._model = [], {}, {}, {}, nn.Module()
        self.rearranged.clear()
        self.answers.clear()

    def follow(self, model: nn.Module) -> None:
        """Keep `modules` up to date while `model`, a private copy, runs."""
        self._model = model
        model.register_forward_pre_hook(lambda _m, args, kwargs: mark_inputs(args, kwargs), with_kwargs=True)
        for name, module in modules_of(model):
            module.register_forward_pre_hook(lambda _m, _a, _name=name: self.modules.append(_name), prepend=True)
            module.register_forward_hook(lambda _m, _a, _o: self._leave(), always_call=True)

    def _leave(self) -> None:
        if len(self.modules) > 1:
            self.modules.pop()

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Inside the context, trace no operators: the caller describes their results."""
        before, self.watching = self.watching, False
        try:
            yield
        finally:
            self.watching = before

    def note_compared(self, sources: Iterable[Source]) -> None:
        """Note the origin of integers that the code of the running module has compared, rounded or converted."""
        self.facts.append(Compare(self.module, found := frozenset(sources)))
        self.read_from |= found

    def note_equal(self, nodes: IntArray, held: frozenset[Held]) -> None:
        """Note that the model compared integers with the length of an axis and found them equal."""
        self.facts.append(Count(nodes, (held,)))
        self.read_from |= held

    @property
    def module(self) -> str:
        """Qualified name of the innermost running module."""
        return self.modules[-1]

    @property
    def running(self) -> nn.Module:
        """The innermost running module."""
        return self._model.get_submodule(self.module)

    def labels(self, tensor: Tensor, *whole: int) -> TensorLabels:
        """Return the labels of a tensor. Joint labels are reduced to one axis of units, the first one not in `whole`."""
        found = self.joint_labels(tensor)
        if found.joint is None:
            return found
        for dim in whole:
            found = self.tie(found, dim % tensor.dim())
        found = self.settle(found)
        self.set(tensor, found)
        return found

    def settle(self, labels: TensorLabels) -> TensorLabels:
        """Return joint labels with all axes but the first tied."""
        while labels.joint is not None:
            labels = self.tie(labels, labels.joint.dims[-1])
        return labels

    def joint_labels(self, tensor: Tensor) -> TensorLabels:
        """Return the labels of a tensor, with joint labels unchanged."""
        found = self.known(tensor)
        return found if found is not None else TensorLabels((None,) * tensor.dim())

    def known(self, tensor: Tensor) -> TensorLabels | None:
        """Return the labels of a tensor; None if it has none."""
        return self._known.get(id(tensor))

    def entry(self, tensor: Tensor) -> Entry | None:
        """Return the state entry that a tensor is or rearranges; None without one."""
        return self.joint_labels(tensor).entry

    def set(self, tensor: Tensor, labels: TensorLabels | None) -> None:
        if labels is None or (not labels.has_units and all(axis is None for axis in labels.axes)):
            self.forget(tensor)
            return
        if labels.parts is None and len(labels.axes) != tensor.dim():
            raise AssertionError(f"labels of {len(labels.axes)} axes for a tensor of {tensor.dim()}")
        if id(tensor) not in self._known:
            self.alive.append(tensor)
        self._known[id(tensor)] = labels

    def forget(self, tensor: Tensor) -> TensorLabels | None:
        """Remove and return the labels of a tensor."""
        return self._known.pop(id(tensor), None)

    def meet(self, tensor: Tensor) -> None:
        """Record that an operator uses a tensor."""
        if id(tensor) in self._waiting:
            _, places = self._waiting.pop(id(tensor))
            names = tuple(constant.name for constant in places)
            key = (names, tensor.shape)
            entry = self._constants.get(key) or self.add_entry(names, tensor.shape, is_parameter=False, constants=places)
            self._constants[key] = entry
            self.numbers[id(tensor)] = entry.number
            self.set(tensor, self._entry_labels[entry.number])
        if id(tensor) in self.numbers:
            self.used.add(self.numbers[id(tensor)])

    def add_entry(
        self, names: Sequence[str], shape: Sequence[int], *, is_parameter: bool, constants: Sequence[Constant] = ()
    ) -> Entry:
        """Add an entry, with a new node for every position of each axis longer than 1."""
        number, axes = len(self.entries), list[Labels | None]()
        self._starts.append(self.nodes)
        for dim, size in enumerate(shape):
            source = self.source({(number, dim)}) if is_parameter else NOT_ZERO
            nodes = np.arange(self.nodes, self.nodes + size, dtype=np.int64)
            axes.append(Labels(nodes, np.full(size, source, dtype=np.int64)) if size > 1 else None)
            self.nodes += size if size > 1 else 0
        first = tuple(None if axis is None else int(axis.nodes[0]) for axis in axes)
        entry = Entry(tuple(names), tuple(shape), is_parameter, number, first, tuple(constants))
        self.entries.append(entry)
        self._entry_labels.append(TensorLabels(tuple(axes), entry))
        return entry

    def is_fixed(self, labels: Labels) -> bool:
        """Return whether all positions of an axis were made unprunable."""
        return self._whole.issuperset(labels.nodes[labels.nodes >= 0].tolist())

    def is_constant(self, labels: Labels) -> bool:
        """Return whether the units of an axis come from buffers and constants, which do not define units."""
        met = labels.nodes[labels.nodes >= 0]
        return bool(met.size) and not self.entries[bisect_right(self._starts, int(met[0])) - 1].is_parameter

    def source(self, gated: AbstractSet[tuple[int, int]]) -> int:
        """Return the index in `sources` of a set of (entry number, axis) pairs, added if it is new."""
        key = frozenset(gated)
        number = self._source_ids.setdefault(key, len(self.sources))
        if number == len(self.sources):
            self.sources.append(key)
        return number

    def both(self, a: IntArray, b: IntArray) -> IntArray:
        """Return sources of a value that is zero where both `a` and `b` are zero."""
        out = np.full(a.shape[0], NOT_ZERO, dtype=np.int64)
        for x, y in set(zip(a.tolist(), b.tolist(), strict=True)):
            if x != NOT_ZERO and y != NOT_ZERO:
                out[(a == x) & (b == y)] = self.source(self.sources[x] | self.sources[y])
        return out

    def unite(self, a: IntArray, b: IntArray, *, quiet: bool = False) -> None:
        """Unite two arrays of nodes position by position; positions without a partner become unprunable."""
        if a.shape != b.shape:
            self.fix(np.concatenate([a, b]), f"sizes {a.size} and {b.size} do not match")
            return
        lonely = (a == NO_UNIT) != (b == NO_UNIT)
        if lonely.any():
            self.fix(np.maximum(a, b)[lonely], "combined with values that belong to no unit", quiet=quiet)
        pairs = (a >= 0) & (b >= 0) & (a != b)
        if pairs.any():
            self.facts.append(Merge(a[pairs], b[pairs]))

    def unite_rows(self, rows: IntArray) -> None:
        """Make each column of a matrix of nodes one unit."""
        for row in rows[1:]:
            self.unite(rows[0], row)

    def tie(self, labels: TensorLabels, dim: int) -> TensorLabels:
        """Make the positions of joint labels along one axis one unit."""
        joint = labels.joint
        if joint is None or joint.nodes.shape[dim] == 1:
            return labels
        nodes, sources = joint.nodes.take([0], dim), joint.sources.take([0], dim)
        self.unite(np.broadcast_to(nodes, joint.nodes.shape).reshape(-1), joint.nodes.reshape(-1))
        agreed = (joint.sources == sources).all(axis=dim, keepdims=True)
        return replace(labels, joint=Labels(nodes, np.where(agreed, sources, NOT_ZERO))).collapsed()

    def fix(
        self,
        what: TensorLabels | Labels | IntArray | Iterable[TensorLabels | Labels | None] | None,
        reason: str | Cause,
        *,
        quiet: bool = False,
        averaged: bool = False,
    ) -> None:
        """Make units unprunable. `quiet` and `averaged` set the kinds "expected" and "average".

        A reason that is not a `Cause` gets the line of the user's code.
        """
        if what is None:
            return
        if not isinstance(what, TensorLabels | Labels | np.ndarray):
            for labels in what:
                self.fix(labels, reason, quiet=quiet, averaged=averaged)
            return
        nodes = what.all_nodes() if isinstance(what, TensorLabels) else what.nodes if isinstance(what, Labels) else what
        nodes = nodes[nodes >= 0]
        if nodes.size:
            self._whole.update(nodes.tolist())
            kind: Refusal = "expected" if quiet else "average" if averaged else "operator"
            self.facts.append(Keep(nodes, self.cause(reason, kind) if isinstance(reason, str) else reason))

    def cause(self, reason: str, kind: Refusal = "operator", remedy: str = "") -> Cause:
        """Return a cause that makes units unprunable, with the line of the user's code."""
        if kind == "expected":
            return Cause(self.module, reason, kind)
        if kind == "average" and not self.kept_norms:
            remedy = "prune_hidden_size=True averages over the kept units instead"
        frames: list[tuple[str, int]] = []
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "run_traced":
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return Cause(self.module, reason, kind, user_line(frames), remedy)

    def scaled(
        self,
        channel: Labels | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *statistics: Tensor | None,
        dim: int = 0,
        quiet: bool = False,
    ) -> Labels | None:
        """Unite units with scale, shift and statistics along axis `dim` of each; return the units of the result.

        They are zero where scale and shift are gated; None if they are not units.
        """
        scales = [self.labels(tensor) for tensor in (weight, bias) if tensor is not None]
        own = [*scales, *(self.labels(tensor) for tensor in statistics if tensor is not None)]
        if channel is None:
            for labels in own:
                self.fix(labels, "follows values that belong to no unit", quiet=labels.entry is not None)
            return None
        sources = np.full(channel.size, NOT_ZERO if weight is None else ALWAYS_ZERO, dtype=np.int64)
        for labels in own:
            axis = labels.axes[dim]
            if axis is None:
                self.fix(channel, "normalized with values that belong to no unit")
                return None
            self.unite(channel.nodes, axis.nodes, quiet=quiet)
            self.make(labels, dim)
            if labels in scales:
                sources = self.both(sources, axis.sources)
        return Labels(channel.nodes, sources)

    def make(self, labels: TensorLabels, dim: int, kind: Kind | None = None) -> None:
        """Record that axis `dim` of a state entry produces units. Other tensors are ignored."""
        axis = labels.axes[dim]
        if labels.entry is not None and axis is not None:
            self.make_nodes(axis.nodes, kind)

    def make_nodes(self, nodes: IntArray, kind: Kind | None = None) -> None:
        nodes = nodes[nodes >= 0]
        if nodes.size:
            self.facts.append(Make(nodes, kind))

    def read(self, values: Labels, columns: IntArray | None) -> None:
        """Record that an operator consumes the values of units.

        `columns`: nodes of the parameter axis that multiplies them; None if no parameter does, so that the values themselves
        must be zero where a unit is dropped.
        """
        by: IntArray | Cause
        if columns is None:
            by = self.cause("read by an operator without weights although the values of dropped units are not zero")
        else:
            by = columns[columns >= 0]
        where = values.nodes >= 0
        self.facts.append(Read(values.nodes[where], values.sources[where], by))

    def contract(self, a: TensorLabels, a_dim: int, b: TensorLabels, b_dim: int) -> None:
        """Record a sum of products over an axis of `a` and an axis of `b`, whose units are united and consumed."""
        left, right = a.axes[a_dim], b.axes[b_dim]
        for mine, others, owner in ((left, right, a), (right, left, b)):
            if mine is not None and not mine.is_uniform and others is None:
                cause = self.cause("multiplied with values that belong to no unit")
                quiet = owner.entry is not None or owner.from_state
                self.fix(mine, replace(cause, kind="expected") if quiet else cause)
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
        # No parameter multiplies the units, so their values themselves must be zero.
        first, second = (right, left) if b.entry is not None else (left, right)
        self.read(Labels(left.nodes, np.where(first.sources != NOT_ZERO, first.sources, second.sources)), None)

    def sized(self, nodes: IntArray, lengths: Sequence[int], dims: Sequence[int] = (), rank: int = 0) -> None:
        """Record the lengths of axes of units, in the dense model, that the current call was given, or computes.

        `nodes` has an axis for each of `lengths`; several if one axis of units was reshaped to them. If the call was given its
        shape, they are the axes `dims` of a result with `rank` axes.
        """
        if (nodes < 0).any():
            if nodes.ndim > 1:
                self.fix(nodes.reshape(-1), "reshaped together with values that belong to no unit")
            return
        given = [self.given.at(dim, rank) for dim in dims] or [self.given] * len(lengths)
        read = [each.held(size) for each, size in zip(given, lengths, strict=True)]
        literal = {axis: size for axis, (g, size) in enumerate(zip(given, lengths, strict=True)) if size in g.plain}
        cause = self.cause("") if literal else OUTPUT
        self.facts.append(Count(nodes, tuple(read), literals=tuple(literal.values()), cause=cause))
        for axis, (each, size) in enumerate(zip(given, lengths, strict=True)):
            self._borrow(nodes, each.numbers.get(size), dims[axis] if dims else None, rank)
        free = [axis for axis, dim in enumerate(dims) if len(self.given.shape) == rank and self.given.shape[dim] == -1]
        # Of `x.view(len(x), -1, self.heads // self.key_heads, size)`, the second length is the number of key heads.
        divided = {held for n in self.given.shape for factors in parts_of(n) if len(factors) > 1 for held in factors}
        equal = [(axis, size, self.held.get(self.module, ())) for axis, size in literal.items()]
        for axis, size, found in (*equal, *((axis, lengths[axis], divided) for axis in free)):
            for held in found:
                if isinstance(held, Held) and held.value == size:
                    alone = [frozenset({held}) if other == axis else frozenset() for other in range(len(lengths))]
                    self.facts.append(Count(nodes, tuple(alone), "equal"))

    def _borrow(self, nodes: IntArray, length: Number | None, dim: int | None, rank: int) -> None:
        """Record that the length of an axis was read from an axis of other units. `nodes` are as in `sized`."""
        own, place = nodes.reshape(-1), self.given.place
        for source in () if length is None else length.factors:
            if isinstance(source, Size) and source.nodes.size and not np.array_equal(source.nodes, own):
                free = None if dim is None or place is None else place(dim, rank)
                if free is None and (nodes.ndim > 1 or source.nodes.size != own.size):
                    continue
                remedy = "write -1 in place of the width of another tensor"
                cause = self.cause("its width is read from units that cannot be pruned", "number", remedy)
                self.facts.append(Borrow(own, source.nodes, cause, free))

    def count(self, nodes: IntArray, module: str, attribute: str) -> None:
        """Record that an attribute of a layer, an integer or a tuple of one, counts these units."""
        value = getattr(self._model.get_submodule(module), attribute)
        path: Path = (attribute, 0) if isinstance(value, tuple) else (attribute,)
        held = Held(module, path, int(value[0] if isinstance(value, tuple) else value))
        self.read_from.add(held)
        self.facts.append(Count(nodes, (frozenset({held}),), "rule"))
