from __future__ import annotations

from typing import Any

import torch

from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets.base import DataSource

IMAGES = TensorData((torch.zeros(4, 1, 8, 8, dtype=torch.uint8),), torch.tensor([0, 1, 2, 1]))


def source(**changes: Any) -> DataSource:
    fields = {"name": "own", "kind": "image", "train": IMAGES, "test": IMAGES, "classes": 3, "mean": (0.5,), "std": (0.5,)}
    return DataSource(**{**fields, **changes})


def test_another_transform_leaves_the_tensors_where_they_are() -> None:
    changed = source().with_transform(torch.neg)
    assert changed.train.transform is torch.neg
    assert changed.test is not None
    assert changed.test.inputs[0] is IMAGES.inputs[0]
