"""Data sets by name: each file has `load(root) -> DataSource`."""

from __future__ import annotations

from sparsekit.registry import Registry

__all__ = ["datasets"]

datasets = Registry(
    "dataset",
    {
        "digits": "sparsekit_fl.datasets.digits:load",
        "mnist": "sparsekit_fl.datasets.mnist:load",
        "cifar10": "sparsekit_fl.datasets.cifar10:load",
        "cifar100": "sparsekit_fl.datasets.cifar100:load",
        "tiny-imagenet": "sparsekit_fl.datasets.tiny_imagenet:load",
        "reddit": "sparsekit_fl.datasets.reddit:load",
        "shakespeare": "sparsekit_fl.datasets.shakespeare:load",
    },
    group="sparsekit_fl.datasets",
)
