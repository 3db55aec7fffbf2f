"""Experiments of the FedLPS paper: presets, the problems and clients that they describe, and the published tables."""
