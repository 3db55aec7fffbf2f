"""Data sets by name: each entry is called with the user's data directory and returns a `DataSource`."""

from __future__ import annotations

from sparsekit.registry import Registry

__all__ = ["datasets"]

datasets = Registry(
    "dataset",
    {
        "digits": "sparsekit_fl.datasets.digits:load",
        "mnist": "sparsekit_fl.datasets.images:mnist",
        "cifar10": "sparsekit_fl.datasets.images:cifar10",
        "cifar100": "sparsekit_fl.datasets.images:cifar100",
        "tiny-imagenet": "sparsekit_fl.datasets.images:tiny_imagenet",
        "reddit": "sparsekit_fl.datasets.reddit:load",
        "shakespeare": "sparsekit_fl.datasets.shakespeare:load",
    },
    group="sparsekit_fl.datasets",
)
