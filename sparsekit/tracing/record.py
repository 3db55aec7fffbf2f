"""PassRecord: the values and numbers that one pass computes with, operator by operator.

Outputs alone hide errors: an argmax, a comparison, a clamp or a number taken out with `.item()` returns the same for wrong
values. Verification therefore compares every value on which the outputs depend and whose shape does not depend on the mask,
the plain numbers that operators compute with, and the buffers that the pass has written.
"""

import functools
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import DispatchMode, storage_id
from sparsekit.labels.facts import LIBRARIES, user_line
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.ops.call import tensors_of
from sparsekit.tracing.passes import ReadOnly, arguments_of, scalar_arguments

_WHOLE = 8_192  # larger values are sampled immediately, so that a record takes little memory
_SAMPLE = 4_096  # maximum number of elements of a value that are compared
_CALL = ModelInputs.call.__code__  # frames outside of it do not belong to the model
_ITEM = torch.ops.aten._local_scalar_dense.default
# Uninitialized memory differs from pass to pass. Circular padding, for example, allocates its result with new_empty.
_UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def sample(tensor: Tensor) -> Tensor:
    """Return every k-th position along the longest axes, so that some thousand elements are left.

    For tensors of equal shape, these are the same positions.
    """
    sizes, strides = list(tensor.shape), list(tensor.stride())
    total = tensor.numel()
    while total > _SAMPLE:
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        total = total // sizes[longest]
        sizes[longest] = (sizes[longest] + 1) // 2
        strides[longest] *= 2
        total *= sizes[longest]
    return tensor.as_strided(sizes, strides) if sizes != list(tensor.shape) else tensor


@dataclass(slots=True)
class _Value:
    """A value, or a sample of it, with its shape and the number of its memory."""

    tensor: Tensor
    shape: torch.Size
    memory: int


@dataclass(slots=True)
class _Op:
    """An operator call.

    `line` is the line of code, `frame` the module call around it. `reads` and `writes` are numbers of memory. `values` are the
    floating-point results, and `numbers` the plain numbers that it computes with.
    """

    name: str
    line: tuple[str, int]
    frame: tuple[str, int]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    values: list[_Value]
    numbers: tuple[complex, ...] = ()

    def __str__(self) -> str:
        """Return its name and its line: `'div' at model.py:12 (return h / n)`."""
        return f"{self.name.split('::')[-1].partition('.')[0].rstrip('_')!r}{user_line([self.line])}"


