"""Tape: records a pass on tensors without values: operators, shapes and plain numbers, for each call of a module.

On the meta device, nothing else can be compared. Code that depends on a width has another number, shape or operator.
"""

import functools
import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import DispatchMode
from sparsekit.rng import seeded
from sparsekit.tracing.inputs import ModelInputs, find_numbers, find_tensors
from sparsekit.tracing.ops.call import tensors_of
from sparsekit.tracing.passes import scalar_arguments

_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.from_numpy, Tensor.new_tensor})
"""Functions that make a tensor of numbers without calling an operator."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_VALUES = 64  # maximum number of elements of a tensor with values that are recorded


def _shown(value: Any) -> Any:
    """Return the part of an argument to compare: a number or name itself, the numbers of an array, the shape of a tensor."""
    if isinstance(value, (list, tuple, range)):
        return tuple(map(_shown, value))
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return (type(value).__name__, value.tobytes()) if isinstance(value, np.ndarray) else type(value).__name__


class Tape(DispatchMode):
    """Records one pass.

    Args:
        model: A private copy, whose modules are followed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
        self._counts: dict[str, int] = {}
        self._frames: list[list[tuple[Any, ...]]] = []
        self._reads = any(parameter.is_meta for parameter in model.parameters())  # then, tensors with values are numbers
        self.model = model
        self.returned: tuple[list[torch.Size], list[Any]] = [], []  # shapes and plain numbers

    def run(self, inputs: ModelInputs) -> "Tape":
        """Record a pass. Every pass starts from the same random state."""
        hooks = []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, name), prepend=True))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with torch.no_grad(), seeded(0), _Made(self):
                returned = inputs.call(self.model, self)
        finally:
            for hook in hooks:
                hook.remove()
        self.returned = [tensor.shape for tensor in find_tensors(returned)], find_numbers(returned)
        return self

    def _enter(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        self._frames.append(self.calls.setdefault((name, self._counts[name]), []))

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._frames:
            self._frames.pop()

    def note(self, *entry: Any) -> None:
        """Record a call under the running module."""
        if self._frames:
            self._frames[-1].append(entry)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        places, names = scalar_arguments(func)
        given = [v for at, v in enumerate(args) if at in places] + [v for name, v in kwargs.items() if name in names]
        others = [v for at, v in enumerate(args) if at not in places] + [v for name, v in kwargs.items() if name not in names]
        numbers = [v for v in given if isinstance(v, (int, float, complex))]
        for tensor in tensors_of(given) if self._reads else ():
            if not tensor.is_meta and tensor.numel() <= _VALUES:
                numbers += tensor.flatten().tolist()
        made = [tuple(tensor.shape) for tensor in tensors_of((result,))]
        self.note(func.name(), (made, _shown(others)), numbers)
        return result

    def digest(self, home: str) -> str:
        """Return a key that is equal for modules with equal passes."""
        inside = [calls for (name, _), calls in self.calls.items() if name == home or name.startswith(f"{home}.")]
        return hashlib.sha256(repr(inside).encode()).hexdigest()

    def difference(self, other: "Tape", within: Collection[str] = (), *, shapes: bool = True) -> str | None:
        """Return what differs in another pass of the same code, outside of some modules, or None.

        Args:
            other: A tape of the same model with fewer units.
            within: Names of modules that may differ, with those inside them.
            shapes: Whether shapes count. Shapes of values with an axis of units differ.
        """

        def outside(frame: tuple[str, int]) -> bool:
            return not any(frame[0] == home or frame[0].startswith(f"{home}.") for home in within)

        if self.returned[0] != other.returned[0]:
            return "removing units changes the shape of the output"
        if self.returned[1] != other.returned[1]:
            return "removing units changes the output"
        for frame in filter(outside, dict.fromkeys((*self.calls, *other.calls))):
            own, others = self.calls.get(frame, []), other.calls.get(frame, [])
            for first, second in zip(own, others, strict=False):
                if first[::2] != second[::2] or (shapes and first != second):
                    return f"removing units changes what {first[0]!r} computes in {frame[0] or 'the model'!r}"
            if len(own) != len(others):
                return f"removing units changes which operators run in {frame[0] or 'the model'!r}"
        return None


class _Made(TorchFunctionMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS:
            self._tape.note(func.__name__, tuple(result.shape), _shown((args[-1:], (kwargs or {}).get("data"))))
        return result
