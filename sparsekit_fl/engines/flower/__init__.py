"""Flower as the engine: the same runs through its Ray simulation, or on devices that it connects."""

from sparsekit_fl.engines.flower.quiet import be_quiet

# Flower reads its switches when it is imported, so this comes before everything that imports it.
be_quiet()

from sparsekit_fl.engines.flower.pool import GridPool  # noqa: E402
from sparsekit_fl.engines.flower.simulation import Flower  # noqa: E402

__all__ = ["Flower", "GridPool"]