class PassRecord(DispatchMode):
    """Records the operators of one pass.

    Dependence is followed through memory, which gets a number when it is allocated: if an operator writes to memory, all of it
    depends on the memory that the operator reads.

    Args:
        guard: Protects tensors from being written to.
        model: If given, calls of its modules are recorded too. Passes whose operators differ in one module can then be compared
            in the others.
        unordered: Modules that process units one by one: their results are compared, but not the values inside them.
    """

    def __init__(
        self, guard: ReadOnly | None = None, model: nn.Module | None = None, unordered: Iterable[nn.Module] = ()
    ) -> None:
        super().__init__()
        self._guard = guard
        self.outputs: list[Tensor] = []
        self._ops: list[_Op] = []
        self._left: set[int] = set()  # memory of tensors in attributes
        self._taken_out: set[int] = set()  # memory of tensors that were converted to Python numbers
        self.draws: list[tuple[torch.Size, ...]] = []  # shapes of random numbers, in order
        self.draw = ""  # the operator that draws first, and its line
        self.gradients: dict[tuple[int, str], Tensor] = {}  # of inputs and parameters, by call
        self.written: dict[str, Tensor] = {}  # buffer of integers → what the pass has left in it
        self._numbers = defaultdict[int, int](itertools.count().__next__)  # storage → number of its memory
        self._held: dict[int, list[_Value]] = {}  # storage → values of it that are not samples
        self._frames: list[tuple[str, int]] = [("", 0)]
        self._calls: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._unseen = 0  # number of modules of `unordered` that are running
        for module in unordered:
            self._hooks.append(module.register_forward_pre_hook(functools.partial(self._look_away, 1), prepend=True))
            self._hooks.append(module.register_forward_hook(functools.partial(self._look_away, -1), always_call=True))
        for name, module in model.named_modules() if model is not None else ():
            enter = functools.partial(self._enter, name)
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def finish(self, outputs: Iterable[Tensor], left: Iterable[Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Record the outputs of a finished pass, and the tensors that it has left in attributes and buffers."""
        self.outputs += outputs
        written = {number for op in self._ops for number in op.writes}
        for name, buffer in buffers.items():
            if (number := self._numbers[storage_id(buffer)]) in written and _is_compared(buffer):
                value = _Value(sample(buffer.detach()).clone(), buffer.shape, number)
                self._ops.append(_Op(f"buffer {name}", ("<", 0), self._frames[0], (), (number,), [value]))
                self._left.add(number)
            elif number in written:
                self.written[name] = buffer.detach().clone()
        self._left |= {self._numbers[storage_id(tensor)] for tensor in left}
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._held = [], {}

    def _look_away(self, more: int, *_: Any) -> None:
        self._unseen += more

    def _enter(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._calls[name] = self._calls.get(name, 0) + 1
        self._frames.append((name, self._calls[name]))

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        found = () if self._unseen else find_tensors(output)
        values = [self._value(tensor) for tensor in found if _is_compared(tensor)]
        self._ops.append(_Op("return", ("<", 0), self._frames[-1], (), (), values))
        if len(self._frames) > 1:
            self._frames.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._guard is not None:
            args, kwargs = self._guard.protected(func, args, kwargs)
        entering = {storage_id(tensor) for tensor in tensors_of((*args, *kwargs.values()))}
        changed: set[int] = set()
        names, written = arguments_of(func)
        if written:
            given = dict(zip(names, args, strict=False)) | kwargs
            changed = {storage_id(tensor) for name in written for tensor in tensors_of((given.get(name),))}
            for storage in changed:
                for value in self._held.pop(storage, ()):
                    value.tensor = sample(value.tensor).clone()
        result = func(*args, **kwargs)
        reads = tuple(map(self._numbers.__getitem__, entering))
        if func is _ITEM:
            self._taken_out.update(reads)
        writes, values = list(map(self._numbers.__getitem__, changed)), []
        for tensor in tensors_of((result,)):
            storage = storage_id(tensor)
            if storage not in entering:
                self._numbers.pop(storage, None)  # newly allocated, maybe with the id of an earlier one
            writes.append(self._numbers[storage])
            made = not func.is_view and func.overloadpacket.__name__ not in _UNINITIALISED
            if made and not self._unseen and _is_compared(tensor):
                values.append(self._value(tensor))
        op = _Op(func.name(), _line(), self._frames[-1], reads, tuple(writes), values)
        if not self._unseen and entering:  # without inputs, as in `arange`, numbers are lengths, whose uses are compared
            places, words = scalar_arguments(func)
            given = [v for at, v in enumerate(args) if at in places] + [v for name, v in kwargs.items() if name in words]
            op.numbers = tuple(v for v in given if isinstance(v, int | float | complex))
        # An operator that takes a dropout draws nothing here: dropout is off in all passes.
        if torch.Tag.nondeterministic_seeded in func.tags and not any(name.startswith("dropout") for name in names):
            self.draws.append(tuple(tensor.shape for tensor in tensors_of((result,))))
            self.draw = self.draw or str(op)
        self._ops.append(op)
        return result

    def _value(self, tensor: Tensor) -> _Value:
        storage = storage_id(tensor)
        if tensor.numel() > _WHOLE:
            return _Value(sample(tensor).clone(), tensor.shape, self._numbers[storage])
        value = _Value(tensor, tensor.shape, self._numbers[storage])
        self._held.setdefault(storage, []).append(value)
        return value

    def _live(self) -> set[int]:
        """Return numbers of the memory that affects outputs, attributes set by the pass, or tensors read as Python numbers."""
        live = {self._numbers[storage_id(tensor)] for tensor in self.outputs} | self._left | self._taken_out
        for op in reversed(self._ops):
            if not live.isdisjoint(op.writes):
                live.update(op.reads)
        return live

    @property
    def is_cast(self) -> bool:
        """Whether the pass computes values in a lower precision than float64."""
        values = (value.tensor for op in self._ops for value in op.values)
        return any(tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in values)

    def has_operators_of(self, other: "PassRecord") -> bool:
        """Return whether two passes have run the same operators in the same order."""
        return _have_same_names([self._ops, other._ops])

    def numbers_with(self, other: "PassRecord") -> Iterator[tuple[_Op, tuple[complex, ...], tuple[complex, ...]]]:
        """Yield the operators on which the outputs depend, each with its numbers here and in another pass of the same code."""
        live = self._live()
        for own, second in _aligned([self._ops, other._ops], loosely=False):
            if own.numbers and not live.isdisjoint(own.writes):
                yield own, own.numbers, second.numbers

    def pairs(self, *others: "PassRecord", loosely: bool = False) -> Iterator[tuple[_Op, tuple[Tensor, ...]]]:
        """Yield samples of the values on which the outputs depend, with those of other passes, and the operator that made them.

        Args:
            others: Passes of the same code. Values of another shape have no counterpart.
            loosely: Where the operators of a module differ, compare those before and after the difference.
        """
        live = self._live()
        for ops in _aligned([self._ops, *(other._ops for other in others)], loosely):
            for values in zip(*(op.values for op in ops), strict=False):
                first = values[0]
                if first.memory in live and all(value.shape == first.shape for value in values):
                    yield ops[0], tuple((v.tensor if v.tensor.shape != v.shape else sample(v.tensor)).detach() for v in values)


def _line() -> tuple[str, int]:
    """Return file and line of the innermost running code outside of torch and this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _CALL:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "<", 0


def _is_compared(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided


def _aligned(passes: Sequence[list[_Op]], loosely: bool) -> Iterator[tuple[_Op, ...]]:
    """Yield corresponding operators of all passes."""
    if _have_same_names(passes):
        yield from zip(*passes, strict=True)
        return
    frames = [_by_frame(ops) for ops in passes]
    calls = [Counter(name for name, _ in own) for own in frames]
    for frame in frames[0]:
        if not all(frame in own and of[frame[0]] == calls[0][frame[0]] for own, of in zip(frames, calls, strict=True)):
            continue
        found = [other[frame] for other in frames]
        if _have_same_names(found):
            yield from zip(*found, strict=True)
        elif loosely:
            yield from _common_ends(found)


def _have_same_names(found: Sequence[list[_Op]]) -> bool:
    return len({tuple(op.name for op in ops) for ops in found}) == 1


def _by_frame(ops: Iterable[_Op]) -> dict[tuple[str, int], list[_Op]]:
    found: dict[tuple[str, int], list[_Op]] = {}
    for op in ops:
        found.setdefault(op.frame, []).append(op)
    return found


def _common_ends(found: Sequence[list[_Op]]) -> Iterator[tuple[_Op, ...]]:
    first = list(itertools.takewhile(_are_same, zip(*found, strict=False)))
    yield from first
    yield from itertools.takewhile(_are_same, zip(*(reversed(ops[len(first) :]) for ops in found), strict=False))


def _are_same(ops: Iterable[_Op]) -> bool:
    return len({op.name for op in ops}) == 1
