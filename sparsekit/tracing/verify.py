"""The last word on every group: a model under gates must equal the model without the units."""

import functools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.layers import LayerRule
from sparsekit.layers.labels.values import user_line
from sparsekit.surgery.kept_norms import kept_norms
from sparsekit.surgery.rebuild import copy_with, named_entries, narrow_module
from sparsekit.tracing.inputs import ModelInputs, find_tensors, with_tokens
from sparsekit.tracing.passes import train_without_dropout

_RATIOS = (0.5, 0.3, 0.8, 0.5, 0.3, 0.6)  # share kept in successive random masks
_MASKS, _FEWEST, _MANY_NUMBERS = 6, 2, 2_000_000  # masks tried, and fewer of them on large models; never by the clock
_TRIALS = 64  # bound on the work of finding the groups at fault
# Allowed errors: a share of what the mask has changed, and a share of the values for what rounding does.
_ALLOWED = {torch.float64: (1e-5, 1e-10), torch.bfloat16: (1e-1, 3e-2), torch.float16: (5e-2, 5e-3)}
_LOOSE = (1e-3, 1e-5)


def _finite(outputs: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in outputs if t.is_floating_point())


class LiveEntries:
    """Entries with live statistics, scales and biases, so that a fresh zero cannot hide an error.

    Floating ones have `dtype`, or their own for None. Those of the model are read only.
    """

    def __init__(self, entries: Mapping[str, Tensor], dtype: torch.dtype | None, generator: torch.Generator) -> None:
        self.values: dict[str, Tensor] = {}
        self._origin: dict[int, Tensor] = {}  # by the id of the value: what it is restored from
        self._silenced: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []
        done: dict[int, Tensor] = {}
        for name, own in entries.items():
            if id(own) not in done:
                done[id(own)] = self._one(name, own.detach(), dtype, generator)
                if not isinstance(own, nn.Parameter):
                    self._buffers.append(done[id(own)])
            self.values[name] = done[id(own)]

    def _one(self, name: str, own: Tensor, dtype: torch.dtype | None, generator: torch.Generator) -> Tensor:
        value = own.to(dtype if own.is_floating_point() and dtype is not None else own.dtype, copy=True)
        self._origin[id(value)] = own
        if own.is_floating_point() and (own.dim() <= 1 or not _any(own)):
            noise = torch.empty(own.shape, dtype=value.dtype).uniform_(-1.0, 1.0, generator=generator).to(own.device)
            if name.endswith("running_var"):
                value.copy_(1.0 + 0.5 * noise)
            elif name.endswith("running_mean"):
                value.copy_(0.5 * noise)
            else:
                value.add_(0.3 * noise)
            self._origin[id(value)] = value.clone()
        return value

    def restore_buffers(self) -> None:
        """Undo what a pass in train mode does to statistics."""
        self._restore(self._buffers)

    def silence(self, graph: UnitGraph, keep: Mapping[str, Tensor]) -> None:
        """Zero what gates of 0 would zero, in place, having put back what was zeroed before.

        In place, since a gated copy of every entry is most of the cost of verifying a large model. `keep`: group name → bool.
        """
        self.restore()
        for name, stays in keep.items():
            for piece in graph.groups[name].slices if not bool(stays.all()) else ():
                if piece.gated:
                    value = self.values[piece.name]
                    self._silenced[id(value)] = value
                    value.index_fill_(piece.dim, piece.index[~stays].reshape(-1).to(value.device), 0)

    def restore(self) -> None:
        """Put back what was zeroed."""
        self._restore(self._silenced.values())
        self._silenced = {}

    def _restore(self, values: Iterable[Tensor]) -> None:
        for value in values:
            value.copy_(self._origin[id(value)])


