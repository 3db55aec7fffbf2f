"""Verifier: checks every group numerically. The model under gates must equal the model without the units."""

import functools
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of
from sparsekit.graph.graph import UnitGraph
from sparsekit.labels.values import user_line
from sparsekit.layers import LayerRule, find_rule
from sparsekit.rng import seeded
from sparsekit.runtime.kept_norms import kept_norms
from sparsekit.surgery.rebuild import copy_with, find_constants, named_entries, narrow_module
from sparsekit.tracing.compare import compare_tensors, is_undefined, rounding_floor
from sparsekit.tracing.inputs import ModelInputs, find_numbers, find_tensors, held_tensors, with_tokens
from sparsekit.tracing.passes import InFloat64, ReadOnly, keep_attributes, train_without_dropout
from sparsekit.tracing.perturbed import PerturbedState
from sparsekit.tracing.record import PassRecord
from sparsekit.tracing.search import Failure, Search, blamed, cause
from sparsekit.tracing.trials import FEW, MANY, Masks, Trial, width_trials

_MANY_NUMBERS = 2_000_000  # larger models are compared under fewer masks; never by the clock
_NOISE = 4.0  # relative change of entries, in units of rounding, that shows how far rounding carries
_NOISE_FACTOR = 16.0


def _finite(outputs: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in outputs if t.is_floating_point())


