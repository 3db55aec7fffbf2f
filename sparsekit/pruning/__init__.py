"""Pruning in one call: a model and a budget in, a smaller model and a report out."""

from sparsekit.pruning.calibration import signs_of_training

__all__ = ["signs_of_training"]
