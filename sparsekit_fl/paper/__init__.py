"""Experiments of the FedLPS paper: presets, and the problems and clients that they describe."""
