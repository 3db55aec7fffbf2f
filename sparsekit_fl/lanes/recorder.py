"""Recorder: what a device was asked to do in a step, to be asked again by one call. On CUDA these are CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["RECORDERS", "CudaRecorder", "Outputs", "Recorder", "recorder_of"]

Outputs = tuple[Tensor, ...]
"""What a step returns."""


class Recorder(Protocol):
    """Records steps on one device.

    Attributes:
        refused: Why nothing is recorded any more; None as long as all went well.
    """

    refused: str | None

    def strictly(self) -> AbstractContextManager[None]:
        """Raise a RuntimeError within the block where the host waits for the device, which no recording can."""
        ...

    def record(self, step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Note what a step asks of the device, without doing it.

        Args:
            step: Reads and writes tensors that stay where they are. It has run before, on the same stream.

        Returns:
            A function that does all of it, and the step's outputs, which every call writes anew.

        Raises:
            RuntimeError: the step does what cannot be recorded.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs. The graphs of a stream share one pool of memory.

    They may: graphs of one stream never run at the same time, and what a graph leaves in the pool is copied out of it before
    another one runs there. Nothing in a step draws random numbers (`lanes.model.refusal`), so no state of a generator is part
    of a recording, and the bits do not depend on whether a step is recorded.

    Args:
        device: Where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[Any, Any] = {}
        self.refused: str | None = None

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """See `Recorder`."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def record(self, step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """See `Recorder`. The current stream records; it must not be the default one."""
        stream = torch.cuda.current_stream(self._device)
        if stream not in self._pools:
            self._pools[stream] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pools[stream], stream=stream):
            outputs = step()
        return graph.replay, outputs


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""Type of device → what records there. Steps on such devices have the form that can be recorded, whether they are or not."""


def recorder_of(device: torch.device) -> Recorder | None:
    """Return a new recorder for a device; None where there is none."""
    make = RECORDERS.get(device.type)
    return None if make is None else make(device)
