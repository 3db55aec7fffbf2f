"""The removable units of a model as data: groups, index tables and masks."""

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice, group_order
from sparsekit.graph.index import Axes, StateDict, cut_axes, gather, narrow_shape, scatter_
from sparsekit.graph.layers import Layer, head_entries, layer_weights, prefix_entries
from sparsekit.graph.mask import UnitMask, WeightMask, to_weights

__all__ = ["Axes", "Layer", "StateDict", "UnitGraph", "UnitGroup", "UnitMask", "UnitSlice", "WeightMask", "cut_axes"]
__all__ += ["gather", "group_order", "head_entries", "layer_weights", "narrow_shape", "prefix_entries", "scatter_"]
__all__ += ["to_weights"]
