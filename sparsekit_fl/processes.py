"""Processes: how workers start and end, their torch threads, the devices of the option `device`, and the environment."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import platform
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparsekit
from sparsekit.errors import InvalidValueError

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


def devices(device: str) -> list[str]:
    """Split "cuda:0,cuda:1" into its devices."""
    return [part.strip() for part in device.split(",")]


def device_of(device: str, worker: int = 0) -> str:
    """Return the device of a worker process, counted from 0: the devices take turns."""
    found = devices(device)
    return found[worker % len(found)]


def use_exact_arithmetic() -> None:
    """Let this process use operators that give the same bits on every run, and no TF32.

    An operator that has no such version raises an error; on a CPU all that we use have one.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def exact_arithmetic(wanted: bool) -> Iterator[None]:
    """Use exact arithmetic inside the block, where wanted, and put the switches back."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if wanted:
        use_exact_arithmetic()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def check_device(device: str, *, name: str = "device") -> None:
    """Raise InvalidValueError unless torch can use a device (cpu, cuda, cuda:1, mps), or all of several by commas."""
    for one in devices(device):
        try:
            torch.empty(0, device=one)
        except (RuntimeError, AssertionError) as error:
            told = str(error).partition("\n")[0]
            raise InvalidValueError(f"{name} {one!r} cannot be used: {told}; leave it out to run on the CPU") from error


def describe_environment(*, workers: int, device: str) -> dict[str, Any]:
    """Return versions and settings that results may depend on, and when the run ended, as plain values.

    `gpu` and `cuda` are None for a run on the CPU.
    """
    cuda = device.startswith("cuda")
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sparsekit": sparsekit.__version__,
        "threads": torch.get_num_threads(),
        "workers": workers,
        "device": device,
        "platform": platform.platform(),
        "gpu": [torch.cuda.get_device_name(name) for name in devices(device)] if cuda and torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if cuda else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
