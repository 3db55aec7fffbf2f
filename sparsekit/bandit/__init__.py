"""Bandits over an interval: tune a number by ask and tell. Imports numpy alone, so it serves any program."""

from __future__ import annotations

from sparsekit.bandit.base import Bandit, Box, Interval, Pull
from sparsekit.bandit.logged import Arm
from sparsekit.bandit.make import make_bandit, registry
from sparsekit.bandit.pucbv import PUCBV
from sparsekit.bandit.split_ucbv import SplitUCBV

__all__ = ["PUCBV", "Arm", "Bandit", "Box", "Interval", "Pull", "SplitUCBV", "make_bandit", "registry"]
