"""Partitioners of `flwr-datasets` as partitions: `flwr:DirichletPartitioner`, with their own arguments as options."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from sparsekit.errors import DataError, InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.problem.clients import ClientData
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.datasets.files import require
from sparsekit_fl.problem.partition.base import Indices, check_clients, hold_out, labelled_pools

PREFIX = "flwr:"
_GIVEN = ("num_partitions", "partition_by", "seed")


class FlowerPartition:
    """One partitioner of `flwr_datasets.partitioner`, by name.

    Args:
        name: Its class, as in `DirichletPartitioner`; `Partitioner` at its end may be left out.
        options: Its own arguments.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        library = require("flwr_datasets.partitioner", extra="data")
        known = [found for found in library.__all__ if found != "Partitioner"]
        wanted = name if name in known else f"{name}Partitioner"
        if wanted not in known:
            raise UnknownNameError(f"flwr-datasets has no partitioner {name!r}; {nearest(wanted, known)}")
        self._made = getattr(library, wanted)
        self._options = options
        takes = inspect.signature(self._made).parameters
        for option in options:
            if option not in takes or option in _GIVEN:
                free = [found for found in takes if found not in _GIVEN]
                raise InvalidValueError(f"{wanted} has no option {option!r} that is free; {nearest(option, free)}")
        self._name = wanted

    def __call__(self, source: DataSource, *, clients: int, rng: np.random.Generator) -> list[ClientData]:
        """Deal the training examples; a tenth of each client's, at random, is for validation.

        The test examples of a client are drawn from those of the classes that it has, as many of each class as its share of
        the class says, at least one in all.

        Args:
            source: With one label per example, and a test set.
            clients: Number of clients.
            rng: Seeds the partitioner, and all else.

        Raises:
            DataError: the source has no labels or test set, or a client gets fewer than two examples.
            InvalidValueError: the partitioner refuses its arguments.
        """
        check_clients(clients)
        train, test = labelled_pools(source, PREFIX + self._name)
        labels, test_labels = train.labels().numpy(), test.labels().numpy()
        mine = self._deal(labels, clients, int(rng.integers(2**31 - 1)))
        splits = []
        for client, rows in enumerate(mine):
            if len(rows) < 2:
                raise DataError(f"{self._name} gives client {client} {len(rows)} examples; it needs two, so take fewer clients")
            kept, held = hold_out(rng.permutation(rows))
            scored = self._test(labels, rows, test_labels, rng)
            splits.append(
                ClientData(train=train.take(np.sort(kept)), val=train.take(np.sort(held)), test=test.take(np.sort(scored)))
            )
        return splits

    def _deal(self, labels: np.ndarray[Any, Any], clients: int, seed: int) -> list[Indices]:
        library = require("datasets", extra="data")
        takes = inspect.signature(self._made).parameters
        given = {"num_partitions": clients, "partition_by": "label", "seed": seed}
        try:
            partitioner = self._made(**{name: value for name, value in given.items() if name in takes}, **self._options)
            partitioner.dataset = library.Dataset.from_dict({"label": labels.tolist(), "row": list(range(len(labels)))})
            count = partitioner.num_partitions
            if count != clients:
                raise InvalidValueError(f"it makes {count} partitions for {clients} clients; pass --clients {count}")
            return [np.asarray(partitioner.load_partition(client)["row"][:], dtype=np.int64) for client in range(clients)]
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidValueError(f"{self._name} cannot deal {len(labels)} examples to {clients} clients: {error}") from error

    def _test(
        self, labels: np.ndarray[Any, Any], rows: Indices, test_labels: np.ndarray[Any, Any], rng: np.random.Generator
    ) -> Indices:
        found = []
        for label, count in zip(*np.unique(labels[rows], return_counts=True), strict=True):
            pool = np.flatnonzero(test_labels == label)
            wanted = min(len(pool), max(1, round(len(pool) * count / (labels == label).sum())))
            found.append(rng.choice(pool, size=wanted, replace=False))
        scored = np.concatenate(found)
        return scored if len(scored) else rng.choice(len(test_labels), size=1)


def flower_partition(text: str, options: dict[str, Any]) -> FlowerPartition:
    """Make a partition of `flwr:NAME` and its options.

    Raises:
        UnknownNameError: no partitioner of that name.
        InvalidValueError: it has no such option.
        MissingDependencyError: `flwr-datasets` is not installed.
    """
    return FlowerPartition(text.removeprefix(PREFIX), options)
