"""What the partitions share: their signature, the validation split, and grouping by class."""

from typing import Any, Protocol

import numpy as np

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.clients import ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets.base import DataSource

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Partition(Protocol):
    """Deals a data set to clients; what it draws, it draws from `rng` alone."""

    def __call__(self, source: DataSource, *, clients: int, rng: np.random.Generator) -> list[ClientData]:
        """Deal; implementations add keyword options with defaults.

        Args:
            source: What to deal.
            clients: Number of clients, at least 1.
            rng: For every draw.

        Returns:
            One ClientData per client, all views into the tensors of the source.
        """
        ...


def check_clients(clients: int) -> None:
    if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
        raise InvalidValueError(f"clients must be an integer >= 1, got {clients!r}")


def hold_out(indices: Indices) -> tuple[Indices, Indices]:
    """Split at least two indices into those that stay and the last tenth, rounded half up and at least one, for validation."""
    count = min(max(1, int(len(indices) * 0.1 + 0.5)), len(indices) - 1)
    return indices[:-count], indices[-count:]


def dealt(train: TensorData, test: TensorData, mixed: Indices, scored: Indices) -> ClientData:
    """The data of a client that owns rows of `train` in random order, the last tenth for validation, and `scored` of `test`."""
    kept, held = hold_out(mixed)
    return ClientData(train=train.take(np.sort(kept)), val=train.take(np.sort(held)), test=test.take(np.sort(scored)))


def labelled_pools(source: DataSource, partition: str) -> tuple[TensorData, TensorData]:
    """Return the training and test pools of a source whose examples carry one label each.

    Raises:
        DataError: the source has no test pool, or labels that are not one class per example.
    """
    if source.test is None or not source.classes or source.train.targets.ndim != 1:
        raise DataError(
            f"partition {partition!r} needs one class label per example and a test set, which {source.name!r} does not have;"
            " use 'natural', if the examples have owners, or a function of your own as package.module:function"
        )
    return source.train, source.test


def rows_by_class(pool: TensorData, classes: int) -> list[Indices]:
    """Positions of the examples of each class, in the order of the pool."""
    labels = pool.labels().numpy()
    order = np.argsort(labels, kind="stable").astype(np.int64)
    bounds = np.searchsorted(labels[order], np.arange(classes + 1))
    return [order[bounds[c] : bounds[c + 1]] for c in range(classes)]
