"""The digits, as a data set and as batches of torch tensors."""

import torch

from sparsekit_fl.problem.datasets import datasets, loaders
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


def test_of_batches_a_tenth_is_for_validation_and_the_same_seed_gives_the_same() -> None:
    train, validation = loaders.digits(batch_size=50)
    images, labels = next(iter(train))
    assert (images.shape, images.dtype, labels.dtype) == ((50, 1, 8, 8), torch.float32, torch.int64)
    assert [sum(len(y) for _, y in batches) for batches in (train, validation)] == [1294, 143]
    again, other = loaders.digits(batch_size=50), loaders.digits(batch_size=50, seed=1)
    assert torch.equal(next(iter(again[0]))[0], images)
    assert not torch.equal(next(iter(other[0]))[0], images)
