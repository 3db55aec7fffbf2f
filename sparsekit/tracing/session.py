"""Session: holds the dense copy of a model for a verification, gates and cuts it, and records passes."""

import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from sparsekit._torch import set_mode
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.held import held_at
from sparsekit.labels.facts import user_line
from sparsekit.layers import Rules, find_rule
from sparsekit.rng import seeded
from sparsekit.surgery.rebuild import copy_with, find_constants, named_entries, narrow_module
from sparsekit.tracing.inputs import ModelInputs, find_numbers, find_tensors, held_tensors, plain_copy, with_tokens
from sparsekit.tracing.passes import InFloat64, ReadOnly, Snapshot, train_without_dropout
from sparsekit.tracing.perturbed import PerturbedState, is_meta, with_values
from sparsekit.tracing.record import Record


@dataclass
class Session:
    """Holds a dense copy of a model, and decides on dtype and inputs of all passes: float64 if the model runs in it.

    Args:
        model: The model; not changed. One on the meta device gets random values, and so do its inputs.
        calls: The inputs of the model.
        rules: The user's layer rules.
        training: Index of each call that runs in train mode, and whether its batch is doubled.
        lean: Keep matrices in their own dtype, and convert them operator by operator. Takes less memory and more time. Only
            gradients of vectors and of inputs are then compared.
        skipped: Filled with sentences about what could not be compared, and why, without their subject.
        outside: Objects outside of the model to which it refers, each with the one to which a narrow model refers.

    Attributes:
        refusal: Why the model fails on all inputs; None if it runs.
        wide: Whether values that the model casts to a lower precision stay in float64. Gradients are then not compared.
        by_module: Whether passes are recorded by module, because operators differ somewhere.
        generator: Draws scales, biases, inputs and masks.
    """

    model: nn.Module
    calls: Sequence[ModelInputs]
    rules: Rules | None = None
    training: Sequence[tuple[int, bool]] = ()
    lean: bool = False
    outside: Sequence[tuple[object, object]] = ()
    skipped: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_module, self.wide = False, False
        self._differentiates: dict[bool, bool] = {}  # train mode → whether passes with gradients run
        self._whole: set[str] | None = None  # parameters with one shape in both models, whose gradients are compared
        self.generator = torch.Generator().manual_seed(20130)
        self.calls = [inputs.valued() for inputs in self.calls]
        if is_meta(self.model):
            self.model = with_values(self.model, {id(own): own for own, _ in self.outside})
        own = [t.dtype for t in named_entries(self.model).values() if t.is_floating_point()]
        # A model may fix its dtype, its device may lack float64, and it may fail on perturbed inputs.
        lesser: list[tuple[torch.dtype | None, bool]] = [(torch.float32, False)] if self.lean else []
        for dtype, lean in [(torch.float64, self.lean), *lesser, (None, False)]:
            self.precision = dtype or (own or [torch.float32])[0]
            self.lean = lean
            self._prepare(dtype)
            for calls in (with_tokens(self.model, self.calls, self.generator), self.calls):
                self.refusal = self._try(calls, dtype)
                if self.refusal is None:
                    return

    def _prepare(self, dtype: torch.dtype | None) -> None:
        """Make the dense copy, in a dtype; None keeps its own."""
        entries = named_entries(self.model)
        found = dict.fromkeys(entries, dtype)
        if self.lean:  # recurrent layers ask for the dtypes of their entries before any operator runs
            owners = {name: self.model.get_submodule(name.rpartition(".")[0]) for name in entries}
            found = {name: dtype for name, owner in owners.items() if isinstance(owner, nn.RNNBase) or entries[name].dim() < 2}
        stay = {id(own): own for own, _ in self.outside}
        held = {name: both for name, both in find_constants(self.model).items() if id(both[1]) not in stay}
        constants = {name: tensor for name, (_, tensor) in held.items()}
        self._places = [place for place, _ in held.values()]
        self.state = PerturbedState(entries, found, self.generator, constants, None if self.lean else dtype)
        # Passes in eval mode start from the snapshot as it is, and so do those of narrow copies.
        self.dense = self._snapshot(set_mode(copy_with(self.model, self.state.values, self._places, stay), False))

    def _snapshot(self, model: nn.Module) -> Snapshot:
        held = (held_at(model.get_submodule(place.module), place.path) for place in self._places)
        return Snapshot(model, (tensor for tensor in held if isinstance(tensor, Tensor)))

    def _try(self, calls: Sequence[ModelInputs], dtype: torch.dtype | None) -> str | None:
        """Return why the model fails on `calls`; None adopts them, with perturbed inputs if outputs stay finite."""
        try:
            disturbed = [inputs.prepared(dtype, self.generator) for inputs in calls]
            for self._calls in (disturbed, [inputs.prepared(dtype, None) for inputs in calls]):
                record = self.run(self.dense)
                if _is_finite(record):
                    self.wide = not self.lean and dtype == torch.float64 and record.is_cast and self._runs_wide()
                    return None
            self._calls = disturbed
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
            return f"the model fails: {described(error)}"
        return None

    def differentiates(self, training: bool) -> bool:
        """Return whether the dense copy runs with gradients. Code that keeps an autograd graph between calls fails."""
        if training not in self._differentiates:
            self.state.restore()
            try:
                self.run(self.dense, training=training, gradients=True)
            except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
                self.skipped[f"fails when it runs with gradients: {described(error)}. Its gradients could not be compared"] = (
                    None
                )
                self._differentiates[training] = False
            else:
                self._differentiates[training] = True
        return self._differentiates[training]

    def _runs_wide(self) -> bool:
        """Return whether the model runs with all its casts in float64, so that values after casts are compared exactly."""
        self.wide = True
        try:
            return _is_finite(self.run(self.dense))
        except Exception:  # noqa: BLE001 (whatever the user's code raises)
            return False
        finally:
            self.wide = False

    def run(self, copied: Snapshot, *, training: bool = False, gradients: bool = False) -> Record:
        """Run the dense copy, or a cut one, on all calls, and record what it computes, with gradients if they are wanted."""
        guard, calls, model = self._calls[0].guard, self._calls, copied.model
        unordered = [m for m in copied.modules if (rule := find_rule(m, self.rules)) is not None and rule.in_order_of_units]
        # Record itself guards against writes and converts, since each dispatch mode takes time for every operator.
        record = Record(
            guard if isinstance(guard, ReadOnly) else None,
            model if self.by_module else None,
            unordered,
            precise=self.lean or self.wide,
        )
        if training:
            train_without_dropout(model)
            calls = [calls[number].doubled() if doubled else calls[number] for number, doubled in self.training]
        outputs: list[Tensor] = []
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            own = plain_copy(tensor)
            if not tensor.is_floating_point():
                return own
            leaves.append(own.requires_grad_())
            return own.clone()  # which code may write to, unlike a leaf

        try:
            with torch.set_grad_enabled(gradients), seeded(0):
                for number, inputs in enumerate(calls):
                    copied_by = leaf if gradients else plain_copy
                    returned = replace(inputs, guard=nullcontext()).call(model, record, copied_by)
                    outputs += (found := find_tensors(returned))
                    numbers = find_numbers(returned)
                    outputs += [torch.tensor(n, dtype=self.precision if type(n) is float else None) for n in numbers]
                    if gradients:  # now, as in a training step, before the next call writes to buffers
                        record.gradients |= {
                            (number, name): g for name, g in self._differentiated(model, found, leaves).items()
                        }
                        leaves.clear()
        finally:
            known = {id(tensor) for tensor in copied.tensors}
            buffers = {name: buffer for name, buffer in (model.named_buffers() if known else ()) if id(buffer) in known}
            same = {id(buffer) for buffer in buffers.values()}
            left = [tensor for tensor in held_tensors(model) if id(tensor) not in same]
            record.finish(outputs, left, buffers, copied.tensors)
            copied.restore()
        return record

    @property
    def gradients(self) -> bool:
        """Whether gradients are compared; rounding of lesser dtypes would hide errors in them."""
        return not self.wide and self.precision == torch.float64

    def _differentiated(self, model: nn.Module, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the gradients of a function of all outputs, with respect to floating inputs and parameters."""
        found = [torch.view_as_real(t) if t.is_complex() else t for t in outputs if t.requires_grad]
        wanted = {f"input {number}": leaf for number, leaf in enumerate(leaves)}
        own = {name: entry for name, entry in model.named_parameters() if entry.requires_grad}
        if self.lean:
            own = {name: entry for name, entry in own.items() if entry.dtype == self.precision}
        wanted |= {name: entry for name, entry in own.items() if self._whole is None or name in self._whole}
        if not found or not wanted:
            return {}
        loss = torch.stack([t.double().sin().sum() for t in found]).sum()
        with InFloat64() if self.lean else nullcontext():
            made = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return {name: gradient for name, gradient in zip(wanted, made, strict=True) if gradient is not None}

    def cut(
        self, graph: UnitGraph, first: Mapping[str, Tensor], keep: Mapping[str, Tensor], *, mixed: bool, twice: bool
    ) -> Snapshot:
        """Gate the dense copy, and return the narrow model.

        Args:
            graph: The unit graph.
            first: Group → units that stay after the first of two pruning steps.
            keep: Group → units that stay.
            mixed: Give the narrow model its units in another order.
            twice: Cut in two pruning steps.
        """
        self.state.zero_dropped(graph, keep)
        moved = [name for name, kept in keep.items() if mixed and not bool(kept.all())]
        # The zeroed entries are the removed ones, so the narrow copy can be made from this one.
        narrow = {id(own): twin for own, twin in self.outside}
        stays = first if twice else keep
        places = graph.rotated_indices(stays, moved)
        small = narrow_module(self.dense.model, graph, stays, self.rules, places, narrow)
        if twice:
            indices = {
                name: {dim: torch.argsort(places[name][dim])[torch.searchsorted(places[name][dim].sort()[0], index)]
                       for dim, index in axes.items()}
                for name, axes in (graph.kept_indices(keep) | graph.kept_constants(keep)).items()
            }  # fmt: skip
            outside = {id(twin): twin for twin in narrow.values()}
            small = narrow_module(small, graph, keep, self.rules, indices, outside)
        self._whole = {name for name, entry in named_entries(small).items() if entry.shape == graph.shapes.get(name)}
        return self._snapshot(small)


def _is_finite(record: Record) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in record.outputs if t.is_floating_point())


def described(error: Exception) -> str:
    """Describe an exception, with the innermost line of the user's code."""
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{user_line(frames)}"
