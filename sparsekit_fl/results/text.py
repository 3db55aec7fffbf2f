"""Numbers as text, with their units. Only here are bytes written as MB."""

import math

_STEPS = {
    "share": ((0.01, "%"),),
    "flops": ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")),
    "bytes": ((1e6, " MB"), (1e3, " kB"), (1.0, " bytes")),
    "seconds": ((1.0, " s"), (1e-3, " ms")),
}


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return the size and the sign of the step by which numbers up to `largest` are written: `(1e12, "T")` from 1e11 on.

    Args:
        unit: "share", "flops", "bytes" or "seconds"; others have no steps.
        largest: No bytes and no seconds are zero of the first step.
    """
    steps = _STEPS.get(unit, ((1.0, ""),))
    if largest == 0 and unit != "flops":
        return steps[0]
    return next((step for step in steps if largest >= step[0] / 10), steps[-1])


def flops_text(flops: float) -> str:
    """For example `0.53T`: three digits and a prefix; below a tenth of a step the next smaller prefix."""
    size, letter = scale("flops", flops)
    return f"{flops / size:.3g}{letter}" if letter else f"{flops:.0f}"


def seconds_text(seconds: float, *, minutes_from: float = 120) -> str:
    """For example `12.3 s`, `4 min 05 s` from two minutes on, and `4.2 ms` below a tenth of a second."""
    if seconds < minutes_from:
        size, unit = scale("seconds", seconds)
        return f"{seconds / size:.{0 if 0.01 <= seconds < 0.1 else 1}f}{unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def share_text(share: float | None) -> str:
    """For example `98.8%`; a dash for None and for numbers that are not finite."""
    return "–" if share is None or not math.isfinite(share) else f"{share:.1%}"


def score_text(metric: str, value: float) -> str:
    """For example `accuracy 98.4%` or `rmse 0.213`."""
    return f"{metric} {share_text(value) if metric == 'accuracy' else f'{value:.4g}'}"
