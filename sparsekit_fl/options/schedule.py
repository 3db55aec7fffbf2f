"""factor(): the learning rate as a factor of its first value, over the rounds of a run or over the steps of a round."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "step"]
"""Names of the courses that a learning rate may take."""


def factor(
    kind: Schedule, place: int, total: int, *, warmup: int = 0, every: int | None = None, gamma: float = 0.1, end: float = 0.0
) -> float:
    """Return the factor on the learning rate.

    Args:
        kind: "constant"; "linear" and "cosine" fall to `end` at the last place; "step" is multiplied by `gamma` at intervals.
        place: Counted from 0.
        total: Number of places.
        warmup: Number of places at the start over which the rate grows linearly to its whole value, which the course then
            begins with.
        every: Places between two steps of "step"; None: a third of all.
        gamma: Factor of each step.
        end: Factor at the last place.

    Source: linear warm-up is Goyal et al. 2017 (arXiv 1706.02677); the cosine Loshchilov and Hutter, ICLR 2017.
    """
    if place < warmup:
        return (place + 1) / (warmup + 1)
    done, left = place - warmup, max(total - warmup, 1)
    if kind == "step":
        return gamma ** (done // (every or max(1, -(-left // 3))))
    if kind == "constant":
        return 1.0
    share = min(1.0, done / max(left - 1, 1))
    if kind == "linear":
        return 1.0 - (1.0 - end) * share
    return end + (1.0 - end) * (1.0 + math.cos(math.pi * share)) / 2.0
