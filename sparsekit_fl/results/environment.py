"""describe_environment: versions and settings that results may depend on."""

from __future__ import annotations

import importlib.metadata
import platform
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

import sparsekit


def describe_environment(*, workers: int, device: str) -> dict[str, Any]:
    """Return versions and settings that results may depend on, and when the run ended, as plain values.

    `gpu` and `cuda` are None for a run on the CPU, `flwr` and `ray` where they are not installed.
    """
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
        "gpu": _gpus(device),
        "cuda": torch.version.cuda if device.startswith("cuda") else None,
        "cudnn": torch.backends.cudnn.version() if device.startswith("cuda") else None,
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus(device: str) -> list[str] | None:
    """Name of each GPU of the run, in its order."""
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return None
    return [torch.cuda.get_device_name(torch.device(name.strip())) for name in device.split(",")]