@dataclass
class Verifier:
    """Compares gated and compacted copies of a model, in float64 where the model runs in it.

    Args:
        model: Not changed.
        calls: The calls of the model.
        rules: The user's layer rules.
        training: The calls that train mode accepts, to compare every second mask there, dropout aside: their numbers, and
            whether each is doubled.
        lean: Keep the entries in their own dtype, and convert them operator by operator. Takes less memory and more time.
    """

    model: nn.Module
    calls: Sequence[ModelInputs]
    rules: Mapping[type[nn.Module], LayerRule] | None = None
    training: Sequence[tuple[int, bool]] = ()
    lean: bool = False

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(20130)
        entries = named_entries(self.model)
        self._refusal: str | None = None
        self._schedule = MANY if sum(t.numel() for t in entries.values()) < _MANY_NUMBERS else FEW
        self._by_module = False  # whether passes are recorded by module, since operators differ somewhere
        self._masks = Masks(self._generator)
        self._prepare(entries, torch.float64, self.lean)
        self._calls = [inputs.prepared(torch.float64, self._generator) for inputs in self._drawn()]
        self._is_accepted = False  # the first pass of a trial says whether the model runs on these inputs
        self._search = Search()

    def _prepare(self, entries: Mapping[str, Tensor], dtype: torch.dtype | None, lean: bool) -> None:
        """Make the dense copy, in a dtype or in its own."""
        own = (t.dtype for t in entries.values() if t.is_floating_point())
        self._precision = dtype or next(own, torch.float32)
        self._is_lean = lean
        if lean:  # recurrent layers ask for the dtypes of their entries before any operator runs
            found = {name: dtype for name in entries if isinstance(_owner(self.model, name), nn.RNNBase)}
        else:
            found = dict.fromkeys(entries, dtype)
        held = find_constants(self.model)
        constants = {name: tensor for name, (_, tensor) in held.items()}
        self._state = PerturbedState(entries, found, self._generator, constants, None if lean else dtype)
        self._dense = copy_with(self.model, self._state.values, [place for place, _ in held.values()])

    def _drawn(self) -> Sequence[ModelInputs]:
        return with_tokens(self.model, self.calls, self._generator)

    def _find_inputs(self) -> None:
        """Find a dtype and inputs that the model accepts: disturbed, or as they are where that breaks it."""
        self._is_accepted = True
        entries = named_entries(self.model)
        # A model may fix its dtype, or its device may lack float64.
        for dtype, lean in ((torch.float64, self.lean), *([(torch.float32, False)] if self.lean else ()), (None, False)):
            self._prepare(entries, dtype, lean)
            if self._accepts(self._drawn(), dtype) or self._accepts(self.calls, dtype):
                return

    def _accepts(self, calls: Sequence[ModelInputs], dtype: torch.dtype | None) -> bool:
        """Tell whether the model runs on `calls`, which are used from now on: disturbed, or as they are where that breaks
        it."""
        self._calls = [inputs.prepared(dtype, self._generator) for inputs in calls]
        try:
            if not _finite(self._record(self._dense).outputs):
                disturbed, self._calls = self._calls, [inputs.prepared(dtype, None) for inputs in calls]
                if not _finite(self._record(self._dense).outputs):
                    self._calls = disturbed
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
            self._refusal = f"the model fails: {_described(error)}"
            return False
        self._refusal = None
        return True

    def _record(self, model: nn.Module, training: bool = False, seed: int = 0) -> PassRecord:
        guard, calls = self._calls[0].guard, self._calls
        unordered = [m for m in model.modules() if (rule := find_rule(m, self.rules)) is not None and rule.in_order_of_units]
        record = PassRecord(guard if isinstance(guard, ReadOnly) else None, model if self._by_module else None, unordered)
        if training:
            train_without_dropout(model)
            calls = [calls[number].doubled() if doubled else calls[number] for number, doubled in self.training]
        else:
            model.eval()
        outputs: list[Tensor] = []
        before, put_back = held_tensors(model), keep_attributes(model)
        try:
            with torch.no_grad(), seeded(seed):
                self._state.restore_buffers()
                for inputs in calls:
                    # A record guards what is written to itself: two modes take twice the time.
                    returned = replace(inputs, guard=InFloat64() if self._is_lean else nullcontext()).call(model, record)
                    outputs += find_tensors(returned)
                    outputs += [
                        torch.tensor(n, dtype=self._precision if type(n) is float else None) for n in find_numbers(returned)
                    ]
        finally:
            buffers = {id(buffer) for buffer in model.buffers()} & {
                id(tensor) for tensor in before
            }  # written in place, if at all
            record.finish(outputs, [tensor for tensor in held_tensors(model) if id(tensor) not in buffers])
            put_back()
        return record

    def failures(self, graph: UnitGraph, compared: Collection[str] = ()) -> dict[str, str]:
        """Find the groups whose removal is not exact.

        Args:
            graph: The groups.
            compared: Groups whose width code may compare with something: each pair of their widths is tried.

        Returns:
            Group name → reason; empty if all is well.
        """
        if self._refusal is not None:
            return dict.fromkeys(graph.groups, self._refusal)
        # What fails is often all of one kind, and is found sooner if it is together.
        units = sorted(graph.tied_sets, key=lambda names: graph.groups[names[0]].kind)
        self._search.tried = 0
        some = [tied for tied in units if not set(compared).isdisjoint(tied)]
        for trial in (*self._schedule, *width_trials(graph, some, (False, True) if self.training else (False,))):
            self._state.redraw(self._generator, positive=trial.positive)
            sets = units if trial.widths is None else some
            bad: Mapping[str, Failure] = self._search.find(graph, sets, functools.partial(self._try, graph, trial))
            if bad and (bad := self._confirmed(graph, [names for names in units if bad.keys() & set(names)], bad, trial)):
                return {name: failure.reason for name, failure in bad.items()}
        return {}

    def _confirmed(
        self, graph: UnitGraph, units: Sequence[tuple[str, ...]], bad: Mapping[str, Failure], suspect: Trial
    ) -> Mapping[str, Failure]:
        """Return which groups are wrong with their units in order: some models look at the order of units, not at which there
        are. An exception has nothing to do with the order. Of groups that fail for one cause, one is tried.
        """
        if raised := {name: failure for name, failure in bad.items() if failure.module is not None}:
            return raised
        causes: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        for tied in units:
            causes.setdefault(cause(tied, next(bad[name] for name in tied if name in bad)), []).append(tied)
        if len(causes) < len(units):
            found = self._confirmed(graph, [sets[0] for sets in causes.values()], bad, suspect)
            return {name: bad[name] for sets in causes.values() if set(sets[0]) & found.keys() for t in sets for name in t}
        largest = max(graph.groups[name].size for names in units for name in names)
        bits = [Trial(0, bit=bit) for bit in range((largest - 1).bit_length())]
        for trial in (suspect, *self._schedule, *bits):
            if bad := self._search.find(graph, units, functools.partial(self._try, graph, trial._replace(mixed=False))):
                return bad
        return {}

    def _try(self, graph: UnitGraph, trial: Trial, names: Sequence[str]) -> Failure | None:
        """Return why a mask over some groups is not exact, or None if it is."""
        reason, exact = self._compare(graph, trial, names)
        sets = [tied for tied in graph.tied_sets if set(tied) <= set(names)]
        if reason is not None or exact or len(sets) == 1:
            return reason
        # What other groups change may hide an error: each group is judged by what it changes itself.
        alone = (self._compare(graph, trial, tied)[0] for tied in sets)
        return next((why for why in alone if why is not None), None)

    def _compare(self, graph: UnitGraph, trial: Trial, names: Sequence[str]) -> tuple[Failure | None, bool]:
        """Return why the gated and the narrow model differ under a mask over some groups, or None if they do not.

        Returns:
            The reason, and whether the two are equal up to rounding, whatever the mask has changed.
        """
        if trial.training and not self.training:
            trial = trial._replace(training=False)
        if self._refusal is not None:
            return Failure(self._refusal), False
        try:
            keep, small = self._cut(graph, trial, names)
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
            return Failure(f"the compacted model fails: {_described(error)}", ""), False
        put_back = _keep_buffers(small)
        found: PassRecord | Failure
        try:
            found = self._record(small, trial.training)
        except Exception as error:  # noqa: BLE001
            found = Failure(f"the compacted model fails: {_described(error)}", blamed(error, small))
            if self._is_accepted:  # what the gated model does says no more
                return self._told(graph, trial, names, found, exact=False)
        try:
            with kept_norms(self._dense, graph, keep):
                expected = self._record(self._dense, trial.training)
            accepted = self._is_accepted or _finite(expected.outputs)
        except Exception as error:  # noqa: BLE001
            if self._is_accepted:
                why = Failure(f"the gated model fails: {_described(error)}")
                return self._told(graph, trial, names, why, exact=False)
            accepted = False
        if not accepted:
            self._find_inputs()
            return self._compare(graph, trial, names)
        self._is_accepted = True
        if isinstance(found, Failure):
            return self._told(graph, trial, names, found, exact=False)
        if not self._by_module and not expected.has_operators_of(found):
            self._by_module = True
            return self._compare(graph, trial, names)
        undefined = trial.fewest == 1 and any(
            is_undefined(a) and is_undefined(b) for a, b in zip(expected.outputs, found.outputs, strict=False)
        )
        put_back()  # a pass in train mode changes statistics
        reason, exact = self._judge(graph, trial, small, expected, found)
        if undefined and reason is None:
            # Statistics of one unit are not defined, and say nothing of the others.
            return self._compare(graph, trial._replace(fewest=2), names)
        return self._told(graph, trial, names, None if reason is None else Failure(reason), exact)

    def _told(
        self, graph: UnitGraph, trial: Trial, names: Sequence[str], failure: Failure | None, exact: bool
    ) -> tuple[Failure | None, bool]:
        """Return the answer of a trial; in train mode it counts only if the model can be compared there."""
        if failure is None or not trial.training:
            return failure, exact
        if not self._compares_training:
            return self._compare(graph, trial._replace(training=False), names)
        return replace(failure, reason=f"in training, {failure.reason}"), exact

    def _cut(self, graph: UnitGraph, trial: Trial, names: Sequence[str]) -> tuple[Mapping[str, Tensor], nn.Module]:
        """Gate the dense copy; the mask, and the narrow model."""
        first, keep = self._masks.draw(graph, set(names), trial)
        self._state.zero_dropped(graph, keep)
        self._state.restore_buffers()
        moved = [name for name in names if trial.mixed and not bool(keep[name].all())]
        # What is zeroed is what is cut away, so the narrow copy can be taken from this one.
        if not trial.twice:
            return keep, narrow_module(self._dense, graph, keep, self.rules, graph.rotated_indices(keep, moved))
        places = graph.rotated_indices(first, moved)
        between = narrow_module(self._dense, graph, first, self.rules, places)
        indices = {
            name: {dim: torch.argsort(places[name][dim])[torch.searchsorted(places[name][dim].sort()[0], index)]
                   for dim, index in axes.items()}
            for name, axes in (graph.kept_indices(keep) | graph.kept_constants(keep)).items()
        }  # fmt: skip
        return keep, narrow_module(between, graph, keep, self.rules, indices)

    def _judge(
        self, graph: UnitGraph, trial: Trial, small: nn.Module, expected: PassRecord, found: PassRecord
    ) -> tuple[str | None, bool]:
        if [t.shape for t in expected.outputs] != [t.shape for t in found.outputs]:
            return "removing units changes the shape of the output", False
        loosely = bool(graph.norms)
        inside = list(expected.pairs(found, loosely=loosely))
        outside = list(zip(expected.outputs, found.outputs, strict=True))
        if not any(t.is_floating_point() or t.is_complex() for t, _ in (*inside, *outside)):
            return "no floating-point value reaches the output, so nothing can be compared", False
        defined = [trial.fewest > 1 or not (is_undefined(a) and is_undefined(b)) for a, b in outside]
        outside = [both for both, counts in zip(outside, defined, strict=True) if counts]
        floor = rounding_floor(a for a, _ in inside)
        if _are_equal(outside, [0.0] * len(outside), is_output=True) and _are_equal(inside, [floor] * len(inside)):
            return None, True
        noise = self._noise(graph, trial, small, expected, found, defined)
        if noise is not None:
            outer = [_NOISE_FACTOR * size for size in noise[0]]
            inner = [max(floor, _NOISE_FACTOR * size) for size in noise[1]]
            if _are_equal(outside, outer, is_output=True) and _are_equal(inside, inner):
                return None, True
        self._state.restore()
        try:
            whole = self._record(self._dense, trial.training)
        except Exception:  # noqa: BLE001
            whole = expected  # train mode refuses the inputs, as a batch norm may one example
        if [t.shape for t in whole.outputs] != [t.shape for t in expected.outputs]:
            whole = expected
        triples = list(expected.located_pairs(found, whole, loosely=loosely))
        if len(triples) != len(inside):
            triples = [(op, (a, b, a)) for op, (a, b) in expected.located_pairs(found, loosely=loosely)]
        compared = ((op, compare_tensors(before, a, b, floor)) for op, (a, b, before) in triples)
        differing = [(op, reason) for op, reason in compared if reason is not None][:1]
        first = "".join(f": the first values that differ are those of {op}" for op, _ in differing)
        outputs = [output for output, counts in zip(whole.outputs, defined, strict=True) if counts]
        for before, (a, b) in zip(outputs, outside, strict=True):
            if (reason := compare_tensors(before, a, b, is_output=True)) is not None:
                return f"{reason}{first}", False
        for _, reason in differing:
            return f"{reason}, inside the model{first}", False
        return None, False

    def _noise(
        self,
        graph: UnitGraph,
        trial: Trial,
        small: nn.Module,
        expected: PassRecord,
        found: PassRecord,
        defined: Sequence[bool],
    ) -> tuple[list[float], list[float]] | None:
        """Return the change of the outputs and values of the narrow model if its entries change by rounding.

        A batch norm of few values magnifies rounding a thousandfold, and several of them more than any fixed bound allows.
        None where the entries are kept in a lesser dtype than that of the pass, or where
        the pass is another with them.
        """
        if self._is_lean:
            return None
        loosely = bool(graph.norms)
        with torch.no_grad():
            for entry in named_entries(small).values():
                if entry.is_floating_point():
                    signs = torch.randint(0, 2, entry.shape, generator=self._generator).to(entry) * 2 - 1
                    entry.mul_(1 + _NOISE * torch.finfo(entry.dtype).eps * signs)
        try:
            moved = self._record(small, trial.training)
        except Exception:  # noqa: BLE001
            return None
        triples = list(expected.pairs(found, moved, loosely=loosely))
        if [t.shape for t in moved.outputs] != [t.shape for t in found.outputs] or len(triples) != sum(
            1 for _ in expected.pairs(found, loosely=loosely)
        ):
            return None
        outputs = zip(found.outputs, moved.outputs, defined, strict=True)
        return [_distance(a, b) for a, b, counts in outputs if counts], [_distance(a, b) for _, a, b in triples]

    @functools.cached_property
    def _compares_training(self) -> bool:
        """Whether outputs in train mode can be compared: the model accepts it, and draws nothing at random there."""
        if not self.training:
            return False
        self._state.restore()
        try:
            whole, again = (self._record(self._dense, True, seed).outputs for seed in (0, 1))
        except Exception:  # noqa: BLE001
            return False
        return all(torch.allclose(a, b, equal_nan=True) for a, b in zip(whole, again, strict=False))


def _are_equal(pairs: Iterable[tuple[Tensor, ...]], floors: Sequence[float], *, is_output: bool = False) -> bool:
    return all(
        compare_tensors(a, a, b, floor, is_output=is_output) is None for (a, b), floor in zip(pairs, floors, strict=True)
    )


def _distance(a: Tensor, b: Tensor) -> float:
    if a.dtype != torch.float64 or not a.numel():
        return 0.0  # one step of a lesser dtype may be as large as an error
    return float((a - b).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _keep_buffers(model: nn.Module) -> Callable[[], None]:
    """Return what gives all buffers of a model the values again that they have now."""
    homes = [(buffers_of(module), name) for module in model.modules() for name in buffers_of(module)]
    kept = [(home, name, home[name]) for home, name in homes]
    before = {id(buffer): buffer.clone() for _, _, buffer in kept if buffer is not None}

    def put_back() -> None:
        for home, name, buffer in kept:
            home[name] = None if buffer is None else before[id(buffer)]  # a record may hold the other one

    return put_back


def _described(error: Exception) -> str:
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{user_line(frames)}"
