"""NarrowModel: a physically narrow copy of a model whose mask may change.

Its parameters are leaves, so a step costs as much as in a natively narrow network. They hold the kept units in ascending order.
A change of the mask saves them in dense tensors, and gathers the kept units again. While a unit is dropped, its weights do not
change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of
from sparsekit.errors import InvalidValueError
from sparsekit.graph import Axes, StateDict, UnitGraph, UnitMask, cut_axes, gather, narrow_shape, scatter_
from sparsekit.graph.index import scatter
from sparsekit.layers import Rules, find_rule, resize
from sparsekit.runtime.safe_convolution import guard_convolutions
from sparsekit.surgery.compaction import bind_saving
from sparsekit.surgery.optimizer_state import HasState, carried_state, entries_that_stay
from sparsekit.surgery.rebuild import (
    copy_with,
    in_format,
    memory_format,
    named_constants,
    named_entries,
    narrow_state,
    put_constants,
    reshape_leaf,
    set_sizes,
)


@dataclass(eq=False)
class _Entry:
    """One parameter or buffer of the narrow module, under all its state-dict keys."""

    key: str  # the name under which slices of units refer to it, if there is one; else its first name
    names: list[str]
    homes: list[tuple[nn.Module, str]]
    parameter: nn.Parameter | None
    _format: torch.memory_format | None = None

    @property
    def tensor(self) -> Tensor:
        owner, attribute = self.homes[0]
        value = buffers_of(owner)[attribute] if self.parameter is None else self.parameter
        assert value is not None
        return value.detach()

    def replace(self, tensor: Tensor) -> None:
        """Replace the tensor by one of any shape, in the same memory format."""
        # Remember the format, since with few channels the strides match every format.
        self._format = memory_format(self.tensor) or self._format
        tensor = in_format(tensor, self._format)
        if self.parameter is not None:
            reshape_leaf(self.parameter, tensor)  # optimizers and modules keep their references to it
            return
        for owner, attribute in self.homes:
            buffers_of(owner)[attribute] = tensor


def _find_entries(module: nn.Module, graph: UnitGraph) -> list[_Entry]:
    names: dict[int, list[str]] = {}
    tensors = named_entries(module)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    entries = []
    for own in names.values():
        tensor = tensors[own[0]]
        homes = [(module.get_submodule(owner), attribute) for owner, _, attribute in (name.rpartition(".") for name in own)]
        key = next((name for name in own if name in graph.slices_of), own[0])
        parameter = tensor if isinstance(tensor, nn.Parameter) else None
        entries.append(_Entry(key, own, homes, parameter))
    return entries


class NarrowModel:
    """A narrow copy of a model, which is resized when its mask changes. It starts with all units and the state of the model.

    One narrow model serves any number of trainings: `load` gives it another state and mask without copying the module again.
    """

    def __init__(self, model: nn.Module, graph: UnitGraph, *, rules: Rules | None = None) -> None:
        self.graph = graph
        self.rules = rules
        self.module = copy_with(model, {})
        guard_convolutions(self.module, wide=True)
        self._sizes = {
            name: {key: value for key, value in vars(module).items() if type(value) is int}
            for name, module in self.module.named_modules()
            if find_rule(module, rules) is not None
        }
        """Sizes of the dense layers: module name → attribute → number."""
        self._entries = _find_entries(self.module, graph)
        self._touched = [entry for entry in self._entries if entry.key in graph.slices_of]
        self._constants = {name: tensor.clone() for name, tensor in named_constants(self.module, graph).items()}
        """Dense tensors outside the state, by name."""
        self._dense: dict[str, Tensor] = {}
        self._owned: set[str] = set()  # keys of dense tensors that are copies, so that they may be written to
        self._rest: dict[tuple[torch.device, torch.dtype], Tensor] | None = None  # replaces the dense tensors, see `dropped`
        self._axes: dict[str, dict[int, Tensor]] = {}
        self.version = 0  # counts loads and changes of the mask
        self.mask = UnitMask.full(graph)
        self._counts = self.mask.counts()  # widths for which the sizes of layers were set
        self.load(model.state_dict(), None)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return state-dict key → narrow parameter. A tied one occurs once, under a key that units touch if there is one."""
        return {entry.key: entry.parameter for entry in self._entries if entry.parameter is not None}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the narrow module."""
        return self.module(*args, **kwargs)

    def positions(self, key: str) -> Mapping[int, Tensor]:
        """Return axis → int64 (narrow size,): dense positions of a narrow entry, ascending, along the axes with units."""
        return self._axes.get(key, {})

    def _cut(self, key: str) -> Axes:
        return cut_axes(self.graph.shapes[key], self.positions(key))

    def load(self, state: StateDict, mask: UnitMask | None) -> None:
        """Load a dense state, which is never written to, under a mask; None keeps all units. Reset optimizers afterwards.

        State and mask must belong to the model; `check_load` checks them.
        """
        mask = UnitMask.full(self.graph) if mask is None else mask
        if mask is not self.mask or not self._axes:
            self.mask, self._axes = mask, self.graph.kept_indices(mask)
        self._dense, self._rest = {}, None
        self._owned = set()
        self.version += 1
        for entry in self._entries:
            dense = state[entry.key].detach().to(entry.tensor)
            if entry.key in self.graph.slices_of:
                self._dense[entry.key] = dense
            self._gather(entry, dense)
        self._fit_module()

    def _gather(self, entry: _Entry, dense: Tensor) -> None:
        """Set a narrow entry to the kept part of a dense one."""
        narrow = gather(dense, self._cut(entry.key))
        entry.replace(narrow.clone() if narrow is dense else narrow)

    def _fit_module(self) -> None:
        """Cut the constants, and set the sizes of layers if they change."""
        if self._constants:
            held = named_constants(self.module, self.graph)
            narrow = narrow_state(self._constants, self.graph, self.mask, self.graph.kept_constants(self.mask))
            moved = {name: tensor.to(held[name]) for name, tensor in narrow.items()}
            put_constants(self.module, moved, self.graph.constants.values())
        if (counts := self.mask.counts()) != self._counts:
            self._counts = counts
            for name, numbers in self._sizes.items():  # dense sizes first: a shape with one unit does not determine all
                vars(self.module.get_submodule(name)).update(numbers)
            resize(self.module, self.rules)
            set_sizes(self.module, self.graph, counts)

    def _save_constants(self) -> None:
        axes = self.graph.kept_constants(self.mask)
        for name, held in named_constants(self.module, self.graph).items() if self._constants else ():
            dense = self._constants[name]
            if held.shape == narrow_shape(dense.shape, axes[name]):
                self._constants[name] = scatter(held.detach(), dense, cut_axes(dense.shape, axes[name]))

    def set_mask(self, mask: UnitMask, optimizers: Iterable[HasState] = ()) -> None:
        """Change the mask: save the weights of all units, and gather the kept ones.

        Units that stay keep their gradients, so that a second optimizer can still step. Entering units get gradients of zero.

        Args:
            mask: The units that are kept from now on.
            optimizers: Every optimizer that holds narrow leaves; their state follows, see `LearnableMask.add_optimizer`.

        Raises:
            ForeignMaskError: the mask belongs to another graph.
        """
        mask.check(self.graph)
        if mask == self.mask:
            return
        optimizers = list(optimizers)
        if self._rest is not None:
            self._dense, self._rest = self._dense_tensors(), None
            self._owned = set(self._dense)
        before, after = self._axes, self.graph.kept_indices(mask)
        changed = []
        for entry in self._touched:
            stay = entries_that_stay(self.graph.shapes[entry.key], before.get(entry.key, {}), after.get(entry.key, {}))
            if stay is not None:
                if entry.key not in self._owned:
                    self._dense[entry.key] = self._dense[entry.key].clone()
                    self._owned.add(entry.key)
                scatter_(entry.tensor, self._dense[entry.key], self._cut(entry.key))
                changed.append((entry, stay))
        self._save_constants()
        self.mask, self._axes = mask, after
        self.version += 1
        for entry, stay in changed:
            shape, gradient = entry.tensor.shape, None if entry.parameter is None else entry.parameter.grad
            self._gather(entry, self._dense[entry.key])
            if entry.parameter is not None and gradient is not None:
                entry.parameter.grad = scatter_(gather(gradient, stay.old), gradient.new_zeros(stay.shape), stay.new)
            for owner in optimizers:
                state = owner.state.get(entry.parameter)
                if state:
                    carried = carried_state(owner, state, entry.parameter, shape, stay)
                    state.clear()
                    state.update(carried)
        self._fit_module()

    def dropped(self) -> list[Tensor]:
        """Return the entries of dropped units, not copied: one flat tensor for each device and dtype.

        They replace the dense tensors until the mask changes, so they need no additional memory.
        """
        if self._rest is None:
            parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for entry in self._touched:
                dense = self._dense[entry.key]
                parts.setdefault((dense.device, dense.dtype), []).append(dense[self._left_out(entry, self._axes)])
            self._rest = {kind: torch.cat(own) for kind, own in parts.items()}
            self._dense = {}
        return list(self._rest.values())

    def _left_out(self, entry: _Entry, axes: Mapping[str, Axes]) -> Tensor:
        """Return bool (dense shape), True where an entry belongs to a dropped unit; `axes` of the kept ones, by key."""
        shape, own = self.graph.shapes[entry.key], axes.get(entry.key, {})
        narrow = torch.zeros(narrow_shape(shape, own), dtype=torch.bool)
        return scatter_(narrow, torch.ones(shape, dtype=torch.bool), cut_axes(shape, own)).to(entry.tensor.device)

    def place(self, dropped: Sequence[Tensor], axes: Mapping[str, Axes]) -> dict[str, Tensor]:
        """Return key → dense tensor with the entries of dropped units, and zeros for kept ones.

        `dropped` has the flat tensors, as from `dropped()`, of a mask with these `axes`.

        Raises:
            InvalidValueError: a flat tensor has another size.
        """
        parts: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for entry in self._touched:
            left_out = self._left_out(entry, axes)
            parts.setdefault((entry.tensor.device, entry.tensor.dtype), []).append((entry.key, left_out))
        found = {}
        for number, ((device, dtype), own) in enumerate(parts.items()):
            sizes = [int(left_out.sum()) for _, left_out in own]
            shape = dropped[number].shape if number < len(dropped) else None
            if shape != (sum(sizes),):
                raise InvalidValueError(f"expected the shape ({sum(sizes)},) of the weights of dropped units, got {shape}")
            for (key, left_out), part in zip(own, dropped[number].to(device, dtype).split(sizes), strict=True):
                found[key] = torch.zeros(left_out.shape, device=device, dtype=dtype).masked_scatter_(left_out, part)
        return found

    def _dense_tensors(self) -> dict[str, Tensor]:
        """Return key → dense tensor with the entries of dropped units; those of kept units have any value."""
        return self._dense if self._rest is None else self.place(list(self._rest.values()), self._axes)

    def names(self) -> dict[str, list[str]]:
        """Return key of each entry → its names in a state dict, in order; tied ones have several."""
        return {entry.key: entry.names for entry in self._entries}

    def _read(self, read: Callable[[_Entry], Tensor]) -> dict[str, Tensor]:
        pairs = ((entry.names, read(entry)) for entry in self._entries)
        found = {name: tensor for names, tensor in pairs for name in names}
        return {name: found[name] for name in self.graph.shapes if name in found}

    def narrow_state(self) -> dict[str, Tensor]:
        """Return copies of the narrow entries under the model's keys."""
        return self._read(lambda entry: entry.tensor.clone())

    def dense_state(self) -> dict[str, Tensor]:
        """Return the dense state as a new dict: kept entries as trained, dropped ones as they were when last kept."""
        dense = self._dense_tensors()

        def whole(entry: _Entry) -> Tensor:
            cut = self._cut(entry.key)
            return scatter_(entry.tensor, dense[entry.key].clone(), cut) if cut else entry.tensor.clone()

        return self._read(whole)

    def compact(self) -> nn.Module:
        """Return a copy of the narrow module, as a plain module without gradients."""
        small = copy_with(self.module, {})
        for parameter in small.parameters():
            parameter.grad = None
        return bind_saving(small)

    def gather(self, state: StateDict, keys: Iterable[str]) -> list[Tensor]:
        """Return the kept part of some entries of a dense state, in the shapes and dtypes of their narrow leaves."""
        leaves = self.named_parameters()
        return [gather(state[key].detach().to(leaves[key]), self._cut(key)) for key in keys]

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        self._dense, self._rest = {name: function(tensor) for name, tensor in self._dense_tensors().items()}, None
