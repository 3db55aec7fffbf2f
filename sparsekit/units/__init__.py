"""Structured units of a network: what goes together when a channel, feature, cell or head goes."""

from sparsekit.units.graph import FrozenUnits, UnitGraph, UnitGroup, UnitSlice
from sparsekit.units.trace import trace_units

__all__ = ["FrozenUnits", "UnitGraph", "UnitGroup", "UnitSlice", "trace_units"]
