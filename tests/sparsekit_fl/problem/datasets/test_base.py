from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsekit.errors import DataError
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets.base import DataSource

IMAGES = TensorData((torch.zeros(4, 1, 8, 8, dtype=torch.uint8),), torch.tensor([0, 1, 2, 1]))


def source(**changes: Any) -> DataSource:
    fields = {"name": "own", "kind": "image", "train": IMAGES, "test": IMAGES, "classes": 3, "mean": (0.5,), "std": (0.5,)}
    return DataSource(**{**fields, **changes})


def test_a_source_knows_the_shape_of_an_input() -> None:
    assert source().shape == (1, 8, 8)


def test_another_transform_leaves_the_tensors_where_they_are() -> None:
    changed = source().with_transform(torch.neg)
    assert changed.train.transform is torch.neg
    assert changed.test is not None
    assert changed.test.inputs[0] is IMAGES.inputs[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sound"}, "'image' or 'tokens'"),
        ({"classes": 2}, "label 2, but classes is 2"),
        ({"mean": (0.1, 0.2)}, "one number per channel"),
        ({"owners": torch.tensor([0])}, "must name 4 examples"),
        ({"test": None}, "neither test examples nor owners"),
        ({"kind": "tokens"}, r"integers \(rows, T\)"),
        ({"train": TensorData((torch.zeros(4, 1, 8, 8),), IMAGES.targets)}, "uint8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        source(**changes)
