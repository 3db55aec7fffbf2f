"""Bandits over an interval: tune one number by ask and tell. Imports numpy alone, so it serves any program."""

from __future__ import annotations

from sparsekit.bandit.base import Bandit, Interval, Pull
from sparsekit.bandit.pucbv import PUCBV, Arm

__all__ = ["PUCBV", "Arm", "Bandit", "Interval", "Pull"]
