"""Functions to find the maximum of: objectives of PyXAB, and others that played no part in the design of SplitUCBV.

Each takes a point of the unit cube and the number of earlier pulls, which only drifting ones look at. `rise` is how far the
maximum lies above 0, so that `rise - value(point, pull)` is the regret of a pull.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import cos, exp, floor, log1p, pi, sin, sqrt
from typing import Any

import numpy as np

Point = Sequence[float]


@dataclass(frozen=True)
class Objective:
    """A function on the unit cube of `axes`: point and number of earlier pulls → mean reward, at most `rise`.

    If `moved`, each seed has its maxima elsewhere; see `placed`.
    """

    axes: int
    value: Callable[[Point, int], float]
    rise: float = 0.0
    moved: bool = False

    def regret(self, point: Point, pull: int) -> float:
        return self.rise - self.value(point, pull)

    def placed(self, title: str, seed: int) -> Objective:
        """The objective of one seed: if `moved`, axes are mirrored at random and bent by x → x^γ, ln γ in ±0.35.

        Algorithms that look at the middles of halved intervals, as PyXAB's do, may meet a maximum at a fixed place by luck.
        """
        if not self.moved:
            return self
        rng = np.random.default_rng([zlib.crc32(title.encode()), seed, 1])
        powers = np.exp(rng.uniform(-0.35, 0.35, self.axes)).tolist()
        mirrored = rng.integers(2, size=self.axes).tolist()

        def value(point: Point, pull: int) -> float:
            return self.value([abs(flip - x) ** power for x, power, flip in zip(point, powers, mirrored)], pull)

        return replace(self, value=value)


def scaled(function: Callable[..., float], axes: int = 1, low: float = 0.0, high: float = 1.0, rise: float = 0.0) -> Objective:
    """A function of one number for each axis, read through the unit cube."""
    return Objective(axes, lambda point, _: function(*(low + share * (high - low) for share in point)), rise)


@cache
def _of_pyxab(name: str) -> Any:
    return getattr(importlib.import_module(f"PyXAB.synthetic_obj.{name}"), name)()


def pyxab(name: str, scale: float = 1.0, axes: int = 1, **options: float) -> Objective:
    return scaled(lambda *x: float(_of_pyxab(name).f(list(x))) / scale, axes, **options)


def hartmann3(*x: float) -> float:
    rows = ((3.0, 10.0, 30.0), (0.1, 10.0, 35.0)) * 2
    places = ((0.3689, 0.117, 0.2673), (0.4699, 0.4387, 0.747), (0.1091, 0.8732, 0.5547), (0.0381, 0.5743, 0.8828))
    total = sum(
        height * exp(-sum(row[i] * (x[i] - place[i]) ** 2 for i in range(3)))
        for height, row, place in zip((1.0, 1.2, 3.0, 3.2), rows, places)
    )
    return total / 3.86278 - 1.0


def branin(a: float, b: float) -> float:
    a, b = 15.0 * a - 5.0, 15.0 * b
    return -((b - 5.1 * a * a / (4.0 * pi**2) + 5.0 * a / pi - 6.0) ** 2
             + 10.0 * (1.0 - 1.0 / (8.0 * pi)) * cos(a) + 10.0 - 0.397887) / 150.0  # fmt: skip


PYXAB = {
    # Its maximum lies at pi / 6, a cusp, where the sine is 0.
    "Garland": pyxab("Garland", rise=pi / 6.0 * (1.0 - pi / 6.0) * 4.0),
    "DoubleSine": pyxab("DoubleSine"),
    "DifficultFunc": pyxab("DifficultFunc"),
    "Himmelblau": pyxab("Himmelblau", 890.0, 2, low=-5.0, high=5.0),
    "Ackley": pyxab("Ackley", abs(20.0 * exp(-0.2 * sqrt(0.5)) + exp(-1.0) - 20.0 - exp(1.0)), 2, low=-1.0),
    "Rastrigin": pyxab("Rastrigin", 40.0, 2, low=-1.0),
}
HELD_OUT = {
    "Cusp": scaled(lambda x: -(abs(x - 0.37) ** 0.5)),
    "NarrowPeak": scaled(lambda x: max(0.6 * exp(-(((x - 0.25) / 0.2) ** 2)), exp(-(((x - 0.81) / 0.03) ** 2))) - 1.0),
    "BroadHill": scaled(lambda x: -1.5 * (x - 0.66) ** 2),
    "Cliff": scaled(lambda x: x / 0.618 - 1.0 if x <= 0.618 else -1.3),
    "Shelf": scaled(lambda x: 0.0 if 0.55 <= x < 0.7 else -0.25 if x < 0.55 else -1.0),
    "Stairs": scaled(lambda x: -abs(floor(11.0 * x) - 7.0) / 7.0),
    "Ripple": scaled(lambda x: -1.2 * abs(x - 0.43) - 0.25 * (1.0 - cos(38.0 * (x - 0.43)))),
    "Ramp": scaled(lambda x: -((1.0 - x) ** 1.3)),
    "Fence": scaled(lambda x: -0.35 * abs(sin(9.0 * pi * (x - 0.29))) ** 0.5 - 1.5 * abs(x - 0.29)),
    "Branin": scaled(branin, 2),
    "Valley": scaled(lambda a, b: -log1p(100.0 * (b - a * a) ** 2 + (1.0 - a) ** 2) / 7.0, 2, low=-2.0, high=2.0),
    "TiltedCusp": scaled(lambda a, b: -(((a - 0.7 + b - 0.2) ** 2 + 0.1 * (a - 0.7 - b + 0.2) ** 2) ** 0.3), 2),
    "Hartmann3": scaled(hartmann3, 3),
}
DRIFTING = {
    "DriftingHill": Objective(1, lambda x, pull: -abs(x[0] - 0.5 - 0.3 * sin(2.0 * pi * pull / 1000.0))),
    "JumpingHill": Objective(1, lambda x, pull: -(abs(x[0] - (0.3 if pull < 300 else 0.75)) ** 0.8)),
}
MOVED = {f"{title}~": replace(objective, moved=True) for title, objective in (HELD_OUT | DRIFTING).items()}
OBJECTIVES = PYXAB | HELD_OUT | DRIFTING | MOVED
