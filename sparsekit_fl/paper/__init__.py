"""Experiments by name: the presets of the FedLPS paper, their problems, its ablations and published tables."""
