"""What still works under an old name, and until which release."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TypeVar

__all__ = ["RemovedIn0_3Warning", "renamed_value"]

Value = TypeVar("Value", bound=str)


class RemovedIn0_3Warning(FutureWarning):
    """Release 0.3 removes what was used; the message names what takes its place."""


def renamed_value(option: str, value: Value, renamed: Mapping[str, Value]) -> Value:
    """Return the present name of an option's value, with a warning where an old one was given.

    Args:
        option: What the value was passed as, as its user writes it: `norm`.
        value: What was passed.
        renamed: Old name → present name.
    """
    if value not in renamed:
        return value
    present = renamed[value]
    warnings.warn(
        f"{option}={value!r} is now {option}={present!r}; the old name goes with release 0.3", RemovedIn0_3Warning, stacklevel=3
    )
    return present
