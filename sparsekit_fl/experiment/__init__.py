"""Experiments by name: a data set, a partition and a model become a problem with its clients."""
