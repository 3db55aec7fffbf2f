"""CIFAR-100: 60,000 small photographs of a hundred kinds."""

from __future__ import annotations

from pathlib import Path

from sparsekit_fl.datasets.base import DataSource
from sparsekit_fl.datasets.parquet import load_images

__all__ = ["load"]


def load(root: Path | None = None) -> DataSource:
    """All of CIFAR-100, with its fine labels.

    Args:
        root: Directory with `cifar100/{train,test}.parquet`; None to fetch the hub's copy once.

    Returns:
        uint8 images `(3, 32, 32)`.

    Raises:
        DataError: the files are not there; the message says how to get them.
    """
    return load_images(
        "cifar100",
        root,
        repo="uoft-cs/cifar100",
        shape=(3, 32, 32),
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    )
