"""Find the units of a model and prove that they can be removed exactly."""

from sparsekit.tracing.layer_order import trace_layers
from sparsekit.tracing.trace import trace_units

__all__ = [
    "trace_layers",
    "trace_units",
]
