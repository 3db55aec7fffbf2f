"""The removable units of a model as data: groups, index tables and masks."""

from sparsekit.graph.edit import without
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice, group_order
from sparsekit.graph.index import Axes, StateDict, cut_axes, gather, narrow_shape, scatter_
from sparsekit.graph.mask import UnitMask, WeightMask

__all__ = ["Axes", "StateDict", "UnitGraph", "UnitGroup", "UnitMask", "UnitSlice", "WeightMask", "cut_axes", "gather"]
__all__ += ["group_order", "narrow_shape", "scatter_", "without"]
