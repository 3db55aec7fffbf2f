"""NarrowModel: trains a physically narrow copy of a model while its mask changes.

The narrow module's parameters are leaves, so a step costs what a step of a natively narrow network costs. A remask saves
the weights of leaving units in the dense copy and reads those of entering units from it. An entering unit takes the place
("slot") of a leaving one, so that a remask touches only what changes. The narrow units are therefore not always in
ascending order while training; they are sorted when a state is read out. The entries of a dropped unit, and their
optimiser state, do not change until it returns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitSlice
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.layers import find_rule, resize
from sparsekit.surgery.optimizer_state import (
    HasState,
    OptimizerState,
    SavedState,
    check_movable,
    copies_of_weights,
    first_value,
    moving_state,
    other_state,
    reduced_axis,
    state_of_shape,
)
from sparsekit.surgery.rebuild import copy_with, in_format, memory_format, named_entries, reshape_leaf, set_sizes
from sparsekit.surgery.safe_convolution import guard_convolutions
from sparsekit.training.slots import EntrySlots, build_slots, moves_to


@dataclass(eq=False)
class _Entry:
    """One parameter or buffer of the narrow module, under all its state-dict keys."""

    key: str
    """The name under which units touch it, if they do under one."""
    names: list[str]
    owner: nn.Module
    attribute: str
    parameter: nn.Parameter | None
    _format: torch.memory_format | None = None

    @property
    def tensor(self) -> Tensor:
        value = buffers_of(self.owner)[self.attribute] if self.parameter is None else self.parameter
        assert value is not None
        return value.detach()

    def replace(self, tensor: Tensor) -> None:
        """Put another tensor, maybe of another shape, in place of the present one; channels last stays channels last."""
        # Remembered, as the strides of few channels fit every format.
        self._format = memory_format(self.tensor) or self._format
        tensor = in_format(tensor, self._format)
        if self.parameter is None:
            buffers_of(self.owner)[self.attribute] = tensor
        else:
            reshape_leaf(self.parameter, tensor)  # optimisers and modules keep their references to it


def _find_entries(module: nn.Module, graph: UnitGraph) -> list[_Entry]:
    names: dict[int, list[str]] = {}
    tensors = named_entries(module)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    entries = []
    for own in names.values():
        tensor, (owner, _, attribute) = tensors[own[0]], own[0].rpartition(".")
        key = next((name for name in own if name in graph.slices_of), own[0])
        parameter = tensor if isinstance(tensor, nn.Parameter) else None
        entries.append(_Entry(key, own, module.get_submodule(owner), attribute, parameter))
    return entries


class _Moving(NamedTuple):
    """A narrow tensor that follows the units, and its dense copy; of an optimiser's state also the dict and name it is in."""

    narrow: Tensor
    dense: Tensor
    state: dict[str, Any] | None = None
    name: str = ""
    reduced: int | None = None
    """The axis that a factored moment is a mean over; it follows the units of the others."""


def fit_sizes(model: nn.Module, dense: Mapping[str, Mapping[str, int]], graph: UnitGraph, counts: Mapping[str, int]) -> None:
    """Set the sizes of narrow layers as a cut of the dense ones does: one unit that is left does not say how many there were.

    Args:
        model: Its tensors have the shapes that `counts` gives them.
        dense: Module name → attribute → number, of the layers whose sizes follow their tensors; see `NarrowModel.sizes`.
        graph: The units.
        counts: Group name → units kept.
    """
    for name, numbers in dense.items():
        vars(model.get_submodule(name)).update(numbers)
    resize(model)
    set_sizes(model, graph, counts)


