"""Training data that change: augmentations and random transforms, new in each epoch and the same everywhere; lazy data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError, UnknownNameError
from sparsekit_fl.client.loop import Batches, Examples
from sparsekit_fl.methods import registry
from sparsekit_fl.problem.augment import Augmentations, Crop, Erase, Flip, Noise, make_augment
from sparsekit_fl.problem.lazy import LazyData
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


PICTURES = torch.arange(2 * 3 * 6 * 6, dtype=torch.float32).reshape(2, 3, 6, 6) + 1


def test_each_augmentation_does_what_it_says():
    assert torch.equal(Flip(share=1.0)(PICTURES, generator()), PICTURES.flip(-1))
    assert torch.equal(Flip(share=0.0)(PICTURES, generator()), PICTURES)
    cropped = Crop(padding=1)(PICTURES, generator(1))
    padded = torch.nn.functional.pad(PICTURES, [1] * 4)
    offsets = [(top, left) for top in range(3) for left in range(3)]
    for picture, whole in zip(cropped, padded, strict=True):
        assert any(torch.equal(picture, whole[:, top : top + 6, left : left + 6]) for top, left in offsets)
    erased = Erase(share=0.5)(PICTURES, generator())
    assert [(picture == 0).sum().item() for picture in erased] == [27, 27]
    noisy = Noise(scale=0.1)(torch.zeros(1000), generator())
    assert float(noisy.std()) == pytest.approx(0.1, abs=0.02)


def test_augmentations_are_read_from_text():
    assert make_augment("flip") == Flip()
    assert make_augment("crop:2, flip") == Augmentations((Crop(2), Flip()))
    with pytest.raises(UnknownNameError, match="unknown augmentation 'flop'; did you mean 'flip'"):
        make_augment("flop")
    with pytest.raises(InvalidValueError, match="share must be in"):
        make_augment("erase:2")
    with pytest.raises(InvalidValueError, match="takes a number"):
        make_augment("crop:x")


def read(problem, data, *, epochs=2, seed=5):
    examples = Examples(problem, data, device="cpu", rng=np.random.default_rng(seed))
    batches = Batches(examples, epochs=epochs, batch_size=4, rng=np.random.default_rng(1))
    return [torch.cat([batch.inputs[0] for batch in epoch]) for epoch in batches]


def test_an_augmentation_is_new_in_every_epoch_and_the_same_for_the_same_seed():
    data = tiny_clients(1)[0].data.train
    problem = replace(tiny_problem(), augment=Noise(scale=0.5))
    plain = read(tiny_problem(), data)
    first, again, other = read(problem, data), read(problem, data), read(problem, data, seed=6)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)
    noises = [one - clean for one, clean in zip(first, plain, strict=True)]
    assert not torch.allclose(noises[0].sort(0).values, noises[1].sort(0).values)
    assert not torch.equal(first[0], other[0])


def test_scores_are_of_the_data_as_they_are():
    examples = Examples(
        replace(tiny_problem(), augment=Noise(scale=0.5)),
        tiny_clients(1)[0].data.test,
        device="cpu",
        rng=np.random.default_rng(0),
    )
    (batch,) = examples.batches(None, [(0, len(examples))])
    assert torch.equal(batch.inputs[0], tiny_clients(1)[0].data.test.batch()[0][0])


class Shaken(Dataset):
    """Items with a random transform, as torchvision's, which draws from torch's generator."""

    def __init__(self, data):
        self.data, self.reads = data, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, place):
        self.reads += 1
        inputs, target = self.data[place]
        return inputs + 0.5 * torch.randn(inputs.shape), target


def shaken_clients():
    return [
        fl.Client(
            id=c.id, data=fl.ClientData(Shaken(c.data.train), Shaken(c.data.val), Shaken(c.data.test)), capability=c.capability
        )
        for c in tiny_clients()
    ]


@pytest.mark.parametrize("method", ["fedavg", "fedlps"])
@pytest.mark.same_bits
def test_random_transforms_give_the_same_bits_for_any_number_of_workers(method):
    runs = [
        fl.run(registry[method](), tiny_problem(), shaken_clients(), tiny_config(rounds=2), engine=fl.Embedded(workers=workers))
        for workers in (1, 3)
    ]
    assert runs[0].final.to_dict() == runs[1].final.to_dict()
    assert [record.loss for record in runs[0].rounds] == [record.loss for record in runs[1].rounds]


def test_lazy_pictures_train():
    sizes = [(5, 7), (9, 6), (6, 6)]
    pictures = [torch.full((1, *sizes[row % 3]), 100 * (row % 2), dtype=torch.uint8) for row in range(24)]
    data = LazyData(
        read=pictures.__getitem__,
        targets=torch.arange(24) % 2,
        shape=(1, 6, 6),
        transform=lambda rows: rows.float().div(255),
    )
    assert data.take([3, 1]).take([1]).labels().tolist() == [1]
    problem = fl.Problem(
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2)), example_inputs=(torch.zeros(1, 1, 6, 6),)
    )
    split = fl.ClientData(data.take(list(range(16))), None, data.take(list(range(16, 24))))
    config = replace(tiny_config(rounds=2), cohort=1)
    result = fl.run(registry["fedavg"](), problem, [fl.Client(id=0, data=split)], config)
    assert result.final.personal["accuracy"] == 1.0
    with pytest.raises(DataError, match=r"index must be in \[0, 24\)"):
        data.take([1]).__class__(read=data.read, targets=data.targets, shape=data.shape, index=torch.tensor([99]))
