"""Contract suites for data sets and partitions. Inherit one in a test file, say what to test, and pytest runs the rest."""

from __future__ import annotations

import pickle

import numpy as np
import torch

from sparsekit_fl.datasets.base import DataSource
from sparsekit_fl.problem.clients import ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.metrics import IGNORED

__all__ = ["DatasetContract", "PartitionContract"]


def _in_memory(pool: object) -> TensorData:
    """The contract is for data in memory; lazy data are a matter of their size."""
    assert isinstance(pool, TensorData), "the contract needs TensorData; test a small sample of data that are read lazily"
    return pool


class DatasetContract:
    """What every data set promises. Override `make_source`."""

    def make_source(self) -> DataSource:
        """Load the data set, afresh at every call."""
        raise AssertionError(f"{type(self).__name__} must override make_source")

    def _pools(self) -> list[TensorData]:
        source = self.make_source()
        pools = [source.train] if source.test is None else [source.train, source.test]
        return [_in_memory(pool) for pool in pools]

    def test_loading_twice_gives_the_same_examples(self) -> None:
        for first, second in zip(self._pools(), self._pools(), strict=True):
            assert torch.equal(first.inputs[0], second.inputs[0])
            assert torch.equal(first.targets, second.targets)

    def test_labels_are_in_range(self) -> None:
        source = self.make_source()
        for pool in self._pools():
            labels = pool.labels()
            counted = labels[labels != IGNORED]
            assert labels.dtype == torch.int64
            assert len(counted) > 0
            assert 0 <= int(counted.min()) <= int(counted.max()) < source.classes

    def test_inputs_are_raw_and_of_one_shape(self) -> None:
        source = self.make_source()
        for pool in self._pools():
            raw = pool.inputs[0]
            assert raw.shape[1:] == source.shape
            assert raw.dtype == torch.uint8 if source.kind == "image" else not raw.is_floating_point()

    def test_tokens_are_in_the_vocabulary(self) -> None:
        source = self.make_source()
        if source.kind == "tokens":
            tokens = _in_memory(source.train).inputs[0]
            assert 0 <= int(tokens.min()) <= int(tokens.max()) < source.classes

    def test_owners_name_every_example(self) -> None:
        source = self.make_source()
        if source.owners is not None:
            assert source.owners.shape == (len(source.train),)
            assert set(source.owners.tolist()) == set(range(len(source.owner_names)))

    def test_a_view_survives_pickling(self) -> None:
        view = _in_memory(self.make_source().train.take([1, 0]))
        again = pickle.loads(pickle.dumps(view.materialise()))
        assert torch.equal(again.inputs[0], view.batch()[0][0])


class PartitionContract:
    """What every partition promises. Override `make_source` and `partition`."""

    def make_source(self) -> DataSource:
        """Load a data set that the partition can split."""
        raise AssertionError(f"{type(self).__name__} must override make_source")

    def partition(self, source: DataSource, clients: int, rng: np.random.Generator) -> list[ClientData]:  # noqa: ARG002
        """Call the partition."""
        raise AssertionError(f"{type(self).__name__} must override partition")

    clients = 4

    def _partitioned(self, seed: int = 0) -> tuple[DataSource, list[ClientData]]:
        source = self.make_source()
        return source, self.partition(source, self.clients, np.random.default_rng(seed))

    def test_every_client_gets_examples_of_every_split(self) -> None:
        _, splits = self._partitioned()
        assert len(splits) == self.clients
        assert all(len(client.train) and len(client.val) and len(client.test) for client in splits)

    def test_one_seed_gives_the_same_splits_twice(self) -> None:
        for first, second in zip(self._partitioned(7)[1], self._partitioned(7)[1], strict=True):
            for split in ("train", "val", "test"):
                assert torch.equal(getattr(first, split).index, getattr(second, split).index)

    def test_splits_of_a_client_are_disjoint(self) -> None:
        for client in self._partitioned()[1]:
            train, val = set(client.train.index.tolist()), set(client.val.index.tolist())
            assert not train & val
            if client.test.targets is client.train.targets:
                assert not (train | val) & set(client.test.index.tolist())

    def test_no_two_clients_train_on_one_example(self) -> None:
        rows = [
            row for client in self._partitioned()[1] for split in (client.train, client.val) for row in split.index.tolist()
        ]
        assert len(rows) == len(set(rows))

    def test_clients_share_the_tensors_of_the_source(self) -> None:
        source, splits = self._partitioned()
        storage = _in_memory(source.train).inputs[0].data_ptr()
        assert all(client.train.inputs[0].data_ptr() == storage for client in splits)
