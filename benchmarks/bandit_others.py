"""More functions to find the maximum of, each with its maxima at another place for every seed.

They were written before anything was measured on them. What was then measured led to the probes of SplitUCBV: without them it
had 2.3 times VHCT's regret on the tower. Functions that have led to nothing are in `bandit_unseen.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bandit_objectives import UNIT, Objective, Point, scaled

# --- cusps, cliffs, plateaus, narrow peaks, many maxima ---


def two_cusps(x: Point) -> float:
    return max(-(abs(x[0] - 0.78) ** 0.7), -0.1 - abs(x[0] - 0.2) ** 0.5)


def saw(x: Point) -> float:
    teeth = 6.0 * x[0]
    return -0.6 * abs(math.ceil(teeth) / 6.0 - 5.0 / 6.0) - 0.3 * (math.ceil(teeth) - teeth)


def terraces(x: Point) -> float:
    return next(height for end, height in TERRACES if x[0] <= end)


# Right ends of plateaus, and how high they are.
TERRACES = ((0.15, -0.8), (0.42, -0.35), (0.5, -0.6), (0.58, 0.0), (0.8, -0.2), (1.0, -0.9))


def notched(x: Point) -> float:
    return -1.0 if 0.6 < x[0] < 0.66 else -abs(x[0] - 0.59)


def steep_edge(x: Point) -> float:
    return -abs(math.log10(x[0] + 0.001) + 2.0) / 2.0


def tower(x: Point) -> float:
    return 0.0 if 0.33 < x[0] < 0.4 else -0.4 - 0.4 * abs(x[0] - 0.7)


def weierstrass(x: Point) -> float:
    return sum(0.5**k * (math.cos(3.0**k * math.pi * (x[0] - 0.37)) - 1.0) for k in range(8)) / 3.0


def camel(x: Point) -> float:
    a, b = x
    return -((4.0 - 2.1 * a * a + a**4 / 3.0) * a * a + a * b + 4.0 * (b * b - 1.0) * b * b + 1.0316285) / 7.0


def levy(x: Point) -> float:
    a, b = (1.0 + (v - 1.0) / 4.0 for v in x)
    first = math.sin(math.pi * a) ** 2 + (a - 1.0) ** 2 * (1.0 + 10.0 * math.sin(math.pi * a + 1.0) ** 2)
    return -(first + (b - 1.0) ** 2 * (1.0 + math.sin(2.0 * math.pi * b) ** 2)) / 50.0


def michalewicz(x: Point) -> float:
    return sum(math.sin(v) * math.sin((i + 1) * v * v / math.pi) ** 20 for i, v in enumerate(x)) / 1.8013035 - 1.0


def tiles(x: Point) -> float:
    return -(abs(math.floor(5.0 * x[0]) - 3.0) + abs(math.floor(5.0 * x[1]) - 1.0)) / 6.0


def cone(x: Point) -> float:
    return -math.sqrt(sum((v - place) ** 2 for v, place in zip(x, (0.3, 0.8, 0.55, 0.4))))


# --- drifting ---


def swinging_cusp(x: Point, pull: int) -> float:
    return -(abs(x[0] - 0.5 - 0.15 * math.sin(2.0 * math.pi * pull / 700.0)) ** 0.6)


def heights(pull: int) -> tuple[float, float]:
    share = 1.0 / (1.0 + math.exp((pull - 400.0) / 40.0))
    return 0.3 + 0.6 * share, 0.9 - 0.6 * share


def changing_places(x: Point, pull: int) -> float:
    left, right = heights(pull)
    return max(left * math.exp(-(((x[0] - 0.25) / 0.12) ** 2)), right * math.exp(-(((x[0] - 0.7) / 0.12) ** 2)))


def sinking(x: Point, pull: int) -> float:
    return max(-pull / 1000.0 - 2.0 * abs(x[0] - 0.6), -0.3 - abs(x[0] - 0.15))


def three_jumps(x: Point, pull: int) -> float:
    return -1.5 * abs(x[0] - (0.2, 0.5, 0.85, 0.35)[min(pull // 250, 3)])


STEADY = {
    "TwoCusps": scaled(two_cusps, UNIT),
    "Saw": scaled(saw, UNIT),
    "Terraces": scaled(terraces, UNIT),
    "Notched": scaled(notched, UNIT),
    "SteepEdge": scaled(steep_edge, UNIT),
    "Tower": scaled(tower, UNIT),
    "Weierstrass": scaled(weierstrass, UNIT),
    "Camel": scaled(camel, ((-2.0, 2.0), (-1.0, 1.0)), 1e-9),
    "Levy": scaled(levy, ((-10.0, 10.0),) * 2),
    "Michalewicz": scaled(michalewicz, ((0.0, math.pi),) * 2, 1e-8),
    "Tiles": scaled(tiles, UNIT * 2),
    "Cone": scaled(cone, UNIT * 4),
}
DRIFTING = {
    "SwingingCusp": Objective(1, swinging_cusp),
    "ChangingPlaces": Objective(1, changing_places, top=lambda pull: max(heights(pull))),
    "Sinking": Objective(1, sinking, top=lambda pull: max(-pull / 1000.0, -0.3)),
    "ThreeJumps": Objective(1, three_jumps),
}

OTHERS = {f"{title}~": replace(objective, moved=True) for title, objective in (STEADY | DRIFTING).items()}
