"""Queues: the streams of a GPU on which the steps of different buckets run beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Queue", "Queues"]


class Queue:
    """Where the kernels of a trainer are started, in order.

    Args:
        stream: Of the GPU; None for devices without, which do what they are asked at once.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Start kernels here within the block, after all that was asked for outside of it before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what is asked for outside from now on wait for what was asked for here.

        Memory: what was made outside and is read here must be held until then, and is free for others only after; what was
        made here returns to this stream, whose next block waits for all that was asked for outside.
        """
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class Queues:
    """Hands the streams of a device to trainers in turn.

    Args:
        device: Where the trainers train.
        count: Number of streams on CUDA; other devices have none.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._queues = [Queue(torch.cuda.Stream(device)) for _ in range(count)] if device.type == "cuda" else [Queue()]
        self._next = 0

    @property
    def parallel(self) -> bool:
        """Whether trainers can train beside each other."""
        return len(self._queues) > 1

    def take(self) -> Queue:
        """Return the queue of a new trainer."""
        self._next += 1
        return self._queues[(self._next - 1) % len(self._queues)]
