"""Verifier: checks every group numerically. The model under gates must equal the model without the units."""

import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of, persistent_buffers
from sparsekit.graph.edit import narrow as narrow_graph
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule
from sparsekit.layers.labels.values import user_line
from sparsekit.surgery.kept_norms import kept_norms
from sparsekit.surgery.rebuild import copy_with, named_entries, narrow_module
from sparsekit.tracing.compare import compare_tensors, is_undefined, rounding_floor
from sparsekit.tracing.inputs import ModelInputs, find_numbers, find_tensors, with_tokens
from sparsekit.tracing.passes import ReadOnly, train_without_dropout
from sparsekit.tracing.perturbed import PerturbedState, dropped_positions
from sparsekit.tracing.record import PassRecord

_MANY_NUMBERS = 2_000_000  # larger models are compared under fewer masks; never by the clock
_TRIALS = 64  # bound on the work of finding the groups at fault


class _Trial(NamedTuple):
    """A mask to compare under, for every group.

    Args:
        order: Number of the random order of the units, of which the first are kept.
        share: Share of the units kept, at least one; 0 for the least width.
        rest: Keep the other units instead, so that with both masks each unit is kept once and dropped once.
        training: Compare in train mode, where the model accepts it.
        twice: Cut once more what a mask of the same order over half of the units has left, as the steps of a schedule do.
        bit: Keep the units in whose number this bit is not set instead.
        mixed: Give the narrow model its units in another order, in every tensor alike, so that each unit must have its own
            positions. Kept sets alone do not tell two kept units apart.
    """

    order: int
    share: float
    rest: bool = False
    training: bool = False
    twice: bool = False
    bit: int | None = None
    mixed: bool = True


_HALF, _LEAST = _Trial(0, 0.5), _Trial(0, 0.0)
_FEW = (_HALF, _LEAST._replace(twice=True), _HALF._replace(rest=True, training=True))
_MANY = (*_FEW, _Trial(1, 0.3, training=True), _Trial(1, 0.3, rest=True), _Trial(2, 0.0))


class _Pair(NamedTuple):
    """A model whose dropped units are gated, and the same model without them.

    Args:
        dense: The gated model.
        small: The narrow one.
        graph: The units of `dense`.
        keep: Group name → bool (units,).
        whole: Records a pass of `dense` with all units: train mode → record.
    """

    dense: nn.Module
    small: nn.Module
    graph: UnitGraph
    keep: Mapping[str, Tensor]
    whole: Callable[[bool], PassRecord]


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _finite(outputs: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in outputs if t.is_floating_point())


