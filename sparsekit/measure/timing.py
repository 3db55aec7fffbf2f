"""Measure times of forward passes: of one call, or of two models in turns, in several runtimes."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from sparsekit.errors import InvalidValueError, require
from sparsekit.measure.budget import RUNTIMES
from sparsekit.surgery.onnx import onnx_of
from sparsekit.tracing.inputs import find_tensors, map_tensors
from sparsekit.tracing.modes import evaluated

_WARM, _LEAST, _TURNS = 2, 5, 100
"""Number of warm-up turns, and the minimum and usual maximum of measured turns."""
_TURN_SECONDS, _CALLS = 0.01, 200
"""Seconds for which a short call is repeated in a turn, to average out other load, and the largest number of repetitions."""
_SHORT = 0.1
"""Seconds of a call below which each timing begins with an untimed call, since the other model has filled the caches."""
_SPREAD, _PATIENCE = 1.2, 4
"""Largest ratio between the quartiles of a measurable speed-up, and by how much measuring may be prolonged to reach it."""


def device_of(model: nn.Module, *inputs: Any) -> torch.device:
    """Return the device of a model or, if it has no parameters, of its inputs."""
    return next((tensor.device for tensor in [*model.parameters(), *find_tensors(inputs)]), torch.device("cpu"))


def stopwatch(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that makes a call and returns the seconds until the device has finished.

    On a CPU with one thread, these are seconds of that thread's processor time, which do not grow if other programs use the
    machine. The time of a process goes in steps of 4 ms on Linux where a limit of processor time is set, as on many clusters.
    """
    synchronize = torch.get_device_module(device).synchronize
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and os.name != "nt"  # Windows counts in steps of 16 ms
    clock = time.thread_time if alone else time.perf_counter

    def timed(call: Callable[[], object]) -> float:
        synchronize()
        start = clock()
        call()
        synchronize()
        return clock() - start

    return timed


def median_ms(call: Callable[[], object], device: torch.device, *, seconds: float = 0.5) -> float:
    """Return the median milliseconds of a call, after two warm-up calls; measures for `seconds`, at least five calls."""
    timed = stopwatch(device)
    times: list[float] = []
    while len(times) < 200 and (len(times) < 7 or sum(times) < seconds):
        times.append(timed(call))
    return float(np.median(times[2:])) * 1000


@dataclass(frozen=True)
class TimePair:
    """Median milliseconds of a forward pass without gradients, before and after pruning.

    In each of the `turns`, both models run equally often, in random order. `faster` is the median over the turns of time
    before ÷ time after, with its quartiles `low` and `high`. It is not `measurable` if they are more than 20 % apart. `batch`
    is the number of examples in a pass. `threads` is 0 on another device than the CPU.
    """

    batch: int
    threads: int
    before_ms: float
    after_ms: float
    faster: float
    low: float
    high: float
    turns: int
    runtime: str = "eager"
    measurable: bool = True

    @property
    def speedup(self) -> str:
        """The factor with its quartiles, as in "1.52 (1.48 to 1.55)"; no factor if it cannot be measured."""
        if not self.measurable:
            return "not measurable: the machine is busy"
        return f"{self.faster:.2f} ({self.low:.2f} to {self.high:.2f})"

    @property
    def label(self) -> str:
        """Examples, threads and runtime, as in "8 examples, 1 thread"."""
        parts = [(self.batch, "example"), *([(self.threads, "thread")] if self.threads else [])]
        told = [f"{number} {what}{'s' if number > 1 else ''}" for number, what in parts]
        return ", ".join(told if self.runtime == "eager" else [*told, self.runtime])


