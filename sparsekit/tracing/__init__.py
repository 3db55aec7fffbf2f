"""Find the units of a model and prove that they can be removed exactly."""

from sparsekit.tracing.trace import entry_reads, trace_units

__all__ = ["entry_reads", "trace_units"]
