"""The paper's partition: shards of one class, a few shards per client."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.clients import ClientData
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.partition.base import Indices, check_clients, hold_out, labelled_pools, rows_by_class

_log = logging.getLogger(__name__)


def pathological(
    source: DataSource,
    *,
    clients: int,
    rng: np.random.Generator,
    classes_per_client: int = 2,
    images_per_class: int = 100,
    distinct: bool = True,
    when_short: Literal["refuse", "shrink", "redeal"] = "refuse",
) -> list[ClientData]:
    """Deal shards of one class each to clients.

    The training examples of every class are cut, in their order, into shards of `images_per_class`; a remainder is left
    out, so that no shard straddles two classes. Each client draws `classes_per_client` shards without replacement, with
    `distinct` of different classes as long as enough classes have shards left: a class is drawn with a chance in
    proportion to its shards left. The last tenth of each shard is held out for validation. A client is tested on
    `images_per_class` test examples, drawn anew for each client, of each class it owns, or on all there are if the class
    has fewer.

    Args:
        source: With one label per example and a test set.
        clients: Number of clients.
        rng: For every draw.
        classes_per_client: Shards per client.
        images_per_class: Examples per shard.
        distinct: Whether the classes of a client differ. False draws each shard from all that are left, as the authors'
            released code does, so that `classes_per_client` is an upper bound: with 2 of 10 classes, about one client
            in ten has a single class.
        when_short: What to do if there are too few shards. "refuse": raise. "shrink": the largest smaller shards that
            suffice, with a warning. "redeal": once fewer classes have shards left than a client draws, deal all shards
            again, with a warning; clients then share examples.

    Returns:
        One ClientData per client.

    Raises:
        DataError: too few shards; the message says how many there are and what would do.
        InvalidValueError: an option out of range.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216). Their released code cuts the label-sorted data without regard to
        class borders; here a shard has one class.
    """
    check_clients(clients)
    train, test = labelled_pools(source, "pathological")
    if not 1 <= classes_per_client <= source.classes:
        raise InvalidValueError(f"classes_per_client must be in [1, {source.classes}], got {classes_per_client}")
    if images_per_class < 2:
        raise InvalidValueError(f"images_per_class must be at least 2 (one to train, one to validate), got {images_per_class}")
    if when_short not in ("refuse", "shrink", "redeal"):
        raise InvalidValueError(f"when_short must be 'refuse', 'shrink' or 'redeal', got {when_short!r}")
    rows, tests = rows_by_class(train, source.classes), rows_by_class(test, source.classes)
    size = _shard_size(source.name, rows, clients, classes_per_client, images_per_class, when_short)
    shards = [_cut(members, size) for members in rows]

    redeal = sum(map(len, shards)) < clients * classes_per_client
    splits: list[ClientData] = []
    short: set[int] = set()
    remaining = [_shuffled(shard, rng) for shard in shards]
    for _ in range(clients):
        if redeal and sum(map(bool, remaining)) < min(classes_per_client, sum(map(bool, shards))):
            remaining = [_shuffled(shard, rng) for shard in shards]
        owned = sorted(_draw_classes(list(map(len, remaining)), classes_per_client, rng, distinct=distinct))
        kept, held = zip(*(hold_out(remaining[label].pop()) for label in owned), strict=True)
        classes = sorted(set(owned))
        short |= {label for label in classes if len(tests[label]) < images_per_class}
        scored = np.concatenate([rng.permutation(tests[label])[:images_per_class] for label in classes])
        if not len(scored):
            raise DataError(f"{source.name!r} has no test example of the classes {classes}; give every class test examples")
        splits.append(
            ClientData(train=train.take(np.concatenate(kept)), val=train.take(np.concatenate(held)), test=test.take(scored))
        )
    if short:
        _log.warning(
            "%s: %d classes have fewer than %d test examples; all of them are used", source.name, len(short), images_per_class
        )
    return splits


def lacking(lack: int, classes: int, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of the pathological partition under which every client lacks exactly `lack` of the classes.

    A client keeps the number of examples that `keywords` give it, cut into more or fewer classes: the level changes what a
    client sees and not how much, which the paper leaves open.

    Args:
        lack: Classes without an example, in [0, classes).
        classes: Number of classes.
        keywords: Keywords of the partition so far.

    Raises:
        InvalidValueError: `lack` is out of range.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Effect of Heterogeneity (Q3): "each client lacks x classes".
    """
    if isinstance(lack, bool) or not isinstance(lack, int) or not 0 <= lack < classes:
        raise InvalidValueError(
            f"lack_classes must be an integer in [0, {classes - 1}], got {lack!r}; 0 gives every client all {classes} classes"
        )
    defaults = inspect.signature(pathological).parameters
    per_client, images = (
        int(keywords.get(name, defaults[name].default)) for name in ("classes_per_client", "images_per_class")
    )
    owned = classes - lack
    # Two are needed, one to train and one to validate.
    each = max(2, per_client * images // owned)
    return {"classes_per_client": owned, "images_per_class": each, "distinct": True, "when_short": "shrink"}


def _draw_classes(left: list[int], count: int, rng: np.random.Generator, *, distinct: bool) -> list[int]:
    """Which classes a client draws its shards from; with `distinct` a class twice only if too few classes are left."""
    remaining = np.asarray(left, dtype=np.float64)
    different = min(count, int((remaining > 0).sum())) if distinct else 1
    drawn = [int(c) for c in rng.choice(len(left), size=different, replace=False, p=remaining / remaining.sum())]
    remaining[drawn] -= 1
    while len(drawn) < count:
        drawn.append(int(rng.choice(len(left), p=remaining / remaining.sum())))
        remaining[drawn[-1]] -= 1
    return drawn


def _cut(members: Indices, size: int) -> list[Indices]:
    return [members[start : start + size] for start in range(0, len(members) - size + 1, size)]


def _shuffled(shards: list[Indices], rng: np.random.Generator) -> list[Indices]:
    return [shards[i] for i in rng.permutation(len(shards))]


def _shard_size(name: str, rows: list[Indices], clients: int, per_client: int, size: int, when_short: str) -> int:
    def count(size: int) -> int:
        return sum(len(members) // size for members in rows)

    needed, available = clients * per_client, count(size)
    if available >= needed:
        return size
    if when_short == "redeal" and available >= per_client and sum(len(members) >= size for members in rows) >= per_client:
        _log.warning(
            "%s: %d shards of %d are needed and there are %d; shards are dealt again, so clients share examples",
            name, needed, size, available,
        )  # fmt: skip
        return size
    fitting = next((smaller for smaller in range(size - 1, 1, -1) if count(smaller) >= needed), None)
    if when_short == "shrink" and fitting is not None:
        _log.warning(
            "%s: there are %d shards of %d and %d are needed; shards of %d are used", name, available, size, needed, fitting
        )
        return fitting
    remedy = f"shards of at most {fitting}" if fitting is not None else "a larger data set"
    raise DataError(
        f"{name!r} has {available} shards of {size} examples of one class, and {clients} clients need {per_client} each;"
        f" use at most {available // per_client} clients, fewer classes per client, or {remedy}"
    )
