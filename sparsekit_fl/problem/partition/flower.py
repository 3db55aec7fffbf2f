"""Partitioners of `flwr-datasets` as partitions: `flwr:DirichletPartitioner`, with their own arguments as options."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sparsekit.errors import DataError, InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.errors import need
from sparsekit_fl.problem.clients import ClientData
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.partition.base import Indices, Partition, check_clients, dealt, labelled_pools

PREFIX = "flwr:"
_GIVEN = ("num_partitions", "partition_by", "seed")


def flower_partition(text: str) -> Partition:
    """Make a partition of `flwr:NAME`, a class of `flwr_datasets.partitioner`; `Partitioner` at its end may be left out.

    Returns:
        The partition, whose options are the class's own arguments.

    Raises:
        UnknownNameError: no partitioner of that name.
        MissingDependencyError: `flwr-datasets` is not installed.
    """
    library = need("flwr_datasets.partitioner", "the partition", extra="data")
    name = text.removeprefix(PREFIX)
    known = [found for found in library.__all__ if found != "Partitioner"]
    wanted = name if name in known else f"{name}Partitioner"
    if wanted not in known:
        raise UnknownNameError(f"flwr-datasets has no partitioner {name!r}; {nearest(wanted, known)}")
    make = getattr(library, wanted)
    deal = partial(_partition, make)
    free = [
        one.replace(kind=one.KEYWORD_ONLY) for name, one in inspect.signature(make).parameters.items() if name not in _GIVEN
    ]
    deal.__signature__ = inspect.Signature(free)  # type: ignore[attr-defined]
    return deal


def _partition(
    make: Callable[..., Any], source: DataSource, *, clients: int, rng: np.random.Generator, **options: Any
) -> list[ClientData]:
    """Deal the training examples; a tenth of each client's, at random, is for validation.

    The test examples of a client are drawn from those of the classes that it has, as many of each class as its share of the
    class says, at least one in all.

    Raises:
        DataError: the source has no labels or test set, or a client gets fewer than two examples.
        InvalidValueError: the partitioner refuses its arguments.
    """
    check_clients(clients)
    name = make.__name__
    train, test = labelled_pools(source, PREFIX + name)
    labels, test_labels = train.labels().numpy(), test.labels().numpy()
    splits = []
    for client, rows in enumerate(_deal(make, options, labels, clients, int(rng.integers(2**31 - 1)))):
        if len(rows) < 2:
            raise DataError(f"{name} gives client {client} {len(rows)} examples; it needs two, so take fewer clients")
        mixed = rng.permutation(rows)
        splits.append(dealt(train, test, mixed, _scored(labels, rows, test_labels, rng)))
    return splits


def _deal(make: Callable[..., Any], options: dict[str, Any], labels: Indices, clients: int, seed: int) -> list[Indices]:
    library = need("datasets", "the partition", extra="data")
    takes = inspect.signature(make).parameters
    given = {"num_partitions": clients, "partition_by": "label", "seed": seed}
    try:
        partitioner = make(**{name: value for name, value in given.items() if name in takes}, **options)
        partitioner.dataset = library.Dataset.from_dict({"label": labels.tolist(), "row": list(range(len(labels)))})
        count = partitioner.num_partitions
        if count != clients:
            raise InvalidValueError(f"it makes {count} partitions for {clients} clients; pass --clients {count}")
        return [np.asarray(partitioner.load_partition(client)["row"][:], dtype=np.int64) for client in range(clients)]
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidValueError(f"{make.__name__} cannot deal {len(labels)} examples to {clients} clients: {error}") from error


def _scored(labels: Indices, rows: Indices, test_labels: Indices, rng: np.random.Generator) -> Indices:
    found = []
    for label, count in zip(*np.unique(labels[rows], return_counts=True), strict=True):
        pool = np.flatnonzero(test_labels == label)
        wanted = min(len(pool), max(1, round(len(pool) * count / (labels == label).sum())))
        found.append(rng.choice(pool, size=wanted, replace=False))
    scored = np.concatenate(found)
    return scored if len(scored) else rng.choice(len(test_labels), size=1)
