"""Functions to find the maximum of: those of PyXAB, and others that played no part in the design of SplitUCBV.

Each takes a point of the unit cube and the number of earlier pulls, which only drifting ones look at. `rise` is how far the
maximum lies above 0, so that `rise - value(point, pull)` is the regret of a pull.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

Point = Sequence[float]


@dataclass(frozen=True)
class Objective:
    """A function on the unit cube.

    Args:
        axes: Of the cube.
        value: Point and number of earlier pulls → mean reward.
        rise: The largest mean reward.
        moved: Each seed has its maxima elsewhere; see `placed`.
    """

    axes: int
    value: Callable[[Point, int], float]
    rise: float = 0.0
    moved: bool = False

    def regret(self, point: Point, pull: int) -> float:
        """How far the mean reward of a point lies below the largest."""
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


def scaled(function: Callable[[Point], float], bounds: Sequence[tuple[float, float]], rise: float = 0.0) -> Objective:
    """A function on a box, read through the unit cube."""

    def value(point: Point, _pull: int) -> float:
        return function([low + share * (high - low) for share, (low, high) in zip(point, bounds)])

    return Objective(len(bounds), value, rise)


UNIT = ((0.0, 1.0),)


# --- PyXAB's, with its formulas ---


def garland(x: Point) -> float:
    return x[0] * (1.0 - x[0]) * (4.0 - math.sqrt(abs(math.sin(60.0 * x[0]))))


def double_sine(x: Point) -> float:
    gap = 2.0 * abs(x[0] - 0.5)
    if gap == 0.0:
        return 0.0
    outer, inner = gap ** -math.log2(0.8), gap ** -math.log2(0.3)
    return (math.sin(math.pi * math.log2(gap)) + 1.0) / 2.0 * (outer - inner) - outer


def difficult(x: Point) -> float:
    gap = abs(x[0] - 0.5)
    if gap == 0.0:
        return 0.0
    log = math.log(gap)
    return (0.0 if log - math.floor(log) < 0.5 else math.sqrt(gap) - gap**2) - math.sqrt(gap)


def himmelblau(x: Point) -> float:
    a, b = x
    return -((a * a + b - 11.0) ** 2 + (a + b * b - 7.0) ** 2) / 890.0


def ackley(x: Point) -> float:
    a, b = x
    depth = abs(20.0 * math.exp(-0.2 * math.sqrt(0.5)) + math.exp(-1.0) - 20.0 - math.e)
    bowl = 20.0 * math.exp(-0.2 * math.sqrt(0.5 * (a * a + b * b)))
    return (bowl + math.exp(0.5 * (math.cos(2.0 * math.pi * a) + math.cos(2.0 * math.pi * b))) - math.e - 20.0) / depth


def rastrigin(x: Point) -> float:
    return -sum(10.0 + v * v - 10.0 * math.cos(2.0 * math.pi * v) for v in x) / (20.0 * len(x))


# Garland's maximum lies at pi / 6, a cusp, where the sine is 0.
PYXAB = {
    "Garland": scaled(garland, UNIT, garland([math.pi / 6.0])),
    "DoubleSine": scaled(double_sine, UNIT),
    "DifficultFunc": scaled(difficult, UNIT),
    "Himmelblau": scaled(himmelblau, ((-5.0, 5.0),) * 2),
    "Ackley": scaled(ackley, ((-1.0, 1.0),) * 2),
    "Rastrigin": scaled(rastrigin, ((-1.0, 1.0),) * 2),
}


# --- others, held out ---


def cusp(x: Point) -> float:
    return -(abs(x[0] - 0.37) ** 0.5)


def narrow_peak(x: Point) -> float:
    broad = 0.6 * math.exp(-(((x[0] - 0.25) / 0.2) ** 2))
    return max(broad, math.exp(-(((x[0] - 0.81) / 0.03) ** 2))) - 1.0


def broad_hill(x: Point) -> float:
    return -1.5 * (x[0] - 0.66) ** 2


def cliff(x: Point) -> float:
    return x[0] / 0.618 - 1.0 if x[0] <= 0.618 else -1.3


def shelf(x: Point) -> float:
    return 0.0 if 0.55 <= x[0] < 0.7 else -0.25 if x[0] < 0.55 else -1.0


def stairs(x: Point) -> float:
    return -abs(math.floor(11.0 * x[0]) - 7.0) / 7.0


def ripple(x: Point) -> float:
    return -1.2 * abs(x[0] - 0.43) - 0.25 * (1.0 - math.cos(38.0 * (x[0] - 0.43)))


def ramp(x: Point) -> float:
    return -((1.0 - x[0]) ** 1.3)


def fence(x: Point) -> float:
    return -0.35 * abs(math.sin(9.0 * math.pi * (x[0] - 0.29))) ** 0.5 - 1.5 * abs(x[0] - 0.29)


def branin(x: Point) -> float:
    a, b = x
    return -((b - 5.1 * a * a / (4.0 * math.pi**2) + 5.0 * a / math.pi - 6.0) ** 2
             + 10.0 * (1.0 - 1.0 / (8.0 * math.pi)) * math.cos(a) + 10.0 - 0.397887) / 150.0  # fmt: skip


def valley(x: Point) -> float:
    a, b = x
    return -math.log1p(100.0 * (b - a * a) ** 2 + (1.0 - a) ** 2) / 7.0


def tilted_cusp(x: Point) -> float:
    a, b = x[0] - 0.7, x[1] - 0.2
    return -(((a + b) ** 2 + 0.1 * (a - b) ** 2) ** 0.3)


def hartmann3(x: Point) -> float:
    rows = ((3.0, 10.0, 30.0), (0.1, 10.0, 35.0)) * 2
    places = ((0.3689, 0.117, 0.2673), (0.4699, 0.4387, 0.747), (0.1091, 0.8732, 0.5547), (0.0381, 0.5743, 0.8828))
    total = sum(
        height * math.exp(-sum(row[i] * (x[i] - place[i]) ** 2 for i in range(3)))
        for height, row, place in zip((1.0, 1.2, 3.0, 3.2), rows, places)
    )
    return total / 3.86278 - 1.0


def drifting_hill(x: Point, pull: int) -> float:
    return -abs(x[0] - 0.5 - 0.3 * math.sin(2.0 * math.pi * pull / 1000.0))


def jumping_hill(x: Point, pull: int) -> float:
    return -((abs(x[0] - (0.3 if pull < 300 else 0.75))) ** 0.8)


HELD_OUT = {
    "Cusp": scaled(cusp, UNIT),
    "NarrowPeak": scaled(narrow_peak, UNIT),
    "BroadHill": scaled(broad_hill, UNIT),
    "Cliff": scaled(cliff, UNIT),
    "Shelf": scaled(shelf, UNIT),
    "Stairs": scaled(stairs, UNIT),
    "Ripple": scaled(ripple, UNIT),
    "Ramp": scaled(ramp, UNIT),
    "Fence": scaled(fence, UNIT),
    "Branin": scaled(branin, ((-5.0, 10.0), (0.0, 15.0))),
    "Valley": scaled(valley, ((-2.0, 2.0),) * 2),
    "TiltedCusp": scaled(tilted_cusp, UNIT * 2),
    "Hartmann3": scaled(hartmann3, UNIT * 3),
}

DRIFTING = {"DriftingHill": Objective(1, drifting_hill), "JumpingHill": Objective(1, jumping_hill)}

MOVED = {f"{title}~": replace(objective, moved=True) for title, objective in (HELD_OUT | DRIFTING).items()}

OBJECTIVES = PYXAB | HELD_OUT | DRIFTING | MOVED
