"""Callbacks: what happens beside a run. `loggers` finds those that `--callback` names.

Names are imported when first used, since each display and logger needs packages of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names
from sparsekit.registry import Registry

if TYPE_CHECKING:
    from sparsekit_fl.callbacks.base import Callback as Callback
    from sparsekit_fl.callbacks.base import RunView as RunView
    from sparsekit_fl.callbacks.central import CentralTest as CentralTest
    from sparsekit_fl.callbacks.displays import LiveProgress as LiveProgress
    from sparsekit_fl.callbacks.displays import NotebookDisplay as NotebookDisplay
    from sparsekit_fl.callbacks.monitor import BestCheckpoint as BestCheckpoint
    from sparsekit_fl.callbacks.monitor import EarlyStopping as EarlyStopping
    from sparsekit_fl.callbacks.trackers import MLflow as MLflow
    from sparsekit_fl.callbacks.trackers import TensorBoard as TensorBoard

loggers = Registry(
    "logger",
    {
        "best": "sparsekit_fl.callbacks.monitor:BestCheckpoint",
        "early-stopping": "sparsekit_fl.callbacks.monitor:EarlyStopping",
        "mlflow": "sparsekit_fl.callbacks.trackers:MLflow",
        "tensorboard": "sparsekit_fl.callbacks.trackers:TensorBoard",
    },
    group="sparsekit_fl.loggers",
)

_names, __getattr__ = lazy_names(__name__)
__all__ = [*_names, "loggers"]


def __dir__() -> list[str]:
    return sorted(__all__)
