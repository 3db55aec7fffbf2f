"""Worker processes: how they start and end, what is sent to them, and the number of torch threads of each process."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import signal
import sys
from collections import ChainMap
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cloudpickle
import torch

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Train as worker processes do meanwhile: with one torch thread, so that results do not depend on the number of cores, and
    without denormal numbers. The process is as it was afterwards, since it is the user's."""
    before, denormals = torch.get_num_threads(), float(torch.tensor(1e-39) * 1.0) != 0.0
    train_alike()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(not denormals)


def train_alike() -> None:
    """Use one torch thread, and flush denormal numbers to zero.

    Weights that decay towards 0 become denormal, and many processors compute several times more slowly with such numbers.
    """
    torch.set_num_threads(1)
    if not torch.set_flush_denormal(True):
        _log.info("this processor cannot flush denormal numbers; training slows down where weights are below 1e-38")


def start_method(device: str | None) -> str:
    """Return how processes start.

    Args:
        device: Where models train; None for the default.

    Returns:
        "fork" on Linux for the CPU, where children share data with this process without copying and nothing must be
        picklable; "spawn" elsewhere, and where torch has threads of autograd, which exist once a gradient was taken on a
        machine with a GPU: no child of a fork can take one then.
    """
    return "fork" if sys.platform == "linux" and device in (None, "cpu") and not _autograd_threads() else "spawn"


def _autograd_threads() -> bool:
    """Tell whether torch has started a thread of autograd for a device; the system knows them by name."""
    names = Path("/proc/self/task").glob("*/comm")
    with contextlib.suppress(OSError):
        return any(name.read_text(encoding="utf-8").startswith("pt_autograd") for name in names)
    return False


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, then end this one; for a thread of a worker process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Knows what multiprocessing and torch have registered before what cloudpickle knows. Python asks the class alone."""

    dispatch_table = ChainMap(ForkingPickler._extra_reducers, cloudpickle.Pickler.dispatch_table)  # type: ignore[attr-defined]


class Sent:
    """What a process gets that is spawned: pickled with the classes and functions of a notebook, or of a script, by value.

    Tensors are shared and pipes are handed over, as multiprocessing does.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(self.value)
        return _received, (buffer.getvalue(),)


def _received(payload: bytes) -> Sent:
    return Sent(cloudpickle.loads(payload))
