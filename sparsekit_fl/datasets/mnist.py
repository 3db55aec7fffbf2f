"""MNIST: 70,000 handwritten digits."""

from __future__ import annotations

from pathlib import Path

from sparsekit_fl.datasets.base import DataSource
from sparsekit_fl.datasets.parquet import load_images

__all__ = ["load"]


def load(root: Path | None = None) -> DataSource:
    """All of MNIST.

    Args:
        root: Directory with `mnist/{train,test}.parquet`; None to fetch the hub's copy once.

    Returns:
        uint8 images `(1, 28, 28)`.

    Raises:
        DataError: the files are not there; the message says how to get them.
    """
    return load_images(
        "mnist",
        root,
        repo="ylecun/mnist",
        shape=(1, 28, 28),
        classes=10,
        mean=(0.1307,),
        std=(0.3081,),
    )
