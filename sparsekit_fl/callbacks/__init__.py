"""Callbacks: what happens beside a run. `loggers` finds those that `--log` names.

Names are imported when first used, since each display and logger needs packages of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsekit.registry import Registry

if TYPE_CHECKING:
    from sparsekit_fl.callbacks.base import Callback, RunView
    from sparsekit_fl.callbacks.best import BestCheckpoint
    from sparsekit_fl.callbacks.central import CentralTest
    from sparsekit_fl.callbacks.mlflow import MLflow
    from sparsekit_fl.callbacks.notebook import NotebookDisplay
    from sparsekit_fl.callbacks.progress import LiveProgress
    from sparsekit_fl.callbacks.stopping import EarlyStopping
    from sparsekit_fl.callbacks.tensorboard import TensorBoard

_HOME = {
    "BestCheckpoint": "best",
    "Callback": "base",
    "CentralTest": "central",
    "EarlyStopping": "stopping",
    "LiveProgress": "progress",
    "MLflow": "mlflow",
    "NotebookDisplay": "notebook",
    "RunView": "base",
    "TensorBoard": "tensorboard",
}

__all__ = [
    "BestCheckpoint",
    "Callback",
    "CentralTest",
    "EarlyStopping",
    "LiveProgress",
    "MLflow",
    "NotebookDisplay",
    "RunView",
    "TensorBoard",
    "loggers",
]

loggers = Registry(
    "logger",
    {
        "best": "sparsekit_fl.callbacks.best:BestCheckpoint",
        "mlflow": "sparsekit_fl.callbacks.mlflow:MLflow",
        "tensorboard": "sparsekit_fl.callbacks.tensorboard:TensorBoard",
    },
    group="sparsekit_fl.loggers",
)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
