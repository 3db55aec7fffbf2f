"""Experiments by name: the presets of the FedLPS paper, and their problems."""
