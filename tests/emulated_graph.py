"""What a CUDA graph does, on a CPU: the operators of a step run again on the memory that they were recorded with.

Python does not run again, its numbers are those of the recording, inputs are read where they lay, and what lies in memory of
the recording is lost with every replay: it is filled with NaN and -1 before. Operators that read from the device, ask the
allocator for a size that depends on values, copy from the host, or draw random numbers cannot be recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["EmulatedRecorder"]

WAITS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "tolist"}
FROM_THE_HOST = {"lift_fresh", "lift"}
DRAWS = {
    "bernoulli",
    "bernoulli_",
    "native_dropout",
    "rand",
    "randn",
    "uniform_",
    "normal_",
    "randperm",
    "randint",
    "multinomial",
}


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def memory(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def why_not(func: Any, args: Any, kwargs: Any) -> str | None:
    """Why CUDA could not record an operator."""
    name = func.overloadpacket.__name__
    if name in WAITS:
        return f"{name} waits for the device"
    if name in FROM_THE_HOST:
        return f"{name} copies from the host"
    if name in DRAWS:
        return f"{name} draws random numbers"
    if name in {"index", "index_put", "index_put_"} and any(t.dtype is torch.bool for t in tensors_in(args[1])):
        return f"{name} with a mask waits for the device"
    if name == "repeat_interleave":
        return f"{name} waits for the device"
    return None


class _Strict(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reason = why_not(func, args, kwargs)
        if reason is not None and "waits" in reason:
            raise RuntimeError(f"called a synchronizing operation: {reason}")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    def __init__(self, names: Counter[str]) -> None:
        super().__init__()
        self.names = names
        self.calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self.own: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.reads: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reason = why_not(func, args, kwargs)
        if reason is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")
        self.names[func.overloadpacket.__name__] += 1
        given = tensors_in((args, kwargs))
        for tensor in given:
            # What it writes must be put back; to save all that comes from outside is simple, and models are small.
            if key(tensor) not in self.own and key(tensor) not in self.before:
                self.before[key(tensor)] = tensor, memory(tensor).clone()
        out = func(*args, **kwargs)
        known = {key(tensor) for tensor in given}
        fresh = [(place, found) for place, found in enumerate(tensors_in(out)) if key(found) not in known]
        for _, found in fresh:
            self.own[key(found)] = found
        self.calls.append((func, args, kwargs, fresh))
        return out

    def put_back(self) -> None:
        for tensor, saved in self.before.values():
            memory(tensor).copy_(saved)
        self.spoil()

    def spoil(self) -> None:
        for tensor in self.own.values():
            memory(tensor).fill_(255)

    def replay(self) -> None:
        self.spoil()
        with torch.no_grad():
            for func, args, kwargs, fresh in self.calls:
                found = tensors_in(func(*args, **kwargs))
                for place, tensor in fresh:
                    tensor.copy_(found[place])


class EmulatedRecorder:
    """Takes the place of `CudaRecorder`.

    Args:
        device: Of the steps.
    """

    made: list[EmulatedRecorder]
    """All of them, for tests; set by the fixture."""

    def __init__(self, device: torch.device) -> None:
        self.refused: str | None = None
        self.recordings = 0
        self.replays = 0
        self.names: Counter[str] = Counter()
        self.made.append(self)

    @contextmanager
    def strictly(self) -> Iterator[None]:
        with _Strict():
            yield

    def record(self, step: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        recording = _Recording(self.names)
        try:
            with recording:
                outputs = step()
        finally:
            recording.put_back()
        self.recordings += 1

        def run() -> None:
            self.replays += 1
            recording.replay()

        return run, outputs
