"""Digits: the 1,797 handwritten digits of 8×8 pixels that scikit-learn brings along. Works offline."""

from pathlib import Path

import numpy as np
import torch

from sparsekit_fl.errors import need
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets.base import DataSource

_TRAIN = 1437  # four fifths, as they lie


def load(root: Path | str | None = None) -> DataSource:  # noqa: ARG001 (every data set is loaded with a root)
    """The digits data set.

    Args:
        root: Not used: the data come with scikit-learn.

    Returns:
        uint8 images `(1, 8, 8)`; the last 360 are the test set.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    bundle = need("sklearn.datasets", "reading the data", extra="fl").load_digits()
    pixels = np.rint(bundle.images * (255 / 16)).astype(np.uint8)[:, None]
    images, labels = torch.from_numpy(pixels), torch.from_numpy(bundle.target.astype(np.int64))
    return DataSource(
        name="digits",
        kind="image",
        train=TensorData((images[:_TRAIN],), labels[:_TRAIN]),
        test=TensorData((images[_TRAIN:],), labels[_TRAIN:]),
        classes=10,
        mean=(0.3054,),
        std=(0.3763,),
    )
