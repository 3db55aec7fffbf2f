"""Numbers as text, with their units. Only here are bytes written as MB."""

from __future__ import annotations

import math

__all__ = ["bytes_text", "flops_step", "flops_text", "seconds_text", "share_text"]

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def flops_step(flops: float) -> tuple[float, str]:
    """Return the size and the letter of the prefix: `(1e12, "T")` from 1e11 on."""
    return next(((size, letter) for size, letter in _STEPS if flops >= size / 10), (1.0, ""))


def flops_text(flops: float) -> str:
    """For example `0.53T`: three digits and a prefix; below a tenth of a step the next smaller prefix."""
    size, letter = flops_step(flops)
    return f"{flops / size:.3g}{letter}" if letter else f"{flops:.0f}"


def bytes_text(count: float) -> str:
    """For example `12.3 MB`; a megabyte is 10⁶ bytes."""
    return f"{count / 1e6:,.1f} MB"


def seconds_text(seconds: float) -> str:
    """For example `12.3 s`, or `4 min 05 s` from two minutes on."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def share_text(share: float | None) -> str:
    """For example `98.8%`; a dash for None and for numbers that are not finite."""
    return "–" if share is None or not math.isfinite(share) else f"{share:.1%}"
