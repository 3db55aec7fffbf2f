"""Judgment: whether a cut model computes what the gated one does, up to rounding."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.passes import Snapshot
from sparsekit.tracing.record import Record
from sparsekit.tracing.session import Session

# Allowed errors: as a share of the change that the mask makes, and as a share of the values, for rounding.
_ALLOWED = {torch.float64: (1e-5, 1e-10), torch.bfloat16: (1e-1, 3e-2), torch.float16: (5e-2, 5e-3)}
_LOOSE = (1e-3, 1e-5)
_OUTLIER = 1e6  # larger values, such as an added mask, do not show rounding
_GRADIENTS, _TINY = 1e-6, 1e-12  # allowed errors of a gradient, as a share of its largest entry, and for zeros
_NOISE = 4.0  # relative change of entries, in units of rounding, to measure how much rounding is amplified
_NOISE_FACTOR = 16.0


@dataclass
class Judgment:
    """Compares two passes; if they differ by more than rounding, also with a pass of the whole model.

    Args:
        session: Runs further passes.
        small: The narrow model.
        expected: The pass of the gated model.
        found: The pass of the narrow model.
        training: Whether they ran in train mode.
        loosely: Where the operators of a module differ, compare the values before and after.
        skips_undefined: Ignore outputs that are NaN or infinite in both passes, such as the variance of one unit.
    """

    session: Session
    small: Snapshot
    expected: Record
    found: Record
    training: bool
    loosely: bool
    skips_undefined: bool
    _defined: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.expected.outputs, self.found.outputs, strict=False)
        self._defined = [not (self.skips_undefined and _is_undefined(a) and _is_undefined(b)) for a, b in pairs]

    @property
    def is_partial(self) -> bool:
        """Whether some outputs were ignored."""
        return not all(self._defined)

    @property
    def drawn_otherwise(self) -> str | None:
        """The first operator that draws random numbers, if the two passes draw numbers of different shapes; else None."""
        return self.expected.draw or self.found.draw if self.expected.draws != self.found.draws else None

    def reason(self) -> tuple[str | None, bool]:
        """Return why the passes differ, or None if they agree, and whether they are equal up to rounding."""
        reason, exact = self._compared()
        return (reason, exact) if reason is not None else (self._gradients(), exact)

    def _gradients(self) -> str | None:
        for key, own in self.expected.gradients.items():
            other = self.found.gradients.get(key, torch.zeros_like(own))
            if own.shape != other.shape or not own.numel() or not bool(torch.isfinite(own).all()):
                continue
            if not bool((own - other).abs().max() <= _GRADIENTS * own.abs().max() + _TINY):
                return f"removing units changes the gradient of {key[1]!r}"
        return None

    def _compared(self) -> tuple[str | None, bool]:
        expected, found = self.expected, self.found
        if [t.shape for t in expected.outputs] != [t.shape for t in found.outputs]:
            return "removing units changes the shape of the output", False
        for op, numbers, others in expected.numbers_with(found):
            if not _are_close(numbers, others, self.session.precision):
                told = ", ".join(f"{a:.4g} → {b:.4g}" for a, b in zip(numbers, others, strict=False) if a != b)
                return f"removing units changes a number that {op} computes with ({told})", False
        for name, own in expected.written.items():
            other = found.written.get(name, own)
            if own.shape == other.shape and not torch.equal(own, other):
                return f"removing units changes what a pass leaves in the buffer {name!r}", False
        inside = [tensors for _, tensors in expected.pairs(found, loosely=self.loosely)]
        outside = list(zip(expected.outputs, found.outputs, strict=True))
        if not any(t.is_floating_point() or t.is_complex() for t, _ in (*inside, *outside)):
            return "no floating-point value reaches the output, so nothing can be compared", False
        outside = [both for both, counts in zip(outside, self._defined, strict=True) if counts]
        floor = _rounding_floor(a for a, _ in inside)
        if _are_equal(outside, [0.0] * len(outside), is_output=True) and _are_equal(inside, [floor] * len(inside)):
            return None, True
        noise = self._noise(len(inside))
        if noise is not None:
            outer = [_NOISE_FACTOR * size for size in noise[0]]
            inner = [max(floor, _NOISE_FACTOR * size) for size in noise[1]]
            if _are_equal(outside, outer, is_output=True) and _are_equal(inside, inner):
                return None, True
        return self._against_whole(floor, inside, outside), False

    def _against_whole(self, floor: float, inside: Sequence[object], outside: Sequence[tuple[Tensor, Tensor]]) -> str | None:
        """Return which value differs by more than a share of the change that the mask makes in it."""
        expected, session = self.expected, self.session
        session.state.restore()
        try:
            whole = session.run(session.dense, training=self.training)
        except Exception:  # noqa: BLE001
            whole = expected  # train mode fails on the inputs, as a batch norm may on one example
        if [t.shape for t in whole.outputs] != [t.shape for t in expected.outputs]:
            whole = expected
        triples = list(expected.pairs(self.found, whole, loosely=self.loosely))
        if len(triples) != len(inside):
            triples = [(op, (a, b, a)) for op, (a, b) in expected.pairs(self.found, loosely=self.loosely)]
        compared = ((op, _difference(before, a, b, floor)) for op, (a, b, before) in triples)
        differing = [(op, reason) for op, reason in compared if reason is not None][:1]
        first = "".join(f": the first values that differ are those of {op}" for op, _ in differing)
        outputs = [output for output, counts in zip(whole.outputs, self._defined, strict=True) if counts]
        for before, (a, b) in zip(outputs, outside, strict=True):
            if (reason := _difference(before, a, b, is_output=True)) is not None:
                return f"{reason}{first}"
        return f"{differing[0][1]}, inside the model{first}" if differing else None

    def _noise(self, values: int) -> tuple[list[float], list[float]] | None:
        """Return the change of the outputs and values of the narrow model if its entries change by rounding.

        A batch norm of few values amplifies rounding a thousandfold, and several of them more than any fixed bound allows. None
        if the entries have a lower precision than the pass, or if the pass with changed entries fails or differs in shapes.
        """
        session, expected, found = self.session, self.expected, self.found
        if session.lean:
            return None
        with torch.no_grad():
            for entry in named_entries(self.small.model).values():
                if entry.is_floating_point():
                    signs = torch.randint(0, 2, entry.shape, generator=session.generator).to(entry) * 2 - 1
                    entry.mul_(1 + _NOISE * torch.finfo(entry.dtype).eps * signs)
        try:
            moved = session.run(self.small, training=self.training)
        except Exception:  # noqa: BLE001
            return None
        triples = [tensors for _, tensors in expected.pairs(found, moved, loosely=self.loosely)]
        if [t.shape for t in moved.outputs] != [t.shape for t in found.outputs] or len(triples) != values:
            return None
        outputs = zip(found.outputs, moved.outputs, self._defined, strict=True)
        return [_distance(a, b) for a, b, counts in outputs if counts], [_distance(a, b) for _, a, b in triples]


def _are_equal(pairs: Iterable[tuple[Tensor, ...]], floors: Sequence[float], *, is_output: bool = False) -> bool:
    return all(_difference(a, a, b, floor, is_output=is_output) is None for (a, b), floor in zip(pairs, floors, strict=True))


def _are_close(own: Sequence[complex], other: Sequence[complex], dtype: torch.dtype) -> bool:
    share, _ = _ALLOWED.get(dtype, _LOOSE)
    pairs = itertools.zip_longest(own, other)
    return all(
        a == b or (a != a and b != b) or (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= share * abs(a))
        for a, b in pairs
    )


def _distance(a: Tensor, b: Tensor) -> float:
    if a.dtype != torch.float64 or not a.numel():
        return 0.0  # in a lower precision, a rounding step may be as large as an error
    return float((a - b).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _is_undefined(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.numel()) and not bool(torch.isfinite(tensor).any())


def _rounding_floor(values: Iterable[Tensor]) -> float:
    """Return an error that rounding may make anywhere in a pass, such as where large values cancel."""
    largest = 0.0
    dtype = torch.float64
    for value in values:
        if value.is_floating_point() and value.numel():
            dtype = value.dtype if torch.finfo(value.dtype).eps > torch.finfo(dtype).eps else dtype
            low, high = value.aminmax()
            size = max(-float(low), float(high))
            largest = max(largest, size) if size < _OUTLIER else largest
    return 64 * torch.finfo(dtype).eps * largest


def _difference(whole: Tensor, expected: Tensor, found: Tensor, floor: float = 0.0, *, is_output: bool = False) -> str | None:
    """Return why a value of the compacted model differs from the gated one, or None if it does not.

    Errors are judged channel by channel, relative to the change that the mask makes there. Otherwise, one channel of a residual
    stream with values in the thousands would hide the errors of all others. Every axis is tried as the channel axis.

    Args:
        whole: The value with all units.
        expected: The value of the gated model.
        found: The value of the compacted model.
        floor: An error that is allowed everywhere.
        is_output: Whether it is an output, which must have finite values, and must be equal if it is not floating-point.
    """
    if torch.equal(expected, found) and (not is_output or not expected.is_floating_point()):
        return None
    if expected.is_complex():
        whole, expected, found = (torch.view_as_real(t) for t in (whole, expected, found))
    if not expected.is_floating_point():
        return "removing units changes the output"
    if not expected.numel():
        return None
    if not is_output and bool((found - expected).abs().max() <= floor):
        return None
    finite = torch.isfinite(expected)
    if not bool(finite.any()) and is_output:
        return "the output is infinite or NaN on the example inputs, so nothing can be compared"
    if not torch.equal(finite, torch.isfinite(found)):
        return "removing units makes values infinite or NaN"
    share, rounding = _ALLOWED.get(expected.dtype, _LOOSE)
    error, size, change = (
        torch.where(finite & torch.isfinite(t), t, 0).abs().double() for t in (found - expected, expected, whole - expected)
    )
    for axis in range(max(1, expected.dim())):
        others = [other for other in range(expected.dim()) if other != axis]
        worst, scale, changed = (t.amax(others) if others else t for t in (error, size, change))
        if bool((worst > share * changed + rounding * scale + floor).any()):
            return f"removing units changes the output by {float((worst / scale.clamp(min=1e-30)).max()):.1e} of its size"
    return None
