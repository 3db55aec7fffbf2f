"""Replay: runs steps, and from the third of a kind on a recording of it, where the device has a recorder."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit_fl.lanes.recorder import Outputs, Recorder

__all__ = ["Replay"]

_log = logging.getLogger(__name__)

_WARM = 2  # steps before one is recorded: libraries set themselves up in the first, and a kind seen once never pays
_RECORDINGS = 32  # that are kept; each holds memory of the device


@dataclass(eq=False)
class _Kind:
    times: int = 0
    run: Callable[[], None] | None = None
    outputs: Outputs = ()


class Replay:
    """Runs steps that read and write tensors which stay where they are.

    The third step of a kind is recorded. It then runs twice from the same state, once plainly and once from the recording;
    where these differ by more than rounding, or where the step cannot be recorded, a warning says why and all steps stay plain.

    A recording does what Python asked for when it was made. So numbers that change, such as learning rates, must be tensors,
    and a `kind` must hold everything else on which a step depends.

    Args:
        recorder: Of the device; None records nothing.
        changed: Returns the tensors that a step changes.
    """

    def __init__(self, recorder: Recorder | None, changed: Callable[[], Sequence[Tensor]]) -> None:
        self._recorder = recorder
        self._changed = changed
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def forget(self) -> None:
        """Drop all recordings, since tensors that they know were replaced."""
        self._kinds.clear()

    def __call__(self, kind: Hashable, step: Callable[[], Outputs]) -> Outputs:
        """Run a step.

        Args:
            kind: Steps of equal kinds ask the same of the device.
            step: Returns tensors.

        Returns:
            What the step returns; the caller's own.
        """
        recorder = self._recorder
        if recorder is None or recorder.refused is not None:
            return step()
        known = self._kinds.setdefault(kind, _Kind())
        self._kinds.move_to_end(kind)
        while len(self._kinds) > _RECORDINGS:
            self._kinds.popitem(last=False)
        if known.run is not None:
            known.run()
            return tuple(output.clone() for output in known.outputs)
        known.times += 1
        return step() if known.times <= _WARM else self._record(recorder, known, step)

    def _record(self, recorder: Recorder, known: _Kind, step: Callable[[], Outputs]) -> Outputs:
        """Run a step, recording it on the way."""
        before = [tensor.clone() for tensor in self._changed()]
        try:
            with recorder.strictly():
                plain = step()
            after = [tensor.clone() for tensor in self._changed()]
            self._put(before)
            run, outputs = recorder.record(step)
            run()
            again = tuple(output.clone() for output in outputs)
        except Exception as error:  # noqa: BLE001 - a step that fails by itself fails again below, where nobody catches it
            self._put(before)
            self._refuse(recorder, _told(error))
            _log.debug("why", exc_info=error)
            return step()
        if not _close([*again, *self._changed()], [*plain, *after]):
            self._put(after)
            self._refuse(recorder, "a recorded step gave other numbers than the same step by itself")
            return plain
        known.run, known.outputs = run, outputs
        return again

    def _put(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._changed(), values, strict=True):
            tensor.copy_(value)

    def _refuse(self, recorder: Recorder, reason: str) -> None:
        recorder.refused = reason
        self.forget()
        _log.warning("steps of several clients are not recorded, and every kernel is started by itself: %s", reason)


def _told(error: BaseException) -> str:
    """The first line of an error, and of the one that led to it: that in the step, where ending the recording failed too."""
    found = [error] if error.__context__ is None else [error, error.__context__]
    return ", after ".join(f"{type(one).__name__}: {one}".partition("\n")[0] for one in found)


def _close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether tensors are equal within rounding; the only number that is read from the device, once per recording."""
    wrong = [_differ(one, other) for one, other in zip(found, expected, strict=True) if other.numel()]
    return not bool(torch.stack(wrong).any()) if wrong else True


def _differ(found: Tensor, expected: Tensor) -> Tensor:
    """bool (): whether values differ by more than the square root of the type's precision, over the largest value."""
    same = (found == expected) | ((found != found) & (expected != expected))  # NaN is where NaN was
    if not expected.is_floating_point():
        return ~same.all()
    gap = (found - expected).masked_fill(same, 0.0).abs().max()
    size = expected.masked_fill(~expected.isfinite(), 0.0).abs().max()
    inside: Tensor = gap <= torch.finfo(expected.dtype).eps ** 0.5 * size
    return ~inside  # NaN is not inside
