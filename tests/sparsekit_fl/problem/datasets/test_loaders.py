"""Data sets as batches: a tenth of the training examples is for validation, and the same seed gives the same batches."""

from __future__ import annotations

import pytest
import torch

from sparsekit_fl.problem.datasets.loaders import digits


def test_a_tenth_of_the_training_examples_is_for_validation() -> None:
    pytest.importorskip("sklearn")
    train, validation = digits(batch_size=50)
    images, labels = next(iter(train))
    assert images.shape == (50, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    count = [sum(len(y) for _, y in batches) for batches in (train, validation)]
    assert count == [1294, 143]
    again, other = digits(batch_size=50), digits(batch_size=50, seed=1)
    assert torch.equal(next(iter(again[0]))[0], images)
    assert not torch.equal(next(iter(other[0]))[0], images)
