"""Experiments by name: the presets of the FedLPS paper, what is built from them, its ablations and published tables."""
