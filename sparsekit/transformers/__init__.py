"""Support for the package transformers: layer rules, and folders and configurations of pruned models."""
