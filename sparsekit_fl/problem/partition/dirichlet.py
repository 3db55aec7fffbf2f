"""Dirichlet partition: every client has its own mixture of the classes."""

import numpy as np

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.clients import ClientData
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.partition.base import Indices, check_clients, dealt, labelled_pools, rows_by_class

_ATTEMPTS = 200


def dirichlet(
    source: DataSource, *, clients: int, rng: np.random.Generator, alpha: float = 0.5, min_examples: int = 10
) -> list[ClientData]:
    """Deal each class to the clients in shares drawn from a symmetric Dirichlet distribution.

    A client that already has its even part of all examples gets no more, as is usual, so that nobody has nearly all. The
    test examples of a class are dealt in the same shares as its training examples. A draw in which a client falls short is
    repeated. A tenth of each client's training examples, at random, is held out for validation.

    Args:
        source: With one label per example and a test set.
        clients: Number of clients.
        rng: For every draw.
        alpha: Concentration, > 0; the smaller, the fewer classes per client.
        min_examples: Each client gets at least this many training and validation examples together, and one test example.

    Returns:
        One ClientData per client; every training and test example is dealt exactly once.

    Raises:
        DataError: no draw gave every client enough.
        InvalidValueError: an option out of range.

    Source: Hsu, Qi, Brown, arXiv 1909.06335; Li et al., ICDE 2022 (arXiv 2102.02079) for the even part.
    """
    check_clients(clients)
    if not alpha > 0:
        raise InvalidValueError(f"alpha must be > 0, got {alpha}; 0.1 is very uneven, 100 nearly even")
    if min_examples < 2:
        raise InvalidValueError(f"min_examples must be at least 2 (one to train, one to validate), got {min_examples}")
    train, test = labelled_pools(source, "dirichlet")
    rows, tests = rows_by_class(train, source.classes), rows_by_class(test, source.classes)
    enough = len(train) >= clients * min_examples and len(test) >= clients
    for _ in range(_ATTEMPTS if enough else 0):
        found = _deal(rows, tests, clients, alpha, rng)
        if all(len(mine) >= min_examples and len(scored) for mine, scored in found):
            break
    else:
        raise DataError(
            f"{len(train)} training and {len(test)} test examples of {source.name!r} cannot be dealt to {clients} clients"
            f" with at least {min_examples} and 1 each at alpha={alpha};"
            " use fewer clients, a larger alpha or a smaller min_examples"
        )
    return [dealt(train, test, rng.permutation(mine), scored) for mine, scored in found]


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
