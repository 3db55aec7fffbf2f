"""The option `device`: one device, or several by commas, for worker processes in turn; exact arithmetic; the environment."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

import sparsekit
from sparsekit.errors import InvalidValueError


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


@contextmanager
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
    """Raise InvalidValueError unless this machine has a device (cpu, cuda, cuda:1, mps), or all of several by commas."""
    for one in devices(device):
        try:
            asked = torch.device(one)
        except RuntimeError as error:
            raise InvalidValueError(f"{name} must be cpu, cuda, cuda:N or mps, or several by commas, got {device!r}") from error
        if asked.type == "mps" and not torch.backends.mps.is_available():
            raise InvalidValueError(f"{name} {device}: this torch sees no Metal device; leave it out to run on the CPU")
        if asked.type != "cuda":
            continue
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InvalidValueError(f"{name} {device}: this torch sees no CUDA device; leave it out to run on the CPU")
        if asked.index is not None and asked.index >= count:
            raise InvalidValueError(f"{name} {device}: this machine has {count}, cuda:0 to cuda:{count - 1}; take one of these")


def describe_environment(*, workers: int, device: str) -> dict[str, Any]:
    """Return versions and settings that results may depend on, and when the run ended, as plain values.

    `gpu` and `cuda` are None for a run on the CPU, `flwr` and `ray` if they are not installed.
    """
    cuda = device.startswith("cuda")
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sparsekit": sparsekit.__version__,
        "flwr": _version("flwr"),
        "ray": _version("ray"),
        "threads": torch.get_num_threads(),
        "workers": workers,
        "device": device,
        "platform": platform.platform(),
        "gpu": [torch.cuda.get_device_name(name) for name in devices(device)] if cuda and torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
