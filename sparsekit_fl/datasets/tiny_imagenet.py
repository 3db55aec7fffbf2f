"""Tiny-ImageNet: photographs of 200 kinds at 64×64 pixels."""

from __future__ import annotations

from pathlib import Path

from sparsekit_fl.datasets.base import DataSource
from sparsekit_fl.datasets.parquet import load_images

__all__ = ["load"]


def load(root: Path | None = None) -> DataSource:
    """Tiny-ImageNet; its validation pictures serve as the test set, since the true test labels were never published.

    Args:
        root: Directory with `tiny-imagenet/{train,valid}.parquet`; None to fetch the hub's copy once.

    Returns:
        uint8 images `(3, 64, 64)`.

    Raises:
        DataError: the files are not there; the message says how to get them.
    """
    return load_images(
        "tiny-imagenet",
        root,
        repo="zh-plus/tiny-imagenet",
        shape=(3, 64, 64),
        classes=200,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        aliases=("tiny_imagenet",),
        test_names=("valid", "val", "test"),
    )
