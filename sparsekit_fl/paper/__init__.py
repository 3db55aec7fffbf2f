"""The experiments of the FedLPS paper: presets, ablations, published tables."""
