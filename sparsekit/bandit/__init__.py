"""Bandits over an interval: tune a number by ask and tell. Imports numpy alone, so it serves any program."""

from __future__ import annotations

from sparsekit.bandit.arms import Arm
from sparsekit.bandit.base import Bandit, Interval, Pull
from sparsekit.bandit.eucb import EUCB
from sparsekit.bandit.make import make_bandit, registry, restore_bandit
from sparsekit.bandit.pucbv import PUCBV
from sparsekit.bandit.space import Box, BoxPull
from sparsekit.bandit.split_ucbv import SplitUCBV
from sparsekit.bandit.ucbv import UCBV

__all__ = [
    "EUCB",
    "PUCBV",
    "UCBV",
    "Arm",
    "Bandit",
    "Box",
    "BoxPull",
    "Interval",
    "Pull",
    "SplitUCBV",
    "make_bandit",
    "registry",
    "restore_bandit",
]
