"""Partitions, which divide a data set among clients: by shards of one class, by Dirichlet shares, or by natural owners."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.registry import Registry
from sparsekit_fl.config import Count, NonNegativeCount
from sparsekit_fl.problem.data import ClientData
from sparsekit_fl.problem.datasets import DataSource

_log = logging.getLogger(__name__)

_LEAST = 10  # minimum number of examples of a client
_ATTEMPTS = 200  # number of draws, until shares give every client enough examples

Indices = np.ndarray[Any, np.dtype[np.int64]]

Concentration = Annotated[
    float,
    Field(
        gt=0, description="Concentration; the smaller, the fewer classes per client: 0.1 is very uneven, 100 is nearly even."
    ),
]  # parameter of a symmetric Dirichlet distribution

_OURS = {name: f"sparsekit_fl.problem.partition:{name}" for name in ("pathological", "dirichlet", "natural")}
partitions = Registry("partition", _OURS, group="sparsekit_fl.partitions")


class Partition(Protocol):
    """Divides a data set among clients, with `rng` as its only source of random numbers. Further keywords are options."""

    def __call__(self, source: DataSource, *, clients: int, rng: np.random.Generator) -> list[ClientData]:
        """Return one ClientData per client, all views into the tensors of the source."""


def _tenth(indices: Indices) -> int:
    """Return a tenth of the number of indices, rounded half up and at least one."""
    return max(1, int(len(indices) * 0.1 + 0.5))


def _rows_by_class(source: DataSource, partition: str) -> tuple[list[Indices], list[Indices]]:
    """Return the positions of the training and the test examples of each class, ascending."""
    if source.test is None or not source.classes or source.train.targets.ndim != 1:
        raise DataError(
            f"partition {partition!r} needs one class label per example and a test set, which {source.name!r} does not have;"
            " use 'natural', if the examples have owners, or a function of your own as package.module:function"
        )
    both = [pool.labels().numpy() for pool in (source.train, source.test)]
    train, test = ([np.flatnonzero(labels == label) for label in range(source.classes)] for labels in both)
    return train, test


def _hand(source: DataSource, train: Sequence[Indices], val: Sequence[Indices], test: Sequence[Indices]) -> ClientData:
    assert source.test is not None
    kept, held, scored = map(np.concatenate, (train, val, test))
    return ClientData(train=source.train.take(kept), val=source.train.take(held), test=source.test.take(scored))


def pathological(
    source: DataSource,
    *,
    clients: int,
    rng: np.random.Generator,
    classes_per_client: Annotated[Count, Field(description="Shards per client.")] = 2,
    images_per_class: Annotated[
        int,
        Field(
            ge=2,
            description="Examples per shard, at least one to train and one to validate. With too few shards, they are smaller,"
            " with a warning.",
        ),
    ] = 100,
    distinct: Annotated[
        bool,
        Field(
            description="Whether the classes of a client differ, as long as enough classes have shards left. False draws each"
            " shard from all that are left, as the authors' released code does: with 2 of 10 classes, about one client in ten"
            " has a single class."
        ),
    ] = True,
    lack_classes: Annotated[
        NonNegativeCount | None, Field(description="Number of classes that every client lacks. Its shards are then distinct.")
    ] = None,
) -> list[ClientData]:
    """Deal shards of one class each to clients.

    The training examples of every class are cut, in their order, into shards of `images_per_class`; a remainder is left
    out. Each client draws `classes_per_client` shards without replacement, where the probability of a class is proportional to
    its remaining shards. The last tenth of each shard is held out for validation. A client is tested on `images_per_class` test
    examples of each of its classes, drawn again for each client, or on all if the class has fewer.

    With `lack_classes`, the `classes_per_client` · `images_per_class` examples of a client are cut into shards of all classes
    that it does not lack. This option changes the classes of a client, but about keeps its number of examples; the paper leaves
    this open.

    Raises:
        InvalidValueError: `classes_per_client` exceeds the number of classes, or `lack_classes` leaves no class.
        DataError: too few examples for shards of two.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216); `lack_classes` is from Effect of Heterogeneity (Q3). Their released code
        cuts the label-sorted data without regard to class borders; here a shard has one class.
    """
    rows, tests = _rows_by_class(source, "pathological")
    if lack_classes is not None:
        if lack_classes >= source.classes:
            raise InvalidValueError(f"lack_classes must be in [0, {source.classes - 1}], got {lack_classes}")
        # Two examples of a class are needed, one to train and one to validate.
        images_per_class = max(2, classes_per_client * images_per_class // (source.classes - lack_classes))
        classes_per_client, distinct = source.classes - lack_classes, True
    if classes_per_client > source.classes:
        raise InvalidValueError(f"classes_per_client must be in [1, {source.classes}], got {classes_per_client}")
    size = _shard_size(source.name, rows, clients, classes_per_client, images_per_class)
    shards = [[members[start : start + size] for start in range(0, len(members) - size + 1, size)] for members in rows]
    remaining = [[shard[place] for place in rng.permutation(len(shard))] for shard in shards]
    splits: list[ClientData] = []
    for _ in range(clients):
        owned = sorted(_draw_classes(list(map(len, remaining)), classes_per_client, rng, distinct=distinct))
        own, classes = [remaining[label].pop() for label in owned], sorted(set(owned))
        scored = [rng.permutation(tests[label])[:images_per_class] for label in classes]
        if not any(map(len, scored)):
            raise DataError(f"{source.name!r} has no test example of the classes {classes}; give every class test examples")
        last = _tenth(own[0])
        splits.append(_hand(source, [shard[:-last] for shard in own], [shard[-last:] for shard in own], scored))
    return splits


def _draw_classes(left: list[int], count: int, rng: np.random.Generator, *, distinct: bool) -> list[int]:
    """Draw the classes of a client's shards. With `distinct`, a class is repeated only if too few classes are left."""
    remaining = np.asarray(left, dtype=np.float64)
    different = min(count, int((remaining > 0).sum())) if distinct else 1
    drawn = [int(c) for c in rng.choice(len(left), size=different, replace=False, p=remaining / remaining.sum())]
    remaining[drawn] -= 1
    while len(drawn) < count:
        drawn.append(int(rng.choice(len(left), p=remaining / remaining.sum())))
        remaining[drawn[-1]] -= 1
    return drawn


