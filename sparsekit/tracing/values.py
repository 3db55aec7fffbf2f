"""Which value of a pass is computed from which, and what modules were called on."""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from sparsekit._torch import DispatchMode, operator_packet, operator_schema, storage_id
from sparsekit.surgery.removed import Part
from sparsekit.tracing.inputs import find_tensors
from sparsekit.tracing.ops.call import tensors_of

_ADD = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
_RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)


@dataclass(frozen=True)
class Op:
    """An operator of a pass: numbers of the values that it reads and makes, and the modules that run, outermost first."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    modules: tuple[str, ...]
    flops: int


@dataclass(eq=False)
class ModuleCall:
    """A call of a module.

    Args:
        module: Qualified name.
        given: Place or name of an input → number of its value.
        adds: Number of additions before and after the call.
        end: Number of operators after it.
        returned: Numbers of all values in the output.
        outputs: Numbers of the output, or of the items of a tuple; None for what is no tensor.
        alone: Whether the output is no tuple.
    """

    module: str
    given: dict[int | str, int]
    adds: tuple[int, int]
    end: int = 0
    returned: tuple[int, ...] = ()
    outputs: tuple[int | None, ...] = ()
    alone: bool = True

    def part(self, gives: Literal["input", "zeros"], argument: int | str) -> Part | None:
        """What stands in its place; None where the output has no tensor."""
        place = next((at for at, value in enumerate(self.outputs) if value is not None), None)
        return None if place is None else Part(self.module, gives, argument, place, 0 if self.alone else len(self.outputs))


def _is_addition(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    return (
        func in _ADD
        and all(isinstance(arg, Tensor) for arg in args[:2])
        and args[0].shape == args[1].shape
        and args[0].dtype == args[1].dtype
        and (kwargs or {}).get("alpha", 1) == 1
    )


class Values(DispatchMode):
    """Numbers every value of a pass. A value that is written to gets a new number, as do all tensors that share its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.adds: list[int] = []  # numbers of operators that add two values of one shape: the first that they read
        self.calls: list[ModuleCall] = []
        self.relus: dict[int, int] = {}  # result → what it was computed from
        self._running: list[ModuleCall] = []
        self._number: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._sharing: dict[int, list[Tensor]] = {}
        self._next = 0

    def number(self, tensor: Tensor) -> int:
        """The number of a value."""
        return self._number[id(tensor)] if id(tensor) in self._number else self._renew(tensor)

    def _renew(self, tensor: Tensor) -> int:
        if id(tensor) not in self._number:
            self._alive.append(tensor)
            self._sharing.setdefault(storage_id(tensor), []).append(tensor)
        self._number[id(tensor)] = self._next
        self._next += 1
        return self._next - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = [self.number(tensor) for tensor in tensors_of((*args, *(kwargs or {}).values()))]
        result = func(*args, **(kwargs or {}))
        leaving = list(tensors_of((result,)))
        if operator_schema(func).is_mutable:
            written = {storage_id(tensor) for tensor in leaving}
            others = [tensor for memory in written for tensor in self._sharing.get(memory, ())]
            reads += [self.number(tensor) for tensor in others]
            leaving += [tensor for tensor in others if all(tensor is not own for own in leaving)]
        makes = tuple(self._renew(tensor) for tensor in leaving)
        packet = operator_packet(func)
        flops = int(flop_registry[packet](*args, **(kwargs or {}), out_val=result)) if packet in flop_registry else 0
        if _is_addition(func, args, kwargs):
            self.adds.append(len(self.ops))
        if func in _RELU:
            self.relus[makes[0]] = reads[0]
        self.ops.append(Op(tuple(reads), makes, tuple(call.module for call in self._running), flops))
        return result

    def follow(self, model: nn.Module) -> None:
        """Note the calls of all modules of a private copy."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        given = {key: self.number(value) for key, value in inputs if isinstance(value, Tensor)}
        self._running.append(ModuleCall(name, given, (len(self.adds), len(self.adds))))

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        call = self._running.pop()
        call.adds, call.end = (call.adds[0], len(self.adds)), len(self.ops)
        call.alone = not isinstance(output, tuple)
        call.outputs = tuple(
            self.number(item) if isinstance(item, Tensor) else None for item in ((output,) if call.alone else output)
        )
        call.returned = tuple(self.number(tensor) for tensor in find_tensors(output))
        self.calls.append(call)


class WithZeros(DispatchMode):
    """Puts zeros in place of one operand of some additions, by their number in the pass."""

    def __init__(self, operands: Collection[tuple[int, int]]) -> None:
        super().__init__()
        self._operands, self._seen = dict(operands), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_addition(func, args, kwargs):
            place = self._operands.get(self._seen)
            self._seen += 1
            if place is not None:
                args = list(args)
                args[place] = args[place].zero_() if place == 0 and func is _ADD[1] else torch.zeros_like(args[place])
        return func(*args, **(kwargs or {}))
