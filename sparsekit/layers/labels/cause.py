"""Cause: why units stay whole, with the line of the user's own code that an operator call comes from."""

from __future__ import annotations

import linecache
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).resolve().parents[2]) + os.sep)
"""Folders of torch and of this package."""


@dataclass(frozen=True)
class Cause:
    """Why units stay whole.

    Args:
        module: Qualified name of the module in which it happened.
        reason: One phrase.
        quiet: True for what is normal and needs no warning, such as the units of the output layer.
    """

    module: str
    reason: str
    quiet: bool = False


OUTPUT = Cause("", "model output", True)
"""Outranks all others: it is normal that the units of the last layer stay, whatever they pass through on the way out."""


def user_line(frames: Sequence[tuple[str, int]]) -> str:
    """` at file.py:12 ("code")` for the innermost frame outside torch and this package, or an empty string.

    Args:
        frames: (file name, line number), innermost first.
    """
    for filename, line in frames:
        if not filename.startswith(_LIBRARIES) and not filename.startswith("<"):
            code = textwrap.shorten(linecache.getline(filename, line), 80, placeholder=" …")
            return f" at {os.path.basename(filename)}:{line}" + (f" ({code})" if code else "")
    return ""
