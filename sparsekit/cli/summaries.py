"""One line about each command of the core that comes by entry point, so that `sparsekit --help` imports none of them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SUMMARIES"]

SUMMARIES: Mapping[str, str] = {
    "tune": "Tune numbers in any command line: a bandit chooses them, and a regular expression reads the score.",
}
"""Command → the first line of its help, which a test compares."""
