"""meet_latency(): bisect the FLOPs of a narrow model until its measured milliseconds meet the budget."""

from collections.abc import Callable
from typing import TypeVar

from sparsekit.measure.budget import BudgetError

T = TypeVar("T")

_TRIES = 8
_CLOSE = 0.95
_INSIDE = 0.1
"""Part of the bracket at both ends that is never tried."""


def meet_latency(
    limit_ms: float, dense_ms: float, cut: Callable[[float], tuple[T, Callable[[], float]]], *, requested: str
) -> tuple[T, float]:
    """Cut to other shares of the FLOPs until the narrow model, measured, is within the limit and near it.

    Args:
        limit_ms: Largest time of a pass.
        dense_ms: Time of a pass of the dense model.
        cut: Called with a share of the dense FLOPs; returns the cut, and a function that measures its milliseconds.
        requested: The limit as the user gave it, for messages.

    Returns:
        The cut that came nearest to the limit without exceeding it, and its milliseconds.

    Raises:
        BudgetError: no model was measured within the limit, or none can be made.
    """
    low, high, share = 0.0, 1.0, min(1.0, limit_ms / dense_ms)
    before = 1.0, dense_ms
    best: tuple[T, float] | None = None
    fastest, refused = float("inf"), None
    for _ in range(_TRIES):
        try:
            found, measure = cut(share)
        except BudgetError as error:  # so few FLOPs cannot be reached
            low, refused = share, error
            share = (low + high) / 2
            continue
        measured = measure()
        if measured <= limit_ms:  # not by luck
            measured = max(measured, measure())
        fastest = min(fastest, measured)
        if measured > limit_ms:
            high = share
        else:
            low = share
            if best is None or measured > best[1]:
                best = found, measured
        if share == 1.0 == low or (best is not None and best[1] >= _CLOSE * limit_ms):
            break
        # The line through the last two, kept within the bracket.
        slope = (measured - before[1]) / (share - before[0]) if share != before[0] else 0.0
        aim = share + (0.98 * limit_ms - measured) / slope if slope > 0.0 else (low + high) / 2
        edge = _INSIDE * (high - low)
        before = share, measured
        share = min(max(aim, low + edge), high - edge if high < 1.0 else 1.0)
    if best is None and fastest == float("inf") and refused is not None:
        raise refused
    if best is None:
        raise BudgetError(
            f"the budget cannot be met: latency_ms ≤ {requested} was requested, and the fastest narrow model measured took"
            f" {fastest:.3g} ms; other programs on this machine or its number of threads may be the reason, or ask for more",
            {"latency_ms": fastest},
        )
    return best
