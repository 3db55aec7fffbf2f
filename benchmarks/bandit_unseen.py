"""Functions each with its maxima at another place for every seed, written and committed before any bandit was run on them.

What was then measured changed SplitUCBV: the spike on a slope led to probes that are the more the less they lose.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bandit_objectives import UNIT, Objective, Point, highest, scaled

# --- cusps, cliffs, plateaus, narrow peaks, many maxima ---


def ledges(x: Point) -> float:
    if x[0] < 0.55:
        return -0.8 if x[0] < 0.2 else -0.5
    return -0.5 + 0.5 * (x[0] - 0.55) / 0.35 if x[0] <= 0.9 else -0.6


def spike_on_slope(x: Point) -> float:
    return -0.5 * (1.0 - x[0]) + 0.55 * math.exp(-(((x[0] - 0.3) / 0.05) ** 2))


def flat_bowl(x: Point) -> float:
    return -((2.0 * abs(x[0] - 0.41)) ** 4)


def log_cusp(x: Point) -> float:
    gap = abs(x[0] - 0.57)
    return 0.0 if gap == 0.0 else -2.0 / (2.0 - math.log(gap))


def barcode(x: Point) -> float:
    bar = sum(x[0] >= edge for edge in EDGES)
    return (-0.45 if bar % 2 else 0.0) - 0.4 * abs(EDGES[min(bar, len(EDGES) - 1)] - 0.53)


EDGES = (0.04, 0.11, 0.23, 0.28, 0.4, 0.53, 0.61, 0.74, 0.79, 0.93)


def three_sines(x: Point) -> float:
    return 0.2 * (math.sin(13.0 * x[0]) + math.sin(29.0 * x[0] + 1.0) + 0.8 * math.sin(51.0 * x[0] + 2.0))


def easom(x: Point) -> float:
    a, b = x[0] - 1.0, x[1] + 0.6
    return math.cos(a) * math.cos(b) * math.exp(-0.7 * (a * a + b * b)) - 1.0


def goldstein(x: Point) -> float:
    a, b = x
    one = 1.0 + (a + b + 1.0) ** 2 * (19.0 - 14.0 * a + 3.0 * a * a - 14.0 * b + 6.0 * a * b + 3.0 * b * b)
    two = 30.0 + (2.0 * a - 3.0 * b) ** 2 * (18.0 - 32.0 * a + 12.0 * a * a + 48.0 * b - 36.0 * a * b + 27.0 * b * b)
    return -math.log(one * two / 3.0) / 13.0


def ridge(x: Point) -> float:
    u, v = x[0] + x[1] - 0.9, x[0] - x[1] - 0.2
    return -min(1.0, 9.0 * u * u + 0.5 * v * v)


def far_sphere(x: Point) -> float:
    return -sum((v - place) ** 2 for v, place in zip(x, (0.2, 0.9, 0.5, 0.7, 0.35)))


# --- drifting ---


def wandering(x: Point, pull: int) -> float:
    place = 0.5 + 0.2 * math.sin(2.0 * math.pi * pull / 600.0) + 0.15 * math.sin(2.0 * math.pi * pull / 1580.0)
    return -1.3 * abs(x[0] - place)


def rising_rival(x: Point, pull: int) -> float:
    return max(-abs(x[0] - 0.3), -0.7 + 1.2 * pull / 1000.0 - 2.0 * abs(x[0] - 0.75))


def three_places(x: Point, pull: int) -> float:
    return -(abs(x[0] - (0.15, 0.8, 0.45)[min(pull // 333, 2)]) ** 0.9)


STEADY = {
    "Ledges": scaled(ledges, UNIT),
    "SpikeOnSlope": scaled(spike_on_slope, UNIT, highest(spike_on_slope)),
    "FlatBowl": scaled(flat_bowl, UNIT),
    "LogCusp": scaled(log_cusp, UNIT),
    "Barcode": scaled(barcode, UNIT, barcode([0.55])),
    "ThreeSines": scaled(three_sines, UNIT, highest(three_sines)),
    "Easom": scaled(easom, ((-3.0, 3.0),) * 2),
    "Goldstein": scaled(goldstein, ((-2.0, 2.0),) * 2, 1e-9),
    "Ridge": scaled(ridge, UNIT * 2),
    "FarSphere": scaled(far_sphere, UNIT * 5),
}
DRIFTING = {
    "Wandering": Objective(1, wandering),
    "RisingRival": Objective(1, rising_rival, top=lambda pull: max(0.0, -0.7 + 1.2 * pull / 1000.0)),
    "ThreePlaces": Objective(1, three_places),
}

UNSEEN = {f"{title}~": replace(objective, moved=True) for title, objective in (STEADY | DRIFTING).items()}
