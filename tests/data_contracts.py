"""What every data set and every partition promises; a test inherits a contract and says what to test."""

import pickle

import numpy as np
import torch

from sparsekit_fl.problem.data import ClientData, TensorData
from sparsekit_fl.problem.datasets import DataSource
from sparsekit_fl.problem.metrics import IGNORED


def _in_memory(pool: object) -> TensorData:
    assert isinstance(pool, TensorData), "the contract needs TensorData; test a small sample of data that are read lazily"
    return pool


class DatasetContract:
    """What every data set promises. Override `make_source`."""

    def make_source(self) -> DataSource:
        """Load the data set, afresh at every call."""
        raise AssertionError(f"{type(self).__name__} must override make_source")

    def test_examples_are_always_the_same_raw_and_labelled(self) -> None:
        source, again = self.make_source(), self.make_source()
        for one, other in ((source.train, again.train), (source.test, again.test)):
            if one is None:
                continue
            pool, same = _in_memory(one), _in_memory(other)
            raw, labels = pool.inputs[0], pool.labels()
            assert torch.equal(raw, same.inputs[0])
            assert torch.equal(pool.targets, same.targets)
            assert raw.shape[1:] == source.shape
            assert raw.dtype == torch.uint8 if source.kind == "image" else not raw.is_floating_point()
            counted = labels[labels != IGNORED]
            assert labels.dtype == torch.int64
            assert len(counted) > 0
            for numbers in (counted, raw) if source.kind == "tokens" else (counted,):
                assert 0 <= int(numbers.min()) <= int(numbers.max()) < source.classes
        view = _in_memory(source.train.take([1, 0]))
        assert torch.equal(pickle.loads(pickle.dumps(view.materialise())).inputs[0], view.batch()[0][0])

    def test_owners_name_every_example(self) -> None:
        source = self.make_source()
        if source.owners is not None:
            assert source.owners.shape == (len(source.train),)
            assert set(source.owners.tolist()) == set(range(int(source.owners.max()) + 1))


class PartitionContract:
    """What every partition promises. Override `make_source` and `partition`."""

    clients = 4

    def make_source(self) -> DataSource:
        """Load a data set that the partition can split."""
        raise AssertionError(f"{type(self).__name__} must override make_source")

    def partition(self, source: DataSource, clients: int, rng: np.random.Generator) -> list[ClientData]:
        """Call the partition."""
        raise AssertionError(f"{type(self).__name__} must override partition")

    def test_every_client_gets_examples_of_its_own_and_the_same_ones_twice(self) -> None:
        source = self.make_source()
        splits, again = (self.partition(source, self.clients, np.random.default_rng(7)) for _ in range(2))
        assert len(splits) == self.clients
        storage = _in_memory(source.train).inputs[0].data_ptr()
        taken: list[int] = []
        for client, same in zip(splits, again, strict=True):
            assert min(len(client.train), len(client.val), len(client.test)) > 0
            assert all(torch.equal(getattr(client, s).index, getattr(same, s).index) for s in ("train", "val", "test"))
            assert client.train.inputs[0].data_ptr() == storage, "clients share the tensors of the source"
            own = [*client.train.index.tolist(), *client.val.index.tolist()]
            taken += own
            if client.test.targets is client.train.targets:
                assert not set(own) & set(client.test.index.tolist())
        assert len(taken) == len(set(taken)), "no two clients train on one example"
