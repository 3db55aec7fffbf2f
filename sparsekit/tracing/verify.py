"""The last word on every group: a model under gates must equal the model without the units."""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.labels.source import user_line
from sparsekit.layers import LayerRule
from sparsekit.surgery.kept_norms import kept_norms
from sparsekit.surgery.rebuild import copy_with, named_entries, narrow_module
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.live import LiveEntries, gated_axes
from sparsekit.tracing.tokens import random_tokens
from sparsekit.tracing.train_mode import TrainMode, WithoutDropout, train_without_dropout

__all__ = ["Verifier", "tied_sets"]

_RATIOS = (0.5, 0.3, 0.8, 0.5, 0.3, 0.6)  # share kept in successive random masks
_MASKS, _FEWEST, _MANY_NUMBERS = 6, 2, 2_000_000  # masks tried, and fewer of them on large models; never by the clock
_TRIALS = 64  # bound on the work of finding the groups at fault
_TOLERANCE = {torch.float64: 1e-8, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_LOOSE = 1e-3


def _finite(outputs: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in outputs if t.is_floating_point())


@dataclass
class Verifier:
    """Compares gated and compacted copies of a model.

    Args:
        model: In eval mode; not changed.
        inputs: What it is called on.
        rules: The user's layer rules.
        training: What the model does in train mode, to compare there too, dropout aside; None does not.
        dtype: In which to compare; where the model cannot run in it, in its own.
    """

    model: nn.Module
    inputs: ModelInputs
    rules: Mapping[type[nn.Module], LayerRule] | None = None
    training: TrainMode | None = None
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(20130)
        entries = named_entries(self.model)
        try:
            self._enter(LiveEntries(entries, self.dtype, self._generator))
            drawn = random_tokens(self._dense, self.inputs, self._generator)
            self._inputs = drawn.prepared(self.dtype, self._generator)
            finite = _finite(self._run(self._dense))
        except Exception:  # noqa: BLE001 (a model that fixes its dtype, a device without float64: compare in its own)
            self._enter(LiveEntries(entries, None, self._generator))
            self._inputs = self.inputs.prepared(None, self._generator)
            finite = False
        if not finite:
            dtype = next((t.dtype for t in named_entries(self._dense).values() if t.is_floating_point()), None)
            with contextlib.suppress(Exception):  # what random inputs break, the user's own may not
                if not _finite(self._run(self._dense)):
                    self._inputs = self.inputs.prepared(dtype, None)
        self._masks = _MASKS if sum(t.numel() for t in entries.values()) < _MANY_NUMBERS else _FEWEST
        self.trials = 0

    def _enter(self, live: LiveEntries) -> None:
        self._live, self._dense = live, copy_with(self.model, live.values)

    def _run(self, model: nn.Module, seed: int = 0) -> list[Tensor]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the accelerators, for good
            return find_tensors(self._inputs.call(model))

    def failures(self, graph: UnitGraph) -> dict[str, str]:
        """Find the groups whose removal is not exact.

        Returns:
            Group name → reason; empty if all is well.
        """
        # What fails is often all of one kind, and is found sooner where it lies together.
        units = sorted(tied_sets(graph), key=lambda names: graph.groups[names[0]].kind)
        self.trials = 0
        self._gated = gated_axes(graph, self._live.values)
        bad: dict[str, str] = {}
        for ratio in _RATIOS[: self._masks]:
            self._bisect(graph, units, bad, functools.partial(self._trial, graph, ratio))
            if bad:
                return bad
        if self.training is not None:
            self._bisect(graph, units, bad, functools.partial(self._training_trial, graph, self.training))
        return bad

    def _bisect(
        self, graph: UnitGraph, units: Sequence[tuple[str, ...]], bad: dict[str, str], trial: Callable[[list[str]], str | None]
    ) -> None:
        if not units:
            return
        reason = trial([name for tied in units for name in tied])
        if reason is None:
            return
        if len(units) == 1 or self.trials >= _TRIALS:
            bad |= dict.fromkeys((name for tied in units for name in tied), reason)
            return
        half = len(units) // 2
        before = len(bad)
        self._bisect(graph, units[:half], bad, trial)
        self._bisect(graph, units[half:], bad, trial)
        if len(bad) == before:
            bad |= dict.fromkeys((name for tied in units for name in tied), f"only jointly: {reason}")
            return

    def _trial(self, graph: UnitGraph, ratio: float, names: Sequence[str]) -> str | None:
        """Why a random mask over some groups is not exact, or None if it is."""
        self.trials += 1
        keep = self._mask(graph, set(names), ratio)
        kept = torch.cat(list(keep.values())).numpy()
        self._live.silence(self._gated, kept)
        try:
            with kept_norms(self._dense, graph, keep):
                expected = self._run(self._dense)
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
            return f"the gated model fails: {_described(error)}"
        try:
            # What is silenced is what is cut away, so the narrow copy can be taken from the silenced one.
            found = self._run(narrow_module(self._dense, graph, keep, self.rules))
        except Exception as error:  # noqa: BLE001
            return f"the compacted model fails: {_described(error)}"
        return self._difference(expected, found)

    def _training_trial(self, graph: UnitGraph, mode: TrainMode, names: Sequence[str]) -> str | None:
        """The same in train mode. A model that is random there, or refuses the inputs, is taken to be well."""
        inputs, self._inputs = self._inputs, mode.inputs(self._inputs)
        try:
            train_without_dropout(self._dense)
            with WithoutDropout():
                try:
                    runs = [self._run(self._dense, seed) for seed in (0, 1)]
                except Exception:  # noqa: BLE001 (a batch norm may refuse a single example)
                    return None
                reason = None if self._difference(*runs) else self._trial(graph, _RATIOS[0], names)
        finally:
            self._inputs = inputs
            self._dense.eval()
            self._live.restore_buffers()
        return reason and f"in training, {reason}"

    def _difference(self, expected: list[Tensor], found: list[Tensor]) -> str | None:
        if [t.shape for t in expected] != [t.shape for t in found]:
            return "removing units changes the shape of the output"
        for a, b in zip(expected, found, strict=True):
            if not a.is_floating_point():
                if not torch.equal(a, b):
                    return "removing units changes the output"
                continue
            if not a.numel():
                continue
            tolerance = _TOLERANCE.get(a.dtype, _LOOSE)
            live = torch.isfinite(a)
            if not bool(live.any()):
                return "the output is infinite or NaN on the example inputs, so nothing can be compared"
            if not torch.equal(live, torch.isfinite(b)):
                return "removing units makes values infinite or NaN"
            scale, worst = float(a[live].abs().max()), float((a[live] - b[live]).abs().max())
            if worst > tolerance * max(scale, 1e-30):
                return f"removing units changes the output by {worst / max(scale, 1e-30):.1e} of its size"
        return None

    def _mask(self, graph: UnitGraph, names: set[str], ratio: float) -> dict[str, Tensor]:
        keep: dict[str, Tensor] = {}
        for name, group in graph.groups.items():
            chosen = torch.ones(group.size, dtype=torch.bool)
            if name in names:
                order = torch.randperm(group.size, generator=self._generator)
                chosen[order[max(1, math.ceil(ratio * group.size)) :]] = False
            keep[name] = chosen
        return keep


def tied_sets(graph: UnitGraph) -> list[tuple[str, ...]]:
    """The groups in sets that keep equally many units, in the order of the graph; most sets have one group."""
    left = dict.fromkeys(graph.groups)
    sets: list[set[str]] = []
    for tied in graph.ties:
        overlapping = [s for s in sets if s & set(tied)]
        sets = [s for s in sets if s not in overlapping] + [set(tied).union(*overlapping)]
    found: list[tuple[str, ...]] = []
    for name in left:
        owner = next((s for s in sets if name in s), {name})
        names = tuple(other for other in left if other in owner)
        if names[0] == name:
            found.append(names)
    return found


def _described(error: Exception) -> str:
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{user_line(frames)}"
