"""Data sets by name: each entry is called with the user's data directory and returns a `DataSource`."""

from sparsekit.registry import Registry

__all__ = ["datasets"]

datasets = Registry(
    "dataset",
    {
        "digits": "sparsekit_fl.problem.datasets.images:digits",
        "mnist": "sparsekit_fl.problem.datasets.images:mnist",
        "cifar10": "sparsekit_fl.problem.datasets.images:cifar10",
        "cifar100": "sparsekit_fl.problem.datasets.images:cifar100",
        "tiny-imagenet": "sparsekit_fl.problem.datasets.images:tiny_imagenet",
        "reddit": "sparsekit_fl.problem.datasets.text:reddit",
        "shakespeare": "sparsekit_fl.problem.datasets.text:shakespeare",
    },
    group="sparsekit_fl.datasets",
)