def _any(tensor: Tensor) -> bool:
    # The first numbers nearly always tell.
    return bool(tensor.reshape(-1)[:8].any()) or bool(tensor.any())


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
        for dtype in (self.dtype, None):  # a model may fix its dtype, or its device may lack float64
            self._live = LiveEntries(entries, dtype, self._generator)
            self._dense = copy_with(self.model, self._live.values)
            if self._accepts(with_tokens(self.model, self.calls, self._generator), dtype) or self._accepts(self.calls, dtype):
                break
        self._masks = _MASKS if sum(t.numel() for t in entries.values()) < _MANY_NUMBERS else _FEWEST
        self.trials = 0

    def _accepts(self, calls: Sequence[ModelInputs], dtype: torch.dtype | None) -> bool:
        """Whether the model runs on `calls`, which are used from now on: disturbed, or as they are where that breaks it."""
        self._calls = [inputs.prepared(dtype, self._generator) for inputs in calls]
        try:
            self._whole = self._run(self._dense)
            if not _finite(self._whole):
                disturbed, self._calls = self._calls, [inputs.prepared(dtype, None) for inputs in calls]
                plain = self._run(self._dense)
                if _finite(plain):
                    self._whole = plain
                else:
                    self._calls = disturbed
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises)
            self._refusal = f"the model fails: {_described(error)}"
            return False
        self._refusal = None
        return True

    def _run(self, model: nn.Module, *, training: bool = False, seed: int = 0) -> list[Tensor]:
        calls = self._calls
        if training:
            train_without_dropout(model)
            calls = [calls[number].doubled() if doubled else calls[number] for number, doubled in self.training]
        else:
            model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self._live.restore_buffers()
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the accelerators, for good
            return [tensor for inputs in calls for tensor in find_tensors(inputs.call(model))]

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
        bad: dict[str, str] = {}
        for number, ratio in enumerate(_RATIOS[: self._masks]):
            self._bisect(graph, units, bad, functools.partial(self._trial, graph, ratio, bool(number % 2)))
            if bad:
                break
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

    def _trial(self, graph: UnitGraph, ratio: float, training: bool, names: Sequence[str]) -> str | None:
        """Why a random mask over some groups is not exact, in eval mode or in train mode, or None if it is."""
        self.trials += 1
        keep = self._mask(graph, set(names), ratio)
        self._live.silence(graph, keep)
        self._live.restore_buffers()
        try:
            # What is silenced is what is cut away, so the narrow copy can be taken from the silenced one.
            small = narrow_module(self._dense, graph, keep, self.rules)
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
            return f"the compacted model fails: {_described(error)}"
        if not training or not self.training:
            return self._compare(graph, keep, small)
        reason = self._compare(graph, keep, small, training=True)
        # A model that is random in train mode is taken to be well there.
        return None if reason is None or self._is_random_in_training() else f"in training, {reason}"

    def _compare(self, graph: UnitGraph, keep: Mapping[str, Tensor], small: nn.Module, *, training: bool = False) -> str | None:
        """Why the outputs of the gated and the narrow model differ, or None if they do not."""
        try:
            with kept_norms(self._dense, graph, keep):
                expected = self._run(self._dense, training=training)
        except Exception as error:  # noqa: BLE001
            return f"the gated model fails: {_described(error)}"
        try:
            found = self._run(small, training=training)
        except Exception as error:  # noqa: BLE001
            return f"the compacted model fails: {_described(error)}"
        if [t.shape for t in expected] != [t.shape for t in found]:
            return "removing units changes the shape of the output"
        if _first_difference(expected, expected, found) is None:
            return None  # whatever the mask has changed
        whole = self._whole_in_training if training else self._whole
        agree = whole is not None and [t.shape for t in whole] == [t.shape for t in expected]
        return _first_difference(whole if whole is not None and agree else expected, expected, found)

    @functools.cached_property
    def _whole_in_training(self) -> list[Tensor] | None:
        """Outputs with all units in train mode; None where the model refuses the inputs, as a batch norm may one example."""
        self._live.restore()
        try:
            return self._run(self._dense, training=True)
        except Exception:  # noqa: BLE001
            return None

    def _is_random_in_training(self) -> bool:
        """Whether outputs depend on what the model draws in train mode; true as well where it refuses that mode."""
        whole = self._whole_in_training
        if whole is None:
            return True
        self._live.restore()
        again = self._run(self._dense, training=True, seed=1)
        return any(not torch.allclose(a, b, equal_nan=True) for a, b in zip(whole, again, strict=False))

    def _mask(self, graph: UnitGraph, names: set[str], ratio: float) -> dict[str, Tensor]:
        keep: dict[str, Tensor] = {}
        for name, group in graph.groups.items():
            chosen = torch.ones(group.size, dtype=torch.bool)
            if name in names:
                order = torch.randperm(group.size, generator=self._generator)
                chosen[order[max(1, math.ceil(ratio * group.size)) :]] = False
            keep[name] = chosen
        return keep


def _described(error: Exception) -> str:
    frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{user_line(frames)}"


def _first_difference(wholes: Sequence[Tensor], expected: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    reasons = (_judged(*tensors) for tensors in zip(wholes, expected, found, strict=True))
    return next((reason for reason in reasons if reason is not None), None)


def _judged(whole: Tensor, expected: Tensor, found: Tensor) -> str | None:
    """Why an output of the compacted model is not that of the gated one, or None if it is.

    Errors are judged channel by channel against what the mask has changed there: beside one channel of a residual stream with
    values in the thousands, the errors of all others would be nothing. Any axis may be the one of the channels.
    """
    if expected.is_complex():
        return _judged(*(torch.view_as_real(t) for t in (whole, expected, found)))
    if not expected.is_floating_point():
        return None if torch.equal(expected, found) else "removing units changes the output"
    if not expected.numel():
        return None
    live = torch.isfinite(expected)
    if not bool(live.any()):
        return "the output is infinite or NaN on the example inputs, so nothing can be compared"
    if not torch.equal(live, torch.isfinite(found)):
        return "removing units makes values infinite or NaN"
    share, rounding = _ALLOWED.get(expected.dtype, _LOOSE)
    error, size, change = (
        torch.where(live & torch.isfinite(t), t, 0).abs().double() for t in (found - expected, expected, whole - expected)
    )
    for axis in range(max(1, expected.dim())):
        others = [other for other in range(expected.dim()) if other != axis]
        worst, scale, changed = (t.amax(others) if others else t for t in (error, size, change))
        if bool((worst > share * changed + rounding * scale).any()):
            return f"removing units changes the output by {float((worst / scale.clamp(min=1e-30)).max()):.1e} of its size"
    return None
