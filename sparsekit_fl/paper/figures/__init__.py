"""Figures 3 to 9 of the paper, and the bandits' ratios over time, from saved results."""
