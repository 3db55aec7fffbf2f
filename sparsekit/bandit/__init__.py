"""Bandits over an interval: tune a number by ask and tell. Imports numpy alone, so it serves any program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.bandit.base import Bandit, Box, BoxPull, Interval, Pull
from sparsekit.bandit.eucb import EUCB
from sparsekit.bandit.logged import Arm
from sparsekit.bandit.make import make_bandit, registry
from sparsekit.bandit.pucbv import PUCBV
from sparsekit.bandit.split_ucbv import SplitUCBV
from sparsekit.lazy import lazy_names

if TYPE_CHECKING:
    from sparsekit.bandit.study import Study as Study
    from sparsekit.bandit.trials import Axis as Axis
    from sparsekit.bandit.trials import Ended as Ended
    from sparsekit.bandit.trials import Score as Score
    from sparsekit.bandit.trials import ends as ends
    from sparsekit.bandit.trials import parse_axes as parse_axes

# What searches over the trials of a program, with Optuna.
_, __getattr__ = lazy_names(__name__)

__all__ = [
    "EUCB",
    "PUCBV",
    "Arm",
    "Bandit",
    "Box",
    "BoxPull",
    "Interval",
    "Pull",
    "SplitUCBV",
    "make_bandit",
    "registry",
]
