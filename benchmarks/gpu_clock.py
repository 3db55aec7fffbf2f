"""What all parts of `gpu.py` use: a clock, and a wait for the device."""

from __future__ import annotations

import time

import torch

__all__ = ["Clock", "synchronise"]


class Clock:
    """How much time a part has.

    Args:
        seconds: From now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; at least 0."""
        return max(0.0, self._end - time.perf_counter())


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
