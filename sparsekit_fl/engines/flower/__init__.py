"""Flower as the engine: the same runs through its Ray simulation, or on devices that it connects."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsekit_fl.engines.flower.quiet import be_quiet

if TYPE_CHECKING:
    from sparsekit_fl.engines.flower.simulation import Flower

# Flower reads its switches when it is imported, so this comes before everything that imports it.
be_quiet()

__all__ = ["Flower"]


def __getattr__(name: str) -> Any:
    # Imported when first used: a SuperNode starts a process for every message, which needs no simulation and no Ray.
    if name == "Flower":
        return importlib.import_module(f"{__name__}.simulation").Flower
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
