"""Timing of calls, with models in eval mode."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from sparsekit.rng import same_random_state
from sparsekit.tracing.inputs import find_tensors


def device_of(model: nn.Module, *inputs: Any) -> torch.device:
    """Return the device of a model or, if it has no parameters, of its inputs."""
    return next((tensor.device for tensor in [*model.parameters(), *find_tensors(inputs)]), torch.device("cpu"))


def stopwatch(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that makes a call and returns the seconds until the device has finished."""
    synchronize = torch.get_device_module(device).synchronize

    def timed(call: Callable[[], object]) -> float:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - start

    return timed


@contextlib.contextmanager
def evaluated(*models: nn.Module) -> Iterator[None]:
    """Put models into eval mode inside the block; afterwards, each module gets its own mode back."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def measured(*models: nn.Module) -> Iterator[None]:
    """Call code of a user on models in eval mode and without gradients. Modes and random states are put back afterwards."""
    with evaluated(*models), same_random_state(), torch.inference_mode(mode=False), torch.no_grad():
        yield


def median_ms(call: Callable[[], object], device: torch.device, *, seconds: float = 0.5) -> float:
    """Return the median milliseconds of a call, after two to warm up; takes `seconds`, and five calls."""
    timed = stopwatch(device)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 200 and (len(times) < 7 or time.perf_counter() - begun < seconds):
        times.append(timed(call))
    return float(np.median(times[2:])) * 1000
