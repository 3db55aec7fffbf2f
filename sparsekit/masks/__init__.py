"""Masks: outcomes of a pattern, and the one that learns."""