def _shard_size(name: str, rows: list[Indices], clients: int, per_client: int, size: int) -> int:
    """Return the largest shard size, at most `size`, that gives every client its number of shards."""
    needed = clients * per_client
    fitting = next((one for one in range(size, 1, -1) if sum(len(members) // one for members in rows) >= needed), None)
    if fitting is None:
        raise DataError(
            f"{name!r} has too few examples for {clients} clients with {per_client} shards of two examples of one class each;"
            " use fewer clients, fewer classes per client, or a larger data set"
        )
    if fitting < size:
        _log.warning("%s has fewer than %d shards of %d examples; shards of %d are used", name, needed, size, fitting)
    return fitting


def dirichlet(source: DataSource, *, clients: int, rng: np.random.Generator, alpha: Concentration = 0.5) -> list[ClientData]:
    """Deal each class to the clients in shares drawn from a symmetric Dirichlet distribution; each example is dealt once.

    A client that already has the average number of examples gets no more, as is usual. The test examples of a class are dealt
    in the same shares as its training examples. A draw that gives a client less than ten training and validation examples
    together, or no test example, is repeated. A random tenth of each client's training examples is held out for validation.

    Raises:
        DataError: no draw gave every client enough examples.

    Source: Hsu, Qi, Brown, arXiv 1909.06335; Li et al., ICDE 2022 (arXiv 2102.02079) for the limit at the average.
    """
    rows, tests = _rows_by_class(source, "dirichlet")
    examples, scored = (sum(map(len, members)) for members in (rows, tests))
    for _ in range(_ATTEMPTS if examples >= clients * _LEAST and scored >= clients else 0):
        found = _deal(rows, tests, clients, alpha, rng)
        if all(len(mine) >= _LEAST and len(test) for mine, test in found):
            break
    else:
        raise DataError(
            f"{examples} training and {scored} test examples of {source.name!r} cannot be dealt to {clients} clients"
            f" with at least {_LEAST} and 1 each at alpha={alpha}; use fewer clients, or a larger alpha"
        )
    splits = []
    for mine, test in found:
        kept, held = np.split(rng.permutation(mine), [-_tenth(mine)])
        splits.append(_hand(source, [np.sort(kept)], [np.sort(held)], [np.sort(test)]))
    return splits


def _deal(
    rows: list[Indices], tests: list[Indices], clients: int, alpha: float, rng: np.random.Generator
) -> list[tuple[Indices, Indices]]:
    even = sum(map(len, rows)) / clients
    held = np.zeros(clients, dtype=np.int64)
    mine: list[list[Indices]] = [[] for _ in range(clients)]
    scored: list[list[Indices]] = [[] for _ in range(clients)]
    for members, testers in zip(rows, tests, strict=True):
        shares = rng.dirichlet(np.full(clients, alpha)) * (held < even)
        total = shares.sum()
        shares = shares / total if total > 0 else np.full(clients, 1 / clients)
        cumulative = np.minimum(np.cumsum(shares)[:-1], 1.0)
        for target, indices in ((mine, members), (scored, testers)):
            pieces = np.split(rng.permutation(indices), np.rint(cumulative * len(indices)).astype(np.int64))
            for client, piece in enumerate(pieces):
                target[client].append(piece)
        held = np.asarray([sum(map(len, pieces)) for pieces in mine])
    return [(np.concatenate(own), np.concatenate(test)) for own, test in zip(mine, scored, strict=True)]


def natural(source: DataSource, *, clients: int, rng: np.random.Generator) -> list[ClientData]:  # noqa: ARG001 - draws nothing
    """Make clients of the owners with most examples, such as users. Each splits its own 80/10/10, the latest for testing.

    Clients are in the order of the source, whose test set is not used. Among owners with equally many examples, the first ones
    are chosen.

    Raises:
        DataError: the source has no owners, or too few with ten examples.

    Source: Caldas et al., LEAF (arXiv 1812.01097).
    """
    if source.owners is None:
        raise DataError(f"{source.name!r} does not say whose each example is; use the partition 'pathological' or 'dirichlet'")
    owners = source.owners.numpy()
    sizes = np.bincount(owners)
    fitting = np.flatnonzero(sizes >= _LEAST)
    if len(fitting) < clients:
        raise DataError(
            f"{source.name!r} has {len(fitting)} owners with at least {_LEAST} examples, not the {clients} asked for;"
            f" use at most {len(fitting)} clients"
        )
    chosen = fitting[np.argsort(-sizes[fitting], kind="stable")[:clients]]
    splits = []
    for owner in np.sort(chosen):
        rows = np.flatnonzero(owners == owner)
        tenth = _tenth(rows)
        train, val, test = np.split(rows, [len(rows) - 2 * tenth, len(rows) - tenth])
        splits.append(ClientData(train=source.train.take(train), val=source.train.take(val), test=source.train.take(test)))
    return splits