def measure_pair(
    before: nn.Module, after: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seconds: float = 0.5
) -> tuple[TimePair, ...]:
    """Time two models in turns: for one example and for all of the inputs, with one thread and with all.

    If a model does not take one example, only all are timed. Each of the at most four measurements takes `seconds`.
    """
    everything = (args, dict(kwargs))
    batch = next((len(tensor) for tensor in find_tensors(everything) if tensor.dim()), 1)
    inputs = {batch: everything}
    if batch > 1:
        one = map_tensors(lambda tensor: tensor[:1] if tensor.dim() and len(tensor) == batch else tensor, everything)
        with contextlib.suppress(Exception), evaluated(before, after):  # a model may take one batch size only
            before(*one[0], **one[1])
            inputs = {1: one, **inputs}
    threads = sorted({1, torch.get_num_threads()}) if device_of(before, *everything).type == "cpu" else [0]
    return tuple(
        measure_turns(before, after, *own, batch=number, threads=count, seconds=seconds)
        for number, own in inputs.items()
        for count in threads
    )


def measure_turns(
    before: nn.Module,
    after: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    batch: int = 0,
    threads: int = 0,
    seconds: float = 0.5,
    runtime: str = "eager",
) -> TimePair:
    """Time two models in turns, both in eval mode. `batch` is only stored. With `threads` 0, torch's number is unchanged.

    Raises:
        MissingDependencyError: a package of the runtime is not installed.
    """
    own = torch.get_num_threads()
    try:
        if threads:
            torch.set_num_threads(threads)
        with torch.no_grad(), evaluated(before, after):
            first, second = (prepare(model, runtime, args, kwargs) for model in (before, after))
            pair = time_turns(first, second, stopwatch(device_of(before, args, kwargs)), seconds=seconds)
    finally:
        torch.set_num_threads(own)
    return replace(pair, batch=batch, threads=threads, runtime=runtime)


def time_turns(
    first: Callable[[], object],
    second: Callable[[], object],
    timed: Callable[[Callable[[], object]], float],
    *,
    seconds: float = 0.5,
) -> TimePair:
    """Time two calls alternately with the stopwatch `timed`, for `seconds`, or up to four times that if timings vary.

    Before each timing of a short call, it runs once untimed, so that the caches are as in a program that runs only this model.
    """
    order = np.random.default_rng(0)
    turns: list[tuple[float, float]] = []
    one = min(min(timed(first), timed(second)) for _ in range(_WARM))
    calls = min(_CALLS, max(1, round(_TURN_SECONDS / max(one, 1e-9))))

    def repeated(call: Callable[[], object]) -> None:
        for _ in range(calls):
            call()

    def mean(call: Callable[[], object]) -> float:
        if one < _SHORT:
            call()
        return timed(partial(repeated, call)) / calls

    low, middle, high = 0.0, 0.0, 0.0
    for part in range(1, _PATIENCE + 1):
        while len(turns) < _LEAST or (len(turns) < part * _TURNS and calls * sum(map(sum, turns)) < part * seconds):
            late = mean(second) if order.random() >= 0.5 else None
            turns.append((mean(first), mean(second) if late is None else late))
        low, middle, high = map(float, np.quantile([dense / small for dense, small in turns], [0.25, 0.5, 0.75]))
        if high <= _SPREAD * low:
            break
    old, new = map(float, 1000 * np.median(np.array(turns), axis=0))
    return TimePair(0, 0, old, new, middle, low, high, len(turns), measurable=high <= _SPREAD * low)


def prepare(model: nn.Module, runtime: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    """Return a call without arguments that runs a model, in eval mode, on its inputs.

    Raises:
        InvalidValueError: the runtime is unknown.
        MissingDependencyError: ONNX Runtime or the exporter's packages are not installed.
    """
    if runtime == "onnx":
        return _onnx(model, args, kwargs)
    if runtime == "eager":
        module: Callable[..., object] = model
    elif runtime == "compile":
        module = torch.compile(model)
    elif runtime == "export":
        module = torch.export.export(model, args, dict(kwargs)).module()
    else:
        raise InvalidValueError(f"a runtime must be one of {', '.join(RUNTIMES)}, got {runtime!r}")
    return lambda: module(*args, **kwargs)


def _onnx(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    onnxruntime = require("onnxruntime")
    program: Any = onnx_of(torch.export.export(model, args, dict(kwargs)))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    names = [entry.name for entry in session.get_inputs()]
    values = [tensor.detach().cpu().numpy() for tensor in find_tensors((args, dict(kwargs)))]
    given = dict(zip(names, values, strict=True))
    return lambda: session.run(None, given)
