"""What every data set and every partition promises."""

import pickle
from collections.abc import Callable

import numpy as np
import torch

from sparsekit_fl.problem.data import ClientData
from sparsekit_fl.problem.datasets import DataSource
from sparsekit_fl.problem.metrics import IGNORED


def check_dataset(make: Callable[[], DataSource]) -> DataSource:
    """Examples are always the same, raw and labelled, and owners name every one of them."""
    source, again = make(), make()
    for pool, same in ((source.train, again.train), (source.test, again.test)):
        if pool is None:
            continue
        raw, labels = pool.inputs[0], pool.labels()
        assert torch.equal(raw, same.inputs[0])
        assert torch.equal(pool.targets, same.targets)
        assert raw.shape[1:] == source.shape
        assert raw.dtype == torch.uint8 if source.kind == "image" else not raw.is_floating_point()
        assert labels.dtype == torch.int64
        counted = labels[labels != IGNORED]
        for numbers in (counted, raw) if source.kind == "tokens" else (counted,):
            assert 0 <= int(numbers.min()) <= int(numbers.max()) < source.classes
    view = source.train.take([1, 0])
    assert torch.equal(pickle.loads(pickle.dumps(view.materialise())).inputs[0], view.batch()[0][0])
    if source.owners is not None:
        assert source.owners.shape == (len(source.train),)
        assert set(source.owners.tolist()) == set(range(int(source.owners.max()) + 1))
    return source


def check_partition(deal: Callable[..., list[ClientData]], source: DataSource) -> None:
    """Every client gets examples of its own, views into the tensors of the source, and the same ones for the same seed."""
    splits, again = (deal(source, clients=4, rng=np.random.default_rng(7)) for _ in range(2))
    assert len(splits) == 4
    taken: list[int] = []
    for client, same in zip(splits, again, strict=True):
        assert min(len(client.train), len(client.val), len(client.test)) > 0
        assert all(torch.equal(getattr(client, s).index, getattr(same, s).index) for s in ("train", "val", "test"))
        assert client.train.inputs[0].data_ptr() == source.train.inputs[0].data_ptr()
        own = [*client.train.index.tolist(), *client.val.index.tolist()]
        taken += own
        if client.test.targets is client.train.targets:
            assert not set(own) & set(client.test.index.tolist())
    assert len(taken) == len(set(taken)), "no two clients train on one example"
