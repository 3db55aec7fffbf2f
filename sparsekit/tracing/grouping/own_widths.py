"""Find, by their width, integers that only methods besides `forward` read, such as `in_chs` in one that folds branches."""

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from sparsekit.graph.groups import SizeAttribute, UnitGroup
from sparsekit.labels.numbers import Held, IntArray, Source
from sparsekit.labels.values import Entry
from sparsekit.tracing.grouping.sizes import Claims, followed

_WIDTH = re.compile(
    r"(^|_)(c|chs?|chans?|channels?|dims?|d_model|embed|embedding|feats?|features?|filters?|groups|head_size|hidden|inner"
    r"|intermediate|planes|units|w|width)\d*(_|$)"
)
_CHOICES = frozenset({0})


def own_widths(
    held: Mapping[str, Iterable[Held]],
    read: AbstractSet[Source],
    entries: Sequence[Entry],
    root: IntArray,
    group_of: Mapping[int, str],
    groups: Mapping[str, UnitGroup],
) -> tuple[Claims, tuple[str, ...]]:
    """Return attributes that equal a width of their module, and those that equal two widths which differ after a cut.

    Only attributes with the name of a width count: a kernel of 7 is not the width of a layer of 7 channels.

    Args:
        held: Module → integers that it holds.
        read: Where the integers are from that `forward` has read.
        entries: All entries of the state.
        root: The unit of each node.
        group_of: Unit → its group.
        groups: All groups, by name.

    Returns:
        Integers that may follow units, and the names of those that stay.
    """
    unread = {
        module: found
        for module, numbers in held.items()
        if (found := [h for h in numbers if len(h.path) == 1 and _WIDTH.search(str(h.path[0])) and h not in read])
    }
    claims: dict[Held, set[tuple[SizeAttribute, ...]]] = {}
    for entry in entries if unread else ():
        homes = {home for name in entry.names for home in _homes(name) if home in unread}
        for number in (number for home in homes for number in unread[home]):
            for dim, (size, first) in enumerate(zip(entry.shape, entry.first, strict=True)):
                # A depthwise convolution may make several channels of each channel that it reads.
                times = size // number.value if dim == 0 and entry.shape[1:2] == (1,) and len(entry.shape) > 2 else 1
                if size == times * number.value and first is not None and not entry.constants:
                    rows = root[first : first + size].reshape(number.value, times)
                    if (rows == rows[:, :1]).all():
                        claims.setdefault(number, set()).add(tuple(followed(number, rows[:, 0], group_of, groups)))
    cut = {number: found for number, found in claims.items() if any(found)}
    followed_by_one = {next(iter(found)): _CHOICES for found in cut.values() if len(found) == 1}
    return followed_by_one, tuple(f"{n.module}.{n.path[0]}".lstrip(".") for n, found in cut.items() if len(found) > 1)


def _homes(name: str) -> list[str]:
    """Return the names of the modules that contain an entry, the model first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]
