"""Numbers as text, with their units. Only here are bytes written as MB."""

from __future__ import annotations

import math

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def flops_step(flops: float) -> tuple[float, str]:
    """Return the size and the letter of the prefix: `(1e12, "T")` from 1e11 on."""
    return next(((size, letter) for size, letter in _STEPS if flops >= size / 10), (1.0, ""))


def flops_text(flops: float) -> str:
    """For example `0.53T`: three digits and a prefix; below a tenth of a step the next smaller prefix."""
    size, letter = flops_step(flops)
    return f"{flops / size:.3g}{letter}" if letter else f"{flops:.0f}"


def bytes_scale(count: float) -> tuple[float, str, int]:
    """Return size, unit and decimals: `(1e6, " MB", 1)` from 1e5 on, and for zero."""
    if count >= 1e5 or count == 0:
        return 1e6, " MB", 1
    return (1e3, " kB", 1) if count >= 1e2 else (1.0, " bytes", 0)


def seconds_scale(seconds: float) -> tuple[float, str, int]:
    """Return size, unit and decimals: milliseconds below a tenth of a second, where there are any."""
    if 0 < seconds < 0.1:
        return 1e-3, " ms", 0 if seconds >= 0.01 else 1
    return 1.0, " s", 2 if seconds < 10 else 1


def seconds_text(seconds: float) -> str:
    """For example `12.3 s`, `4 min 05 s` from two minutes on, and `4.2 ms` below a tenth of a second."""
    if seconds < 120:
        size, unit, decimals = seconds_scale(seconds)
        return f"{seconds / size:.{min(decimals, 1)}f}{unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def minutes_text(seconds: float) -> str:
    """For example `1 min 24 s` beside minutes, where `84.3 s` would have to be converted; below a minute `24.3 s`."""
    if seconds < 60:
        return seconds_text(seconds)
    return seconds_text(seconds) if seconds >= 120 else f"1 min {round(seconds) - 60:02d} s"


def share_text(share: float | None) -> str:
    """For example `98.8%`; a dash for None and for numbers that are not finite."""
    return "–" if share is None or not math.isfinite(share) else f"{share:.1%}"
