"""CIFAR-10: 60,000 small photographs of ten kinds."""

from __future__ import annotations

from pathlib import Path

from sparsekit_fl.datasets.base import DataSource
from sparsekit_fl.datasets.parquet import load_images

__all__ = ["load"]


def load(root: Path | None = None) -> DataSource:
    """All of CIFAR-10.

    Args:
        root: Directory with `cifar10/{train,test}.parquet`; None to fetch the hub's copy once.

    Returns:
        uint8 images `(3, 32, 32)`.

    Raises:
        DataError: the files are not there; the message says how to get them.
    """
    return load_images(
        "cifar10",
        root,
        repo="uoft-cs/cifar10",
        shape=(3, 32, 32),
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )
