from __future__ import annotations

import torch

from sparsekit_fl.problem.datasets import datasets
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.testing import DatasetContract


class TestDigitsContract(DatasetContract):
    def make_source(self) -> DataSource:
        return datasets["digits"](None)


def test_digits_are_complete_and_normalised() -> None:
    source: DataSource = datasets["digits"](None)
    assert source.test is not None
    assert (len(source.train), len(source.test)) == (1437, 360)
    pixels = source.train.inputs[0] / 255
    assert torch.allclose(pixels.mean(), torch.tensor(source.mean[0]), atol=1e-3)
    assert torch.allclose(pixels.std(), torch.tensor(source.std[0]), atol=1e-3)
    assert source.test.labels().unique().tolist() == list(range(10))
