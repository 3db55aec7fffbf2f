"""The image data sets as batches of torch tensors, for commands that know nothing of clients."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from sparsekit.rng import torch_generator
from sparsekit_fl.problem.datasets import datasets
from sparsekit_fl.problem.images import ImageTransform

_VALIDATION = 0.1

Batches = DataLoader[tuple[torch.Tensor, ...]]


def _loaders(name: str, *, data_dir: Path | None = None, batch_size: int = 64, seed: int = 0) -> tuple[Batches, Batches]:
    """Return training batches, in another order each time, and validation batches: normalised float images and labels.

    A tenth of the training examples, drawn from `seed`, is for validation; the test set is not used.
    """
    source = datasets[name](data_dir)
    channels, height, width = source.shape
    train = source.with_transform(ImageTransform(channels, (height, width), source.mean, source.std)).train
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(train)))
    held_out = max(1, int(_VALIDATION * len(order)))

    def batches(rows: torch.Tensor, *, shuffle: bool) -> Batches:
        (images,), labels = train.batch(rows.sort().values)
        generator = torch_generator(np.random.default_rng(seed))
        return DataLoader(TensorDataset(images, labels), batch_size, shuffle=shuffle, generator=generator)

    return batches(order[held_out:], shuffle=True), batches(order[:held_out], shuffle=False)


digits, mnist, cifar10, cifar100, tiny_imagenet = (
    partial(_loaders, name) for name in ("digits", "mnist", "cifar10", "cifar100", "tiny-imagenet")
)
