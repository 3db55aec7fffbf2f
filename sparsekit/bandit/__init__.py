"""Bandits over an interval: tune a number by ask and tell. Only `BanditSampler` imports more than numpy: Optuna."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names

if TYPE_CHECKING:
    from sparsekit.bandit.base import Bandit as Bandit
    from sparsekit.bandit.base import Box as Box
    from sparsekit.bandit.base import Interval as Interval
    from sparsekit.bandit.base import Pull as Pull
    from sparsekit.bandit.logged import Arm as Arm
    from sparsekit.bandit.make import make_bandit as make_bandit
    from sparsekit.bandit.make import registry as registry
    from sparsekit.bandit.optuna import BanditSampler as BanditSampler
    from sparsekit.bandit.pucbv import PUCBV as PUCBV
    from sparsekit.bandit.split_ucbv import SplitUCBV as SplitUCBV

_HOMES = {
    "sparsekit.bandit.base": "Bandit Box Interval Pull",
    "sparsekit.bandit.logged": "Arm",
    "sparsekit.bandit.make": "make_bandit registry",
    "sparsekit.bandit.optuna": "BanditSampler",
    "sparsekit.bandit.pucbv": "PUCBV",
    "sparsekit.bandit.split_ucbv": "SplitUCBV",
}
__all__, __getattr__ = lazy_names(__name__, _HOMES)
