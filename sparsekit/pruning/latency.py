"""meet_latency(): ask a table of layer times for other milliseconds until the measured ones meet the budget."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from sparsekit.measure.budget import Budget, BudgetError

T = TypeVar("T")

_TRIES = 6
_CLOSE = 0.95


def meet_latency(budget: Budget, limit_ms: float, cut: Callable[[Budget], tuple[T, float]]) -> tuple[T, float]:
    """Ask the table for other milliseconds until the narrow model, measured, is within the limit and near it.

    Args:
        budget: In absolute numbers.
        limit_ms: What a pass may take.
        cut: Called with a budget; returns what it cuts and the measured milliseconds.

    Returns:
        What came nearest to the limit without exceeding it, and its milliseconds.

    Raises:
        BudgetError: nothing that the table offers was measured within the limit.
    """
    requested = limit_ms
    best: tuple[T, float] | None = None
    fastest = float("inf")
    for _ in range(_TRIES):
        changed: dict[str, Any] = {"latency_ms": requested}
        try:
            found, measured = cut(replace(budget, **changed))
            if measured <= limit_ms:  # not by luck
                measured = max(measured, cut(replace(budget, **changed))[1])
        except BudgetError:
            if best is None and fastest == float("inf"):
                raise
            break
        fastest = min(fastest, measured)
        if measured <= limit_ms and (best is None or measured > best[1]):
            best = found, measured
        if best is not None and best[1] >= _CLOSE * limit_ms:
            break
        # A little less than the rule of three, since times vary from run to run.
        requested *= min(2.0, 0.98 * limit_ms / measured)
    if best is None:
        raise BudgetError(
            f"the budget cannot be met: latency_ms ≤ {limit_ms:.3g} was requested, and the fastest narrow model measured took"
            f" {fastest:.3g} ms; other programs on this machine or its number of threads may be the reason, or ask for more",
            {"latency_ms": fastest},
        )
    return best
