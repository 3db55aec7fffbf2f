"""The widths that a device likes: what the channels of a layer should be a multiple of."""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from sparsekit.measure.clock import LatencyCache, stopwatch

_WIDTH, _STEPS, _SAVED = 64, (32, 16, 8, 4), 0.25
"""Channels of the widest convolution that is timed, the answers but 1, and the part of its share of the time that a narrower
one must save."""
_ROUNDS, _SECONDS = (3, 25), 1.0
"""Least and largest number of times that each convolution runs, and how long all of them together, unless that is too few."""


@cache
def best_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """The number of which widths should be multiples: fewer channels than the next multiple save no time.

    Kernels compute blocks of channels, as wide as a vector of the processor: 16 numbers with AVX-512, 8 with AVX2. The answer
    is the largest of 4, 8, 16 and 32 for which 64 channels less half of it save no more than a quarter of their share of the
    time, of 3×3 convolutions that read and that make them: with AVX-512, 56 take 1.04 times as long as 64, and 48 only .83.
    The times are kept on disk, beside those of the latency budget, so that the answer stays the same.

    Args:
        device: Where the model runs.
        dtype: Of its weights.

    Returns:
        1 where kernels have no such steps, or the device does not run convolutions of this type.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # a vector is as wide with many
        log = LatencyCache(device)
        widths = [_WIDTH, *(_WIDTH - step // 2 for step in _STEPS)]
        if not all(_key(width, dtype) in log for width in widths):
            log.update((_key(width, dtype), seconds) for width, seconds in _measure(widths, device, dtype).items())
            log.save()
        times = {width: log[_key(width, dtype)] for width in widths}
    except (RuntimeError, NotImplementedError, TypeError):
        return 1
    finally:
        torch.set_num_threads(threads)
    least = {step: (1 - _SAVED * step / 2 / _WIDTH) * times[_WIDTH] for step in _STEPS}
    return next((step for step in _STEPS if times[_WIDTH - step // 2] >= least[step]), 1)


def _key(width: int, dtype: torch.dtype) -> str:
    return f"3×3 convolutions from and to {width} channels, {dtype}"


def _measure(widths: list[int], device: torch.device, dtype: torch.dtype) -> dict[int, float]:
    """Width → the least seconds of a convolution that reads so many channels and of one that makes them, added up."""
    examples = 1 if device.type == "cpu" else 256  # an accelerator must be full, or all take as long
    timed = stopwatch(device)

    def convolution(entering: int, leaving: int) -> Callable[[], object]:
        layer = nn.Conv2d(entering, leaving, 3, padding=1, device="meta", dtype=dtype).to_empty(device=device)
        for parameter in layer.parameters():
            nn.init.ones_(parameter)  # no draw, and no denormals
        x = torch.ones(examples, entering, 28, 28, device=device, dtype=dtype)
        return lambda: layer(x)

    calls = {(width, way): convolution(*pair) for width in widths for way, pair in enumerate(((width, 64), (64, width)))}
    least = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        begun = time.perf_counter()
        for turn in range(_ROUNDS[1]):  # in turns, so that a moment of load does not hit one width alone
            if turn >= _ROUNDS[0] and time.perf_counter() - begun > _SECONDS:
                break
            for key, call in calls.items():
                least[key] = min(least[key], timed(call))
    return {width: least[width, 0] + least[width, 1] for width in widths}
