"""One line about each command of the core that comes by entry point, so that `sparsekit --help` imports none of them."""

from __future__ import annotations

from collections.abc import Mapping

SUMMARIES: Mapping[str, str] = {
    "prune": "Cut a model down to a budget, which is never exceeded, and report what came of it.",
    "sensitivity": "Narrow each group alone and measure by how much the model gets worse: which layers a budget should spare.",
    "tune": "Tune numbers and choices in any command line: a bandit chooses them, and a regular expression reads the score.",
}
"""Command → the first line of its help, which a test compares."""