class NarrowModel:
    """A narrow copy of a model that follows its mask.

    One narrow model serves any number of trainings: `load` gives it another state and mask without copying the module again.

    Args:
        model: The dense model; never edited. Its current state is loaded under the full mask.
        graph: Its units.
    """

    def __init__(self, model: nn.Module, graph: UnitGraph) -> None:
        self.graph = graph
        self.module = copy_with(model, {})
        guard_convolutions(self.module, wide=True)
        self.sizes = {
            name: {key: value for key, value in vars(module).items() if type(value) is int}
            for name, module in self.module.named_modules()
            if find_rule(module) is not None
        }
        """Sizes of the dense layers: module name → attribute → number."""
        self._entries = _find_entries(self.module, graph)
        self._touched = [entry for entry in self._entries if entry.key in graph.slices_of]
        self._dense: dict[str, Tensor] = {}
        self._owned: set[str] = set()
        self._saved = SavedState(graph.shapes, self.parameters())
        self._units: dict[str, Tensor] = {}
        self._slots: dict[str, EntrySlots] = {}
        self.version = 0
        """Counts loads and remasks: compare it to see whether something cached about the slots is still true."""
        self.layout = 0
        """Counts changes of narrow shapes; units that only swap slots do not count."""
        self.mask = UnitMask.full(graph)
        self.load(model.state_dict(), None)

    def __getstate__(self) -> dict[str, Any]:
        """Keep saved optimiser state without its owners: a copy, or another process, has other optimisers."""
        return {**vars(self), "_saved": self.saved_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._saved = SavedState(self.graph.shapes, self.parameters(), unclaimed=state["_saved"])

    def parameters(self) -> list[nn.Parameter]:
        """The narrow leaves, tied ones once, in the order of the model's state."""
        return [entry.parameter for entry in self._entries if entry.parameter is not None]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """State-dict key → narrow leaf; a shared one once, under a key that units touch if it has one."""
        return {entry.key: entry.parameter for entry in self._entries if entry.parameter is not None}

    def slots(self, name: str) -> EntrySlots:
        """Return the dense positions of a narrow entry; `name` is its state-dict key."""
        return self._slots[name]

    def group_units(self, group: str) -> Tensor:
        """int64 (kept,): the unit in each slot of `group`, in slot order."""
        return self._units[group]

    def tensors(self) -> Iterator[tuple[str, list[str], Tensor]]:
        """(key, all its tied state-dict keys, leaf or buffer) of each narrow entry."""
        for entry in self._entries:
            yield entry.key, entry.names, entry.tensor if entry.parameter is None else entry.parameter

    def slot_order(self) -> dict[str, Tensor]:
        """Group name → int64 (kept,): the unit in each slot, the order in which optimiser state lies."""
        return {name: units.clone() for name, units in self._units.items()}

    def saved_state(self) -> OptimizerState:
        """Return what dropped units left behind of their optimiser state: state-dict key → name → dense tensor."""
        return self._saved.state(self.named_parameters(), lambda *names: self._slots_of(*names[:2]).scatter(*names[2:]))

    def claim_saved(self, owner: HasState) -> None:
        """Let an optimiser that was loaded or copied take over the saved state that came with the last `load` or copy."""
        self._saved.claim(owner, self.named_parameters(), lambda *names: self._slots_of(*names[:2]).gather(names[2]))

    def _slots_of(self, key: str, name: str) -> EntrySlots:
        """The slots of one kind of optimiser state of an entry."""
        return self._slots[key].without(reduced_axis(name, len(self.graph.shapes[key])))

    def load(
        self,
        state: StateDict,
        mask: UnitMask | None,
        order: Mapping[str, Tensor] | None = None,
        saved: OptimizerState | None = None,
    ) -> None:
        """Start afresh from a dense state under a mask.

        The saved optimiser state of dropped units is discarded; make a new optimiser after loading.

        Args:
            state: The dense state; never written to.
            mask: What is kept; None keeps all.
            order: Group name → the unit in each slot, from `slot_order`; ascending where not given.
            saved: Optimiser state of dropped units, from `saved_state`, for optimisers that take it with `claim_saved`.

        Raises:
            ForeignMaskError: the state, the mask or the order belongs to another model.
        """
        self.graph.check_state(state)
        mask = UnitMask.full(self.graph) if mask is None else mask
        mask.check(self.graph)
        self._dense = {entry.key: state[entry.key].detach() for entry in self._entries}
        self._owned = set()
        self._saved = SavedState(self.graph.shapes, self.parameters(), unclaimed=saved)
        self._place(mask, order)
        self._fill()

    def _place(self, mask: UnitMask, order: Mapping[str, Tensor] | None = None) -> None:
        """Give every kept unit a slot, in ascending order unless another is given."""
        self._units, self._slots = build_slots(self.graph, mask, order)
        self.mask = mask
        self.version += 1
        self.layout += 1

    def _fill(self) -> None:
        """Replace every narrow entry by what the dense copy holds for its slots."""
        changed = False
        for entry in self._entries:
            key = entry.key
            device = entry.tensor.device
            dense = self._dense[key] = self._dense[key].to(device=device, dtype=entry.tensor.dtype)
            narrow = self._slots[key].gather(dense)
            changed = changed or narrow.shape != entry.tensor.shape
            entry.replace(narrow)
        if changed:
            fit_sizes(self.module, self.sizes, self.graph, self.mask.counts())

    def writable(self, key: str) -> Tensor:
        """The dense copy of an entry, to be written to."""
        if key not in self._owned:
            self._dense[key] = self._dense[key].clone()
            self._owned.add(key)
        return self._dense[key]

    def remask(self, mask: UnitMask, optimizers: Sequence[HasState] = (), order: Mapping[str, Tensor] | None = None) -> None:
        """Change the mask: save the weights and optimiser state of dropped units, restore those of entering ones.

        Gradients are discarded, since they belong to the old mask.

        Args:
            mask: What is kept from now on.
            optimizers: Every optimiser that holds narrow leaves. Their state per entry follows; state of another shape (the
                factored moments of Adafactor) starts anew where the leaf's shape changes.
            order: The unit in each slot from now on, as from `slot_order`; where not given, units that stay keep their slots.

        Raises:
            ForeignMaskError: the mask or the order belongs to another graph.
            InvalidValueError: an optimiser keeps its state quantised in blocks.
        """
        mask.check(self.graph)
        if mask == self.mask and order is None:
            return
        check_movable(optimizers, self.parameters())
        self._saved.forget_unclaimed()
        if order is not None or mask.counts() != self.mask.counts():
            self._remask_shapes(mask, optimizers, order)
        else:
            self._remask_slots(mask, optimizers)

    def _remask_shapes(self, mask: UnitMask, optimizers: Sequence[HasState], order: Mapping[str, Tensor] | None = None) -> None:
        """Save everything, then lay everything out anew."""
        moving = {id(entry): self._moving(entry, optimizers) for entry in self._touched}
        shapes = {id(entry): entry.tensor.shape for entry in self._touched}
        for entry in self._touched:
            for item in moving[id(entry)]:
                self._slots[entry.key].without(item.reduced).scatter(item.narrow, item.dense)
        self._dense.update({e.key: e.tensor.clone() for e in self._entries if e not in self._touched})
        self._place(mask, order)
        self._fill()
        for entry in self._touched:
            if entry.parameter is not None and entry.parameter.shape != shapes[id(entry)]:
                for owner in optimizers:
                    if other_state(owner, entry.parameter, shapes[id(entry)]):
                        owner.state[entry.parameter].clear()
            for item in moving[id(entry)]:
                if item.state:  # not where it was cleared: a step would take what is left for complete
                    item.state[item.name] = self._slots[entry.key].without(item.reduced).gather(item.dense)

    def _remask_slots(self, mask: UnitMask, optimizers: Sequence[HasState]) -> None:
        """Exchange the units of the slots that change; all others stay where they are."""
        moves = {name: moves_to(units, mask[name]) for name, units in self._units.items()}
        moves = {name: move for name, move in moves.items() if move[0].numel()}
        for entry in self._touched:
            slots = self._slots[entry.key]
            changed = slots.changed_positions(moves)
            if not changed:
                continue
            moving = self._moving(entry, optimizers)
            for item in moving:
                slots.without(item.reduced).save(item.narrow, item.dense, changed)
            slots.reassign(moves)
            for item in moving:
                slots.without(item.reduced).fetch(item.narrow, item.dense, changed)
            if entry.parameter is not None:
                entry.parameter.grad = None
        for name, move in moves.items():
            self._units[name] = self._units[name].index_copy(0, *move)
        self.mask = mask
        self.version += 1

    def _moving(self, entry: _Entry, optimizers: Iterable[HasState]) -> list[_Moving]:
        """List what follows the units: the entry itself, and the state of its shape in each optimiser."""
        key = entry.key
        moving = [_Moving(entry.tensor, self.writable(key))]
        if entry.parameter is not None:
            for owner in optimizers:
                for name, narrow, reduced in moving_state(owner, entry.parameter):
                    dense = self._saved.dense(owner, key, name, narrow, lambda: self._dense[key])
                    moving.append(_Moving(narrow, dense, owner.state[entry.parameter], name, reduced))
        return moving

    def _read(self, read: Callable[[_Entry], Tensor]) -> dict[str, Tensor]:
        """What `read` makes of each entry, under the model's keys and in their order."""
        found: dict[str, Tensor] = {}
        for entry in self._entries:
            found.update(dict.fromkeys(entry.names, read(entry)))
        return {name: found[name] for name in self.graph.shapes if name in found}

    def narrow_state(self) -> dict[str, Tensor]:
        """Copies of the narrow entries under the model's keys, units in ascending order."""
        return self._read(lambda entry: self._slots[entry.key].sorted(entry.tensor))

    def dense_state(self) -> dict[str, Tensor]:
        """Return the dense state as a new dict: kept entries as trained, dropped ones as they were when last kept."""
        return self._read(lambda entry: self._slots[entry.key].scatter(entry.tensor, self._dense[entry.key].clone()))

    def compact(self) -> nn.Module:
        """The narrow module as a plain module of its own: a copy without gradients, units in ascending order."""
        small = copy_with(self.module, {})
        small.load_state_dict(self.narrow_state())
        for parameter in small.parameters():
            parameter.grad = None
        return small

    def dense_model(self) -> nn.Module:
        """Return a dense copy of the model with its present weights, for criteria that run it."""
        found = copy_with(self.module, self.dense_state())
        fit_sizes(found, self.sizes, self.graph, {name: group.size for name, group in self.graph.groups.items()})
        return found

    def enter(self, units: Mapping[str, Tensor], optimizers: Sequence[HasState]) -> None:
        """Let kept `units` begin afresh: nothing reads them yet, and their optimiser state starts anew.

        Args:
            units: Group name → int64 (n,).
            optimizers: Hold the state.
        """
        copies = {id(owner): copies_of_weights(owner, self.parameters()) for owner in optimizers}
        parameters = [entry for entry in self._touched if entry.parameter is not None]
        for entry in parameters:
            for _, piece, positions in self._positions_of(entry, units):
                if piece.gated:
                    entry.tensor.index_fill_(piece.dim, positions, 0.0)
        for entry in parameters:
            assert entry.parameter is not None
            for _, piece, positions in self._positions_of(entry, units):
                for owner in optimizers:
                    for name, value in state_of_shape(owner, entry.parameter):
                        if name in copies[id(owner)]:
                            value.index_copy_(piece.dim, positions, entry.tensor.index_select(piece.dim, positions).to(value))
                        else:
                            value.index_fill_(piece.dim, positions, first_value(owner, name))

    def _positions_of(self, entry: _Entry, units: Mapping[str, Tensor]) -> Iterator[tuple[str, UnitSlice, Tensor]]:
        """(group, slice, int64 narrow positions) of kept `units` in an entry."""
        for group, piece, table in self._slots[entry.key].tables:
            if group in units and units[group].numel():
                slots = torch.isin(self._units[group], units[group])
                yield group, piece, table[slots].reshape(-1).to(entry.tensor.device)

    def dense_view(self) -> StateDict:
        """Return the dense copy itself, to be read only: exact for dropped entries, out of date for kept ones."""
        return self._dense

    def apply_to_tensors(self, function: Any) -> None:
        """Apply `function` to the tensors outside the narrow module: dense copies and saved state."""
        self._dense = {name: function(tensor) for name, tensor in self._dense.items()}
        self._saved.apply_to_tensors(function)
