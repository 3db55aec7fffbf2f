"""Functions that played no part in the design of SplitUCBV, each with its maxima at another place for every seed.

They were written and committed before any bandit was run on them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bandit_objectives import UNIT, Objective, Point, highest, scaled

# --- cusps, cliffs, plateaus, narrow peaks, many maxima ---


def sawtooth(x: Point) -> float:
    return -0.7 * abs(x[0] - 0.62) + 0.3 * ((8.0 * (x[0] - 0.62) + 1.0) % 1.0 - 1.0)


def tower_beside_hill(x: Point) -> float:
    return max(-0.3 - 3.0 * (x[0] - 0.3) ** 2, -12.0 * abs(x[0] - 0.78))


def two_plateaus(x: Point) -> float:
    return 0.0 if 0.58 <= x[0] < 0.7 else -0.25 if 0.1 <= x[0] < 0.45 else -0.7


def levy(x: Point) -> float:
    w = 1.0 + (x[0] - 1.0) / 4.0
    return -(math.sin(math.pi * w) ** 2 + (w - 1.0) ** 2 * (1.0 + math.sin(2.0 * math.pi * w) ** 2)) / 8.0


def rough_hill(x: Point) -> float:
    return -2.0 * (x[0] - 0.36) ** 2 + sum(0.12 * 0.6**k * math.cos(11.0 * 2.1**k * x[0] + k) for k in range(5))


def skewed(x: Point) -> float:
    gap = x[0] - 0.82
    return -(abs(gap) ** 0.5) if gap > 0.0 else -1.1 * abs(gap) ** 1.7


def breaking_point(x: Point) -> float:
    return x[0] ** 2 / 0.74**2 - 1.0 if x[0] < 0.74 else -0.9


def overloaded(x: Point) -> float:
    return -0.15 * abs(math.log2((x[0] + 0.02) / 0.3)) - 0.5 * max(0.0, x[0] - 0.5)


def camel(x: Point) -> float:
    a, b = x
    value = (4.0 - 2.1 * a * a + a**4 / 3.0) * a * a + a * b + (4.0 * b * b - 4.0) * b * b
    return -math.log1p(value + 1.0316284535) / 2.0


def checks(x: Point) -> float:
    dark = (math.floor(5.0 * x[0]) + math.floor(5.0 * x[1])) % 2
    return -0.5 * math.hypot(x[0] - 0.7, x[1] - 0.3) - 0.3 * dark


def valley(x: Point) -> float:
    return -0.6 * abs(x[1] - x[0] * x[0]) ** 0.5 - 0.3 * abs(x[0] - 0.6)


HARTMANN = (
    (1.0, (3.0, 10.0, 30.0), (0.3689, 0.117, 0.2673)),
    (1.2, (0.1, 10.0, 35.0), (0.4699, 0.4387, 0.747)),
    (3.0, (3.0, 10.0, 30.0), (0.1091, 0.8732, 0.5547)),
    (3.2, (0.1, 10.0, 35.0), (0.0381, 0.5743, 0.8828)),
)


def hartmann(x: Point) -> float:
    total = sum(
        height * math.exp(-sum(rate * (v - at) ** 2 for v, rate, at in zip(x, rates, place)))
        for height, rates, place in HARTMANN
    )
    return (total - 3.862782) / 4.0


# --- drifting ---


def pendulum(x: Point, pull: int) -> float:
    return -1.5 * abs(x[0] - 0.5 - 0.25 * math.sin(pull / 180.0))


def exchange(x: Point, pull: int) -> float:
    share = min(max((pull - 300.0) / 400.0, 0.0), 1.0)
    return max(-2.0 * abs(x[0] - 0.3) - 0.6 * share, -2.0 * abs(x[0] - 0.75) - 0.6 * (1.0 - share))


def exchange_top(pull: int) -> float:
    share = min(max((pull - 300.0) / 400.0, 0.0), 1.0)
    return -0.6 * min(share, 1.0 - share)


def outage(x: Point, pull: int) -> float:
    return max(-2.5 * (x[0] - 0.2) ** 2 - 0.8 * (400 <= pull < 700), -0.2 - abs(x[0] - 0.7))


STEADY = {
    "Sawtooth": scaled(sawtooth, UNIT),
    "TowerBesideHill": scaled(tower_beside_hill, UNIT),
    "TwoPlateaus": scaled(two_plateaus, UNIT),
    "Levy": scaled(levy, ((-10.0, 10.0),)),
    "RoughHill": scaled(rough_hill, UNIT, highest(rough_hill)),
    "Skewed": scaled(skewed, UNIT),
    "BreakingPoint": scaled(breaking_point, UNIT),
    "Overloaded": scaled(overloaded, UNIT),
    "Camel": scaled(camel, ((-2.0, 2.0), (-1.2, 1.2)), 1e-9),
    "Checks": scaled(checks, UNIT * 2),
    "Valley": scaled(valley, UNIT * 2),
    "Hartmann": scaled(hartmann, UNIT * 3, 1e-6),
}
DRIFTING = {
    "Pendulum": Objective(1, pendulum),
    "Exchange": Objective(1, exchange, top=exchange_top),
    "Outage": Objective(1, outage, top=lambda pull: -0.2 * (400 <= pull < 700)),
}

FRESH = {f"{title}~": replace(objective, moved=True) for title, objective in (STEADY | DRIFTING).items()}
