"""Pruning in one call: a model and a budget in, a smaller model and a report out."""
