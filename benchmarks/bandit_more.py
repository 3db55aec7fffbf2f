"""Still more functions, each with its maxima at another place for every seed.

They were written and committed before any bandit was run on them. What was then measured led SplitUCBV to spend more on probes
where they cost little: with one probe each time the rewards had doubled it had 1.7 times VHCT's regret on the slit. The seasons
showed that after a fall of rewards arms learned from one another too seldom.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bandit_objectives import UNIT, Objective, Point, scaled

# --- cusps, cliffs, plateaus, narrow peaks, many maxima ---


def three_bumps(x: Point) -> float:
    return max(height * math.exp(-(((x[0] - at) / width) ** 2)) for at, height, width in BUMPS) - 1.0


# Place, height, width.
BUMPS = ((0.15, 0.5, 0.1), (0.47, 0.8, 0.06), (0.83, 1.0, 0.05))


def tent(x: Point) -> float:
    return -1.2 * (0.6 - x[0]) if x[0] < 0.6 else -4.0 * (x[0] - 0.6)


def root_edge(x: Point) -> float:
    return -math.sqrt(1.0 - x[0])


def comb(x: Point) -> float:
    return -0.25 * (math.floor(20.0 * x[0]) % 3) - 0.7 * abs(math.floor(20.0 * x[0]) / 20.0 - 0.45)


def falling_steps(x: Point) -> float:
    return -1.0 if x[0] > 0.85 else math.floor(5.0 * x[0] / 0.85 - 1e-12) / 5.0 - 0.8


def chirp(x: Point) -> float:
    return 0.4 * (math.cos(45.0 * (x[0] - 0.52) * (x[0] + 0.48)) - 1.0) - 0.6 * abs(x[0] - 0.52)


def two_wells(x: Point) -> float:
    return -(abs(abs(x[0] - 0.5) - 0.27) ** 0.8)


def slit(x: Point) -> float:
    return 0.0 if 0.61 <= x[0] < 0.67 else -0.5


def booth(x: Point) -> float:
    a, b = x
    return -math.log1p((a + 2.0 * b - 7.0) ** 2 + (2.0 * a + b - 5.0) ** 2) / 8.0


def drop_wave(x: Point) -> float:
    square = (x[0] - 0.4) ** 2 + (x[1] + 0.7) ** 2
    return (1.0 + math.cos(6.0 * math.sqrt(square))) / (0.5 * square + 2.0) - 1.0


def foxholes(x: Point) -> float:
    return sum(1.0 / (1.0 + 60.0 * ((x[0] - a) ** 2 + (x[1] - b) ** 2) / height) * height for a, b, height in HOLES)


# Place and height; the first is the highest by far, whatever the others add.
HOLES = ((0.72, 0.33, 0.9), (0.2, 0.7, 0.5), (0.25, 0.2, 0.4), (0.85, 0.85, 0.45))


def corner(x: Point) -> float:
    return -0.5 * (x[0] + (1.0 - x[1]) + 0.5 * abs(x[2] - 0.3)) - 0.3 * (x[0] > 0.5)


# --- drifting ---


def slide(x: Point, pull: int) -> float:
    return -1.2 * abs(x[0] - 0.2 - 0.6 * pull / 1000.0)


def favourite_falls(x: Point, pull: int) -> float:
    return max(-3.0 * abs(x[0] - 0.65) - 0.6 * (pull >= 350), -0.25 - abs(x[0] - 0.2))


def seasons(x: Point, pull: int) -> float:
    warm = pull // 200 % 2 == 0
    return max(-abs(x[0] - 0.25) - 0.5 * (not warm), -abs(x[0] - 0.8) - 0.5 * warm)


def _highest() -> float:
    """Of `foxholes`, near its first hole, by shrinking steps."""
    at, best, step = [0.72, 0.33], foxholes([0.72, 0.33]), 0.01
    while step > 1e-9:
        near = [[at[0] + i * step, at[1] + j * step] for i in (-1, 0, 1) for j in (-1, 0, 1)]
        found = max(near, key=foxholes)
        step = step if foxholes(found) > best else 0.5 * step
        at, best = (found, foxholes(found)) if foxholes(found) > best else (at, best)
    return best


STEADY = {
    "ThreeBumps": scaled(three_bumps, UNIT, 1e-9),
    "Tent": scaled(tent, UNIT),
    "RootEdge": scaled(root_edge, UNIT),
    "Comb": scaled(comb, UNIT),
    "FallingSteps": scaled(falling_steps, UNIT),
    "Chirp": scaled(chirp, UNIT),
    "TwoWells": scaled(two_wells, UNIT),
    "Slit": scaled(slit, UNIT),
    "Booth": scaled(booth, ((-10.0, 10.0),) * 2),
    "DropWave": scaled(drop_wave, ((-2.0, 2.0),) * 2),
    "Foxholes": scaled(foxholes, UNIT * 2, _highest()),
    "Corner": scaled(corner, UNIT * 3),
}
DRIFTING = {
    "Slide": Objective(1, slide),
    "FavouriteFalls": Objective(1, favourite_falls, top=lambda pull: -0.25 * (pull >= 350)),
    "Seasons": Objective(1, seasons),
}

MORE = {f"{title}~": replace(objective, moved=True) for title, objective in (STEADY | DRIFTING).items()}