@dataclass
class Verifier:
    """Compares gated and compacted copies of a model.

    Args:
        model: Not changed.
        calls: What it is called on.
        rules: The user's layer rules.
        training: The calls that train mode accepts, to compare every second mask there, dropout aside: their numbers, and
            whether each is doubled.
        dtype: In which to compare; where the model cannot run in it, in its own.
    """

    model: nn.Module
    calls: Sequence[ModelInputs]
    rules: Mapping[type[nn.Module], LayerRule] | None = None
    training: Sequence[tuple[int, bool]] = ()
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(20130)
        entries = named_entries(self.model)
        self._refusal: str | None = None
        self._schedule = _MANY if sum(t.numel() for t in entries.values()) < _MANY_NUMBERS else _FEW
        self._by_module = False  # whether passes are recorded by module, since operators differ somewhere
        self._orders: dict[tuple[int, str], Tensor] = {}
        self._first_cut: tuple[Mapping[str, Tensor], nn.Module] | None = None
        self._prepare(entries, self.dtype)
        self._calls = [inputs.prepared(self.dtype, self._generator) for inputs in self._drawn()]
        self._is_accepted = False  # the first pass of a trial says whether the model runs on these inputs
        self.trials = 0

    def _prepare(self, entries: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        """Make the dense copy, in a dtype or in its own."""
        own = (t.dtype for t in entries.values() if t.is_floating_point())
        self._precision = dtype or next(own, torch.float32)
        self._state = PerturbedState(entries, dtype, self._generator)
        self._dense = copy_with(self.model, self._state.values)
        _convert_loose_tensors(self._dense, dtype)

    def _drawn(self) -> Sequence[ModelInputs]:
        return with_tokens(self.model, self.calls, self._generator)

    def _find_inputs(self) -> None:
        """Find a dtype and inputs that the model accepts: disturbed, or as they are where that breaks it."""
        self._is_accepted = True
        entries = named_entries(self.model)
        for dtype in (self.dtype, None):  # a model may fix its dtype, or its device may lack float64
            self._prepare(entries, dtype)
            if self._accepts(self._drawn(), dtype) or self._accepts(self.calls, dtype):
                return

    def _accepts(self, calls: Sequence[ModelInputs], dtype: torch.dtype | None) -> bool:
        """Whether the model runs on `calls`, which are used from now on: disturbed, or as they are where that breaks it."""
        self._calls = [inputs.prepared(dtype, self._generator) for inputs in calls]
        try:
            if not _finite(self._run(self._dense)):
                disturbed, self._calls = self._calls, [inputs.prepared(dtype, None) for inputs in calls]
                if not _finite(self._run(self._dense)):
                    self._calls = disturbed
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
            self._refusal = f"the model fails: {_described(error)}"
            return False
        self._refusal = None
        return True

    def _run(
        self, model: nn.Module, *, training: bool = False, seed: int = 0, record: PassRecord | None = None
    ) -> list[Tensor]:
        calls = self._calls
        if training:
            train_without_dropout(model)
            calls = [calls[number].doubled() if doubled else calls[number] for number, doubled in self.training]
        else:
            model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self._state.restore_buffers()
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the accelerators, for good
            outputs: list[Tensor] = []
            for inputs in calls:
                # A record guards what is written to itself: two modes take twice the time.
                returned = (inputs if record is None else replace(inputs, guard=nullcontext())).call(model, record)
                outputs += find_tensors(returned)
                outputs += [
                    torch.tensor(n, dtype=self._precision if type(n) is float else None) for n in find_numbers(returned)
                ]
        return outputs

    def _record(self, model: nn.Module, training: bool) -> PassRecord:
        guard = self._calls[0].guard
        record = PassRecord(guard if isinstance(guard, ReadOnly) else None, model if self._by_module else None)
        outputs: list[Tensor] = []
        try:
            outputs = self._run(model, training=training, record=record)
        finally:
            record.finish(outputs)
        return record

    def failures(self, graph: UnitGraph) -> dict[str, str]:
        """Find the groups whose removal is not exact.

        Returns:
            Group name → reason; empty if all is well.
        """
        if self._refusal is not None:
            return dict.fromkeys(graph.groups, self._refusal)
        # What fails is often all of one kind, and is found sooner where it lies together.
        units = sorted(graph.tied_sets, key=lambda names: graph.groups[names[0]].kind)
        self.trials = 0
        for trial in self._schedule:
            if trial.order:
                self._state.redraw(self._generator)
            bad = self._guilty(graph, units, trial)
            if bad and (bad := self._confirmed(graph, [names for names in units if bad.keys() & set(names)])):
                return bad
        return {}

    def _guilty(self, graph: UnitGraph, units: Sequence[tuple[str, ...]], trial: _Trial) -> dict[str, str]:
        bad: dict[str, str] = {}
        self._bisect(units, bad, functools.partial(self._try, graph, trial))
        return bad

    def _confirmed(self, graph: UnitGraph, units: Sequence[tuple[str, ...]]) -> dict[str, str]:
        """Which groups are wrong with their units in order: some models look at the order of units, not at which there are."""
        largest = max(graph.groups[name].size for names in units for name in names)
        bits = [_HALF._replace(bit=bit) for bit in range((largest - 1).bit_length())]
        for trial in (*self._schedule, *bits):
            if bad := self._guilty(graph, units, trial._replace(mixed=False)):
                return bad
        return {}

    def _bisect(
        self, units: Sequence[tuple[str, ...]], bad: dict[str, str], compare: Callable[[list[str]], str | None]
    ) -> None:
        if not units:
            return
        reason = compare([name for tied in units for name in tied])
        if reason is None:
            return
        if len(units) == 1 or self.trials >= _TRIALS:
            bad |= dict.fromkeys((name for tied in units for name in tied), reason)
            return
        half = len(units) // 2
        before = len(bad)
        self._bisect(units[:half], bad, compare)
        self._bisect(units[half:], bad, compare)
        if len(bad) == before:
            bad |= dict.fromkeys((name for tied in units for name in tied), f"only jointly: {reason}")
            return

    def _try(self, graph: UnitGraph, trial: _Trial, names: Sequence[str]) -> str | None:
        """Why a mask over some groups is not exact, or None if it is."""
        reason, exact = self._compare(graph, trial, names)
        sets = [tied for tied in graph.tied_sets if set(tied) <= set(names)]
        if reason is not None or exact or len(sets) == 1:
            return reason
        # What other groups change may hide an error: each group is judged by what it changes itself.
        alone = (self._compare(graph, trial, tied)[0] for tied in sets)
        return next((why for why in alone if why is not None), None)

    def _compare(self, graph: UnitGraph, trial: _Trial, names: Sequence[str]) -> tuple[str | None, bool]:
        """Why the gated and the narrow model differ under a mask over some groups, or None if they do not.

        Returns:
            The reason, and whether the two are equal up to rounding, whatever the mask has changed.
        """
        self.trials += 1
        if trial.training and not self.training:
            trial = trial._replace(training=False)
        if self._refusal is not None:
            return self._refusal, False
        try:
            pair = self._cut_twice(graph, trial, names) if trial.twice else self._cut(graph, trial, names)
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
            return f"the compacted model fails: {_described(error)}", False
        try:
            with kept_norms(pair.dense, pair.graph, pair.keep):
                expected = self._record(pair.dense, trial.training)
            accepted = self._is_accepted or _finite(expected.outputs)
        except Exception as error:  # noqa: BLE001
            if self._is_accepted:
                why = f"the gated model fails: {_described(error)}"
                return self._told(graph, trial, names, why, exact=False)
            accepted = False
        if not accepted:
            self._find_inputs()
            return self._compare(graph, trial, names)
        self._is_accepted = True
        try:
            found = self._record(pair.small, trial.training)
        except Exception as error:  # noqa: BLE001
            return self._told(graph, trial, names, f"the compacted model fails: {_described(error)}", exact=False)
        if not self._by_module and not expected.has_operators_of(found):
            self._by_module = True
            return self._compare(graph, trial, names)
        if trial._replace(mixed=True) == _HALF and len(names) == len(graph.groups):
            self._first_cut = pair.keep, pair.small
        return self._told(graph, trial, names, *self._judge(pair, trial, expected, found))

    def _told(
        self, graph: UnitGraph, trial: _Trial, names: Sequence[str], reason: str | None, exact: bool
    ) -> tuple[str | None, bool]:
        """The answer of a trial; in train mode it counts only if the model can be compared there."""
        if reason is None or not trial.training:
            return reason, exact
        if not self._compares_training:
            return self._compare(graph, trial._replace(training=False), names)
        return f"in training, {reason}", exact

    def _cut(self, graph: UnitGraph, trial: _Trial, names: Sequence[str]) -> _Pair:
        keep = self._mask(graph, set(names), trial)
        self._state.zero_dropped(graph, keep)
        self._state.restore_buffers()
        # What is zeroed is what is cut away, so the narrow copy can be taken from this one.
        small = self._narrow(self._dense, graph, keep, trial)
        return _Pair(self._dense, small, graph, keep, self._whole)

    def _narrow(self, model: nn.Module, graph: UnitGraph, keep: Mapping[str, Tensor], trial: _Trial) -> nn.Module:
        indices = graph.kept_indices(keep)
        return narrow_module(model, graph, keep, self.rules, _mixed(graph, keep, indices) if trial.mixed else indices)

    def _whole(self, training: bool) -> PassRecord:
        self._state.restore()
        return self._record(self._dense, training)

    def _cut_twice(self, graph: UnitGraph, trial: _Trial, names: Sequence[str]) -> _Pair:
        """Cut what is left of a first cut, which then is the one to be gated."""
        first, least = (self._mask(graph, set(names), each) for each in (_HALF, trial))
        if self._first_cut is not None and len(names) == len(graph.groups) and _equal(first, self._first_cut[0]):
            between = self._first_cut[1]
        else:
            between = self._cut(graph, _HALF._replace(mixed=trial.mixed), names).small
        rest = narrow_graph(graph, UnitMask(first))
        keep = {name: stays[first[name]] for name, stays in least.items()}
        small = self._narrow(between, rest, keep, trial)
        before: dict[Tensor, Tensor] = {}
        entries = named_entries(between)
        for name, axes in dropped_positions(rest, keep).items():
            value = entries[name].detach()
            before.setdefault(entries[name], value.clone())
            for dim, positions in axes.items():
                value.index_fill_(dim, positions.to(value.device), 0)

        def whole(training: bool) -> PassRecord:
            for entry, value in before.items():
                entry.detach().copy_(value)
            return self._record(between, training)

        self._first_cut = None  # its entries are zeroed
        return _Pair(between, small, rest, keep, whole)

    def _judge(self, pair: _Pair, trial: _Trial, expected: PassRecord, found: PassRecord) -> tuple[str | None, bool]:
        if [t.shape for t in expected.outputs] != [t.shape for t in found.outputs]:
            return "removing units changes the shape of the output", False
        loosely = bool(pair.graph.norms)
        inside = list(expected.pairs(found, loosely=loosely))
        outside = list(zip(expected.outputs, found.outputs, strict=True))
        if not any(t.is_floating_point() or t.is_complex() for t, _ in (*inside, *outside)):
            return "no floating-point value reaches the output, so nothing can be compared", False
        defined = [trial.share > 0 or not (is_undefined(a) and is_undefined(b)) for a, b in outside]
        outside = [both for both, counts in zip(outside, defined, strict=True) if counts]
        floor = rounding_floor(a for a, _ in inside)
        if all(compare_tensors(a, a, b) is None for a, b in outside) and all(
            compare_tensors(a, a, b, floor) is None for a, b in inside
        ):
            return None, True
        try:
            whole = pair.whole(trial.training)
        except Exception:  # noqa: BLE001
            whole = expected  # train mode refuses the inputs, as a batch norm may one example
        if [t.shape for t in whole.outputs] != [t.shape for t in expected.outputs]:
            whole = expected
        outputs = [output for output, counts in zip(whole.outputs, defined, strict=True) if counts]
        for before, (a, b) in zip(outputs, outside, strict=True):
            if (reason := compare_tensors(before, a, b)) is not None:
                return reason, False
        triples = list(expected.pairs(found, whole, loosely=loosely))
        if len(triples) != len(inside):
            triples = [(a, b, a) for a, b in inside]
        for a, b, before in triples:
            if (reason := compare_tensors(before, a, b, floor)) is not None:
                return f"{reason}, inside the model", False
        return None, False

    @functools.cached_property
    def _compares_training(self) -> bool:
        """Whether outputs in train mode can be compared: the model accepts it, and draws nothing at random there."""
        if not self.training:
            return False
        self._state.restore()
        try:
            whole, again = (self._run(self._dense, training=True, seed=seed) for seed in (0, 1))
        except Exception:  # noqa: BLE001
            return False
        return all(torch.allclose(a, b, equal_nan=True) for a, b in zip(whole, again, strict=False))

    def _mask(self, graph: UnitGraph, names: set[str], trial: _Trial) -> dict[str, Tensor]:
        keep: dict[str, Tensor] = {}
        for name, group in graph.groups.items():
            key = (trial.order, name)
            if key not in self._orders or len(self._orders[key]) != group.size:
                self._orders[key] = torch.randperm(group.size, generator=self._generator)
            count = max(1, math.ceil(trial.share * group.size))
            if trial.share == _HALF.share and group.size in (4, 5):
                count = group.size - 1  # two kept units may have each other's positions in whichever order they are
            chosen = torch.ones(group.size, dtype=torch.bool)
            if name in names:
                if trial.bit is not None:
                    chosen = (torch.arange(group.size) >> trial.bit) % 2 == 0
                    keep[name] = chosen
                    continue
                dropped = self._orders[key][:count] if trial.rest and count < group.size else self._orders[key][count:]
                chosen[dropped] = False
            keep[name] = chosen
        return keep


def _mixed(
    graph: UnitGraph, keep: Mapping[str, Tensor], indices: Mapping[str, Mapping[int, Tensor]]
) -> Mapping[str, Mapping[int, Tensor]]:
    """The indices of kept positions with the kept units of each group moved on by one, where it loses any."""
    found = {name: dict(axes) for name, axes in indices.items()}
    for name, stays in keep.items():
        for piece in graph.groups[name].slices if not bool(stays.all()) else ():
            kept, own = found[piece.name][piece.dim], piece.index.cpu()[stays]
            place = torch.searchsorted(indices[piece.name][piece.dim], own.reshape(-1))
            if kept is indices[piece.name][piece.dim]:
                kept = found[piece.name][piece.dim] = kept.clone()
            kept[place] = own.roll(1, 0).reshape(-1)
    return found


def _convert_loose_tensors(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Give floating tensors outside the state `dtype` too: in a product with others they would be refused."""
    for module in model.modules() if dtype is not None else ():
        state = persistent_buffers(module)
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_floating_point() and name not in state:
                buffers_of(module)[name] = buffer.to(dtype)


def _described(error: Exception) -> str:
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{user_line(frames)}"
