"""Natural partition: the people who made the data are the clients."""

from typing import Literal

import numpy as np

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.clients import ClientData
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.partition.base import check_clients


def natural(
    source: DataSource,
    *,
    clients: int,
    rng: np.random.Generator,
    choose: Literal["largest", "random"] = "largest",
    min_examples: int = 10,
) -> list[ClientData]:
    """Make clients of users or speakers; each splits its own examples 80/10/10 by position, the latest for testing.

    Args:
        source: With owners; a test set of its own is not used.
        clients: Number of owners that take part.
        rng: For `choose="random"`; otherwise nothing is drawn.
        choose: The owners with most examples (ties: the one listed first), or any with enough.
        min_examples: An owner needs at least this many, and at least 3.

    Returns:
        One ClientData per chosen owner, in the order of the source.

    Raises:
        DataError: the source has no owners, or too few with enough examples.
        InvalidValueError: an option out of range.

    Source: Caldas et al., LEAF (arXiv 1812.01097).
    """
    check_clients(clients)
    if choose not in ("largest", "random"):
        raise InvalidValueError(f"choose must be 'largest' or 'random', got {choose!r}")
    if min_examples < 3:
        raise InvalidValueError(f"min_examples must be at least 3 (one each to train, validate and test), got {min_examples}")
    if source.owners is None:
        raise DataError(f"{source.name!r} does not say whose each example is; use the partition 'pathological' or 'dirichlet'")
    owners = source.owners.numpy()
    sizes = np.bincount(owners)
    fitting = np.flatnonzero(sizes >= min_examples)
    if len(fitting) < clients:
        raise DataError(
            f"{source.name!r} has {len(fitting)} owners with at least {min_examples} examples, not the {clients} asked for;"
            f" use at most {len(fitting)} clients, or a smaller min_examples"
        )
    if choose == "largest":
        chosen = fitting[np.argsort(-sizes[fitting], kind="stable")[:clients]]
    else:
        chosen = rng.choice(fitting, size=clients, replace=False)
    order = np.argsort(owners, kind="stable").astype(np.int64)
    ends = np.cumsum(sizes)
    splits = []
    for owner in np.sort(chosen):
        rows = order[ends[owner] - sizes[owner] : ends[owner]]
        tenth = max(1, int(len(rows) * 0.1 + 0.5))
        train, val, test = np.split(rows, [len(rows) - 2 * tenth, len(rows) - tenth])
        splits.append(ClientData(train=source.train.take(train), val=source.train.take(val), test=source.train.take(test)))
    return splits
