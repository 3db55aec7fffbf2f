"""Record: what one pass computes, operator by operator: values, or shapes alone, and plain numbers.

Outputs alone hide errors: an argmax, a comparison, a clamp or a number taken out with `.item()` returns the same for wrong
values. Verification therefore compares every value on which the outputs depend and whose shape does not depend on the mask,
the plain numbers that operators compute with, and the buffers that the pass has written. Without values, as on the meta device,
code that reads a width shows as another number, shape or operator.
"""

import functools
import hashlib
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import DispatchMode, storage_id
from sparsekit.labels.facts import LIBRARIES, user_line
from sparsekit.rng import seeded
from sparsekit.tracing.inputs import ModelInputs, find_numbers, find_tensors
from sparsekit.tracing.ops.call import tensors_of
from sparsekit.tracing.passes import ReadOnly, in_float64, signature

_WHOLE = 8_192  # larger values are sampled immediately, so that a record takes little memory
_SAMPLE = 4_096  # maximum number of elements of a value that are compared
_CALL = ModelInputs.call.__code__  # frames outside of it do not belong to the model
_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.from_numpy, Tensor.new_tensor})
"""Functions that make a tensor of numbers without calling an operator."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_NUMBERS = 64  # maximum number of elements of a tensor with values that are recorded in a pass without values
_NOWHERE = ("<", 0)
_ITEM = torch.ops.aten._local_scalar_dense.default
_COUNTS = (int, float, complex)


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

    `line` is the line of code, `frame` the module call around it, and `numbers` are the plain numbers that it computes with.
    `reads` and `writes` are numbers of memory, and `values` are floating-point results. A pass without values has `shapes`.
    """

    name: str
    line: tuple[str, int]
    frame: tuple[str, int]
    numbers: tuple[Any, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    values: Sequence[_Value] = ()
    shapes: object = None

    def __str__(self) -> str:
        """Return its name and its line: `'div' at model.py:12 (return h / n)`."""
        return f"{self.name.split('::')[-1].partition('.')[0].rstrip('_')!r}{user_line([self.line])}"


class Record(DispatchMode):
    """Records the operators of one pass.

    Dependence is followed through memory, which gets a number when it is allocated: if an operator writes to memory, all of it
    depends on the memory that the operator reads.

    Args:
        guard: Protects tensors from being written to.
        model: If given, calls of its modules are recorded too. Passes whose operators differ in one module can then be compared
            in the others.
        unordered: Modules that process units one by one: their results are compared, but not the values inside them.
        values: Whether to record values. Otherwise, shapes and the arguments that are not tensors are recorded.
        precise: Whether to compute in float64.
    """

    def __init__(
        self,
        guard: ReadOnly | None = None,
        model: nn.Module | None = None,
        unordered: Iterable[nn.Module] = (),
        *,
        values: bool = True,
        precise: bool = False,
    ) -> None:
        super().__init__()
        self._guard, self._values, self._precise = guard, values, precise
        self._reads = not values and model is not None and any(parameter.is_meta for parameter in model.parameters())
        self.outputs: list[Tensor] = []
        self.returned: tuple[list[torch.Size], list[complex]] = [], []  # shapes and plain numbers, of a pass without values
        self._ops: list[_Op] = []
        self._left: set[int] = set()  # memory of outputs, and of tensors in attributes
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

    def finish(
        self, outputs: Iterable[Tensor], left: Iterable[Tensor], buffers: Mapping[str, Tensor], restored: Iterable[Tensor]
    ) -> None:
        """Record the outputs of a finished pass, and the tensors that it has left in attributes and buffers.

        `restored`: tensors that will get other values now, so that theirs are copied.
        """
        own = {storage_id(tensor) for tensor in restored}
        for output in outputs:
            self._left.add(self._numbers[storage_id(output)])
            self.outputs.append(output.detach().clone() if storage_id(output) in own else output.detach())
        written = {number for op in self._ops for number in op.writes}
        for name, buffer in buffers.items():
            if (number := self._numbers[storage_id(buffer)]) in written and _is_compared(buffer):
                value = _Value(sample(buffer.detach()).clone(), buffer.shape, number)
                self._ops.append(_Op(f"buffer {name}", _NOWHERE, self._frames[0], writes=(number,), values=[value]))
                self._left.add(number)
            elif number in written:
                self.written[name] = buffer.detach().clone()
        self._left |= {self._numbers[storage_id(tensor)] for tensor in left}
        for value in (value for storage in own for value in self._held.get(storage, ())):
            value.tensor = sample(value.tensor).clone()
        self._held = {}
        self._unhook()

    @classmethod
    def of_shapes(cls, model: nn.Module, inputs: ModelInputs) -> "Record":
        """Record a pass of a private copy without values. Every such pass starts from the same random state."""
        record = cls(model=model, values=False)
        try:
            with torch.no_grad(), seeded(0), _Made(record):
                returned = inputs.call(model, record)
        finally:
            record._unhook()
        record.returned = [tensor.shape for tensor in find_tensors(returned)], find_numbers(returned)
        return record

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look_away(self, more: int, *_: Any) -> None:
        self._unseen += more

    def _enter(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._calls[name] = self._calls.get(name, 0) + 1
        self._frames.append((name, self._calls[name]))

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._values:
            found = () if self._unseen else find_tensors(output)
            values = [self._value(tensor) for tensor in found if _is_compared(tensor)]
            self._ops.append(_Op("return", _NOWHERE, self._frames[-1], values=values))
        if len(self._frames) > 1:
            self._frames.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._values:
            result = func(*args, **kwargs)
            self._note_shapes(func, args, kwargs, result)
            return result
        called = signature(func)
        if called.written and self._guard is not None:
            args, kwargs = self._guard.protected(func, args, kwargs)
        entering = set(map(storage_id, tensors_of((*args, *kwargs.values()))))
        changed: set[int] = set()
        if called.written:
            named = dict(zip(called.names, args, strict=False)) | kwargs
            changed = {storage_id(tensor) for name in called.written for tensor in tensors_of((named.get(name),))}
            for storage in changed:
                for value in self._held.pop(storage, ()):
                    value.tensor = sample(value.tensor).clone()
        result = in_float64(func, args, kwargs) if self._precise else func(*args, **kwargs)
        reads = tuple(map(self._numbers.__getitem__, entering))
        if func is _ITEM:
            self._taken_out.update(reads)
        writes, values = list(map(self._numbers.__getitem__, changed)), []
        for tensor in tensors_of((result,)):
            storage = storage_id(tensor)
            if storage not in entering:
                self._numbers.pop(storage, None)  # newly allocated, maybe with the id of an earlier one
            writes.append(self._numbers[storage])
            if called.makes and not self._unseen and _is_compared(tensor):
                values.append(self._value(tensor))
        op = _Op(func.name(), _line(), self._frames[-1], (), reads, tuple(writes), values)
        if not self._unseen and entering:  # without inputs, as in `arange`, numbers are lengths, whose uses are compared
            computed = called.values(args, kwargs, computed=True)
            op.numbers = tuple(v for v in computed if isinstance(v, _COUNTS))
        if called.draws:
            self.draws.append(tuple(tensor.shape for tensor in tensors_of((result,))))
            self.draw = self.draw or str(op)
        self._ops.append(op)
        return result

    def _note_shapes(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        computed, others = (signature(func).values(args, kwargs, computed=which) for which in (True, False))
        numbers = [v for v in computed if isinstance(v, _COUNTS)]
        for tensor in tensors_of(computed) if self._reads else ():  # one with values among others without is a number
            if not tensor.is_meta and tensor.numel() <= _NUMBERS:
                numbers += tensor.flatten().tolist()
        self.note(func.name(), tuple(numbers), ([tuple(tensor.shape) for tensor in tensors_of((result,))], _shown(others)))

    def note(self, name: str, numbers: tuple[Any, ...], shapes: object) -> None:
        """Record an operator without values, if the model runs."""
        if len(self._frames) > 1:
            self._ops.append(_Op(name, _NOWHERE, self._frames[-1], numbers, shapes=shapes))

    def _value(self, tensor: Tensor) -> _Value:
        storage = storage_id(tensor)
        if tensor.numel() > _WHOLE:
            return _Value(sample(tensor).clone(), tensor.shape, self._numbers[storage])
        value = _Value(tensor, tensor.shape, self._numbers[storage])
        self._held.setdefault(storage, []).append(value)
        return value

    @functools.cached_property
    def _live(self) -> set[int]:
        """Ids, as in `_Op.reads`, of memory that affects outputs, attributes, written buffers, or tensors read as numbers."""
        live = self._left | self._taken_out
        for op in reversed(self._ops):
            if not live.isdisjoint(op.writes):
                live.update(op.reads)
        return live

    @property
    def is_cast(self) -> bool:
        """Whether the pass computes values in a lower precision than float64."""
        values = (value.tensor for op in self._ops for value in op.values)
        return any(tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in values)

    def has_operators_of(self, other: "Record") -> bool:
        """Return whether two passes have run the same operators in the same order."""
        return _have_same_names([self._ops, other._ops])

    def numbers_with(self, other: "Record") -> Iterator[tuple[_Op, tuple[complex, ...], tuple[complex, ...]]]:
        """Yield the operators on which the outputs depend, each with its numbers here and in another pass of the same code."""
        for own, second in _aligned([self._ops, other._ops], loosely=False):
            if own.numbers and not self._live.isdisjoint(own.writes):
                yield own, own.numbers, second.numbers

    def digest(self, home: str) -> str:
        """Return a hash of the operators that ran inside the module `home`, for a record of shapes without values.

        Modules have equal hashes if the same operators ran in the same submodules, with equal shapes and plain numbers.
        """
        inside = [
            (op.frame[0].removeprefix(home), op.frame[1], op.name, op.numbers, op.shapes)
            for op in self._ops
            if _is_inside(op.frame, home)
        ]
        return hashlib.sha256(repr(inside).encode()).hexdigest()

    def difference(self, other: "Record", within: Collection[str] = (), *, shapes: bool = True) -> str | None:
        """Return what differs in another pass without values of the same code, outside of some modules, or None.

        Args:
            other: A record of the same model with fewer units.
            within: Names of modules that may differ, with those inside them.
            shapes: Whether shapes count. Shapes of values with an axis of units differ.
        """
        if self.returned[0] != other.returned[0]:
            return "removing units changes the shape of the output"
        if self.returned[1] != other.returned[1]:
            return "removing units changes the output"
        own, others = _by_frame(self._ops), _by_frame(other._ops)
        for frame in dict.fromkeys((*own, *others)):
            if any(_is_inside(frame, home) for home in within):
                continue
            where = frame[0] or "the model"
            for first, second in zip(own.get(frame, ()), others.get(frame, ()), strict=False):
                same = (first.name, first.numbers) == (second.name, second.numbers)
                if not same or (shapes and first.shapes != second.shapes):
                    return f"removing units changes what {first.name!r} computes in {where!r}"
            if len(own.get(frame, ())) != len(others.get(frame, ())):
                return f"removing units changes which operators run in {where!r}"
        return None

    def pairs(self, *others: "Record", loosely: bool = False) -> Iterator[tuple[_Op, tuple[Tensor, ...]]]:
        """Yield samples of the values on which the outputs depend, with those of other passes, and the operator that made them.

        Args:
            others: Passes of the same code. Values of another shape have no counterpart.
            loosely: Where the operators of a module differ, compare those before and after the difference.
        """
        for ops in _aligned([self._ops, *(other._ops for other in others)], loosely):
            for values in zip(*(op.values for op in ops), strict=False):
                first = values[0]
                if first.memory in self._live and all(value.shape == first.shape for value in values):
                    yield ops[0], tuple((v.tensor if v.tensor.shape != v.shape else sample(v.tensor)).detach() for v in values)


class _Made(TorchFunctionMode):
    """Records the numbers of tensors that are made past all operators."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS:
            self._record.note(func.__name__, _shown((args[-1:], (kwargs or {}).get("data"))), tuple(result.shape))
        return result


def _shown(value: Any) -> Any:
    """Return the part of an argument to compare: a number or name itself, the numbers of an array, the shape of a tensor."""
    if isinstance(value, (list, tuple, range)):
        return tuple(map(_shown, value))
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return (type(value).__name__, value.tobytes()) if isinstance(value, np.ndarray) else type(value).__name__


def _is_inside(frame: tuple[str, int], home: str) -> bool:
    return frame[0] == home or frame[0].startswith(f"{home}.")


def _line() -> tuple[str, int]:
    """Return file and line of the innermost running code outside of torch and this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _CALL:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return _NOWHERE


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
