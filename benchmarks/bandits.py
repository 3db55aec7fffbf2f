"""Regret and time of the bandits in `sparsekit.bandit`, next to PyXAB's algorithms and Optuna's samplers.

    python benchmarks/bandits.py measure SplitUCBV --seeds 40     adds to results/bandits.csv
    python benchmarks/bandits.py measure VHCT --set moved         functions whose maxima are at other points for each seed
    python benchmarks/bandits.py measure Random --set failing     functions that fail or diverge somewhere
    python benchmarks/bandits.py table                            regret, mean and standard error, from that file
    python benchmarks/bandits.py time                             microseconds per ask + tell

Rewards are the function plus Gaussian noise of deviation 0.1. The noise depends only on objective and seed, so it is the same
for all algorithms. Needs PyXAB and Optuna (`pip install --group bench`).
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import cos, exp, floor, hypot, log1p, pi, sin, sqrt
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from common import options_of, read, show
from stored_tables import write_rows

from sparsekit.bandit.base import Box, Interval
from sparsekit.bandit.make import make_bandit

Point = Sequence[float]


@dataclass(frozen=True)
class Objective:
    """A function on the unit cube of `axes` axes: point, number of earlier pulls → mean reward, at most `rise`; -inf fails.

    If `moved`, the maxima are at other points for each seed; see `placed`.
    """

    axes: int
    value: Callable[[Point, int], float]
    rise: float = 0.0
    moved: bool = False
    worst: float = -math.inf  # a lower reward counts as this in the regret

    def regret(self, point: Point, pull: int) -> float:
        return self.rise - max(self.worst, self.value(point, pull))

    def placed(self, title: str, seed: int) -> Objective:
        """Return the objective of one seed: if `moved`, axes are mirrored at random and bent by x → x^γ, ln γ in ±0.35.

        Algorithms that evaluate midpoints of halved intervals, such as PyXAB's, may hit a maximum at a fixed point by luck.
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
    """Return the objective of a function of one number per axis, with [low, high] scaled to [0, 1]."""
    return Objective(axes, lambda point, _: function(*(low + share * (high - low) for share in point)), rise)


@cache
def _of_pyxab(name: str) -> Any:
    return getattr(importlib.import_module(f"PyXAB.synthetic_obj.{name}"), name)()


def synthetic(name: str, scale: float = 1.0, axes: int = 1, **options: float) -> Objective:
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
    # Its maximum is a cusp at pi / 6, where the sine is 0.
    "Garland": synthetic("Garland", rise=pi / 6.0 * (1.0 - pi / 6.0) * 4.0),
    "DoubleSine": synthetic("DoubleSine"),
    "DifficultFunc": synthetic("DifficultFunc"),
    "Himmelblau": synthetic("Himmelblau", 890.0, 2, low=-5.0, high=5.0),
    "Ackley": synthetic("Ackley", abs(20.0 * exp(-0.2 * sqrt(0.5)) + exp(-1.0) - 20.0 - exp(1.0)), 2, low=-1.0),
    "Rastrigin": synthetic("Rastrigin", 40.0, 2, low=-1.0),
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
SHAPES: dict[str, Callable[[float], float]] = {  # chosen after the constants
    "Plateau": lambda x: 0.0 if 0.45 <= x < 0.62 else -1.0 if x >= 0.62 else -0.05 - 0.3 * (0.45 - x) / 0.45,
    "SkewedHill": lambda x: -(((0.3 - x) / 0.3) ** 1.2) if x < 0.3 else -(x - 0.3) / 0.7,
    "UnequalCusps": lambda x: max(-(abs(x - 0.27) ** 0.5), -(abs(x - 0.76) ** 0.5) - 0.15),
    "Waves": lambda x: -0.4 * (1.0 - cos(10.0 * pi * (x - 0.6))) - 0.4 * abs(x - 0.6),
    "FallingSaw": lambda x: -0.5 * (5.0 * (0.83 - x) % 1.0) - 0.4 * abs(x - 0.83),
    "Logarithm": lambda x: 0.6 * math.log((x + 0.03) / 1.03),
    "Step": lambda x: 0.0 if x >= 0.55 else -0.75,
}
MOVED_SHAPES = {f"{title}~": replace(scaled(shape), moved=True) for title, shape in SHAPES.items()}


def rate(large: float) -> Objective:
    """Return the negative loss as a function of a learning rate; above 0.8, the loss diverges to `large`."""
    return replace(scaled(lambda x: -large if x > 0.8 else -2.0 * min(1.0, abs(x - 0.5) / 0.3) ** 1.5), worst=-3.0)


def beside(function: Callable[[float, float], float], fails: Callable[[float, float], bool], rise: float) -> Objective:
    return replace(scaled(lambda a, b: -math.inf if fails(a, b) else function(a, b), 2, rise=rise), worst=-1.0)


FAILING = {
    "RateFails": rate(math.inf),
    "Rate1e3": rate(1e3),
    "Rate1e6": rate(1e6),
    "Diagonal": beside(lambda a, b: a + b - 1.2 - 0.5 * (a - 0.5) ** 2, lambda a, b: a + b > 1.2, 0.0),
    "Steep": beside(lambda a, b: a + 0.7 * b, lambda a, b: 2.0 * a + b > 1.5, 0.95),
    "Circle": beside(
        lambda a, b: hypot(a - 0.2, b - 0.3) - 0.3 * (a - b) ** 2, lambda a, b: hypot(a - 0.2, b - 0.3) > 0.6, 0.6
    ),
}
OBJECTIVES = PYXAB | HELD_OUT | DRIFTING | MOVED | MOVED_SHAPES | FAILING

RESULTS = Path(__file__).parents[1] / "results" / "bandits.csv"
HORIZONS = (100, 500, 1000)
NOISE = 0.1
SETS = {"pyxab": PYXAB, "held-out": HELD_OUT, "drifting": DRIFTING, "moved": MOVED, "shapes": MOVED_SHAPES, "failing": FAILING}
UNIT = Interval(0.0, 1.0)

Play = tuple[Callable[[], list[float]], Callable[[float], None], Callable[[], list[float]]]
"""Functions that ask for a point of the unit cube, tell its reward, and return the point recommended at the end."""


def ours(name: str, options: dict[str, Any], axes: int, horizon: int, seed: int) -> Play:
    space = UNIT if axes == 1 else Box({f"x{axis}": UNIT for axis in range(axes)})
    bandit: Any = make_bandit(name, space, rng=np.random.default_rng(seed), horizon=horizon, **options)
    pulls: list[Any] = []

    def point(pull: Any) -> list[float]:
        return [pull.value] if axes == 1 else list(pull.value.values())

    def ask() -> list[float]:
        pulls.append(bandit.ask())
        return point(pulls[-1])

    def tell(reward: float) -> None:
        bandit.forget(pulls[-1]) if reward == -math.inf else bandit.tell(pulls[-1], reward)

    return ask, tell, lambda: point(bandit.best())


def pyxab(name: str, axes: int, horizon: int, seed: int) -> Play:
    """Return an algorithm of PyXAB with its default parameters; parameters without a default come from its examples."""
    module = {"T_HOO": "HOO"}.get(name, name)
    made = getattr(importlib.import_module(f"PyXAB.algos.{module}"), name)
    options: dict[str, Any] = {"domain": [[0.0, 1.0]] * axes}
    if name in ("T_HOO", "POO", "PCT", "VPCT"):
        options["rounds"] = horizon
    if name == "POO":
        options["algo"] = importlib.import_module("PyXAB.algos.HOO").T_HOO
    if name in ("StoSOO", "VROOM"):
        options["n"] = horizon
    if name == "VROOM":
        options |= {"b": 1.0, "f_max": 1.0}
    np.random.seed(seed)  # noqa: NPY002 - PyXAB draws from numpy's global generator
    algorithm = made(**options)
    pull = 0

    def ask() -> list[float]:
        nonlocal pull
        pull += 1
        return [float(v) for v in algorithm.pull(pull)]

    return ask, lambda reward: algorithm.receive_reward(pull, reward), lambda: list(algorithm.get_last_point())


def optuna(name: str, axes: int, seed: int) -> Play:
    """Return a sampler of Optuna with its default settings; it recommends the point of largest reward, as a study does."""
    from optuna import create_study, logging, samplers, trial

    logging.set_verbosity(logging.ERROR)
    study = create_study(direction="maximize", sampler=getattr(samplers, f"{name.removeprefix('Optuna-')}Sampler")(seed=seed))
    trials: list[Any] = []

    def ask() -> list[float]:
        trials.append(study.ask())
        return [trials[-1].suggest_float(f"x{axis}", 0.0, 1.0) for axis in range(axes)]

    def tell(reward: float) -> None:
        failed = reward == -math.inf
        study.tell(trials[-1], None if failed else reward, state=trial.TrialState.FAIL if failed else None)

    return ask, tell, lambda: list(study.best_params.values())


def at_random(axes: int, seed: int) -> Play:
    rng = np.random.default_rng(seed)
    told: list[tuple[float, list[float]]] = []
    points: list[list[float]] = []

    def ask() -> list[float]:
        points.append(rng.random(axes).tolist())
        return points[-1]

    return ask, lambda reward: told.append((reward, points[-1])), lambda: max(told)[1]


# Algorithms that need to know the horizon run once for each horizon; the others run once, for the longest.
WITH_HORIZON = {"T_HOO", "POO", "PCT", "VPCT", "StoSOO", "VROOM", "P-UCBV"}
PYXAB_NAMES = ("T_HOO", "HCT", "VHCT", "POO", "PCT", "VPCT", "Zooming", "StoSOO", "VROOM")
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "SplitUCBV": ("split-ucbv", {}),
    "P-UCBV": ("p-ucbv", {}),
}
NAMES = (*OURS, *PYXAB_NAMES, "Optuna-TPE", "Optuna-GP", "Random")


def player(name: str, axes: int, horizon: int, seed: int) -> Play:
    if name in OURS:
        return ours(*OURS[name], axes, horizon, seed)
    if name in PYXAB_NAMES:
        return pyxab(name, axes, horizon, seed)
    if name.startswith("Optuna-"):
        return optuna(name, axes, seed)
    return at_random(axes, seed)


def noise(objective: str, seed: int, count: int) -> list[float]:
    """Return `count` noise values. A longer list begins with the shorter one."""
    return np.random.default_rng([zlib.crc32(objective.encode()), seed]).normal(0.0, NOISE, count).tolist()


def trace(name: str, title: str, seed: int, marks: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return cumulative and simple regret after each number of pulls in `marks`, both without noise."""
    objective = OBJECTIVES[title].placed(title, seed)
    ask, tell, recommend = player(name, objective.axes, marks[-1], seed)
    total, found = 0.0, []
    for pull, error in enumerate(noise(title, seed, marks[-1])):
        point = ask()
        total += objective.regret(point, pull)
        tell(objective.value(point, pull) + error)
        if pull + 1 in marks:
            found.append((total, objective.regret(recommend(), pull)))
    return found


def summary(values: list[float]) -> list[float]:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return [round(float(np.mean(values)), 5), round(error, 5), len(values)]


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, title in product(options.names, SETS[options.set]):
        if name == "P-UCBV" and OBJECTIVES[title].axes > 1:  # it only searches intervals
            continue
        horizons = tuple(horizon for horizon in HORIZONS if horizon <= options.longest)
        plays = [(horizon,) for horizon in horizons] if name in WITH_HORIZON else [horizons]
        games = [[end for marks in plays for end in trace(name, title, seed, marks)] for seed in range(options.seeds)]
        results = _load(options.file)
        row = {"algorithm": name, "objective": title}
        for horizon, ends in zip(horizons, zip(*games)):
            found = dict(zip(("cumulative", "simple"), map(summary, zip(*ends))))
            results.setdefault(title, {}).setdefault(str(horizon), {})[name] = found
            row[f"T = {horizon}"] = found["cumulative"][0]
        columns = ("function", "horizon", "bandit")
        cells = ((title, int(h), name, r) for title, hs in results.items() for h, rs in hs.items() for name, r in rs.items())
        write_rows([dict(zip(columns, key)) | found for *key, found in sorted(cells, key=lambda cell: cell[:3])], options.file)
        yield row


def _load(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for row in read(file):
        cells = results.setdefault(row["function"], {}).setdefault(str(row["horizon"]), {})
        cells[row["bandit"]] = row
    return results


def table(cells: dict[str, dict[str, Any]], what: str) -> Iterator[dict[str, Any]]:
    def merit(name: str) -> float:
        return geometric_mean(max(cell[name][what][0], 1e-6) for cell in cells.values() if name in cell)

    for name in sorted({name for cell in cells.values() for name in cell} & {*NAMES}, key=merit):
        found = {title: cell[name][what] for title, cell in cells.items() if name in cell}
        yield {what: name, **dict.fromkeys(cells)} | {title: f"{v[0]:.3f} ± {v[1]:.3f}" for title, v in found.items()}


def ratio(cell: dict[str, Any]) -> tuple[float, str] | None:
    """Return the ratio of SplitUCBV's cumulative regret to the best of PyXAB's, also as text, with simple regrets."""
    found = [name for name in PYXAB_NAMES if name in cell]
    if not found or "SplitUCBV" not in cell:
        return None
    best = min(found, key=lambda name: cell[name]["cumulative"][0])
    least = min(cell[name]["simple"][0] for name in found)
    value = cell["SplitUCBV"]["cumulative"][0] / cell[best]["cumulative"][0]
    return value, f"{value:.2f} of {best} ({cell['SplitUCBV']['simple'][0]:.3f} to {least:.3f})"


def tables(options: argparse.Namespace) -> None:
    """Print the stored regrets of a set of objectives, and the ratios of SplitUCBV's to the best of PyXAB's."""
    results = _load(options.file)
    cells = {h: {title: results.get(title, {}).get(str(h), {}) for title in SETS[options.set]} for h in HORIZONS}
    for what, horizon in product(("cumulative", "simple"), HORIZONS):
        print(f"\n{what} regret, T = {horizon}\n")
        show(table(cells[horizon], what), as_json=False)
    ratios = {(title, h): ratio(cells[h][title]) for title in SETS[options.set] for h in HORIZONS}
    print("\nSplitUCBV over the best of PyXAB that was measured: cumulative regret (simple regret)\n")
    rows = ({"": title, **{f"T = {h}": (ratios[title, h] or ("", "–"))[1] for h in HORIZONS}} for title in SETS[options.set])
    show(rows, as_json=False)
    if values := [found[0] for found in ratios.values() if found]:
        print(f"geometric mean {geometric_mean(values):.3f}, largest {max(values):.2f}")


def times(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure processor microseconds per ask + tell, over all pulls up to each count, and since the previous count.

    They are means over seeds.
    """
    for name, axes in product(options.names or ["SplitUCBV"], options.axes):
        title = {1: "Garland", 2: "Himmelblau", 3: "Hartmann3"}[axes]
        marks = [0, *sorted(options.counts)]
        spent = np.zeros(marks[-1])
        for seed in range(options.seeds):
            ask, tell, _ = player(name, axes, marks[-1], seed)
            for pull, error in enumerate(noise(title, seed, marks[-1])):
                began = time.thread_time()
                point = ask()
                spent[pull] += time.thread_time() - began
                reward = OBJECTIVES[title].value(point, pull) + error
                began = time.thread_time()
                tell(reward)
                spent[pull] += time.thread_time() - began
        spent *= 1e6 / options.seeds
        for last, mark in pairwise(marks):
            row = {"algorithm": name, "objective": title, "T": mark, "µs per step": spent[:mark].mean()}
            yield row | {"lately": spent[last:mark].mean()}


def main() -> None:
    words = {"command": ("measure", "table", "time"), "set": SETS}
    options = options_of(
        __doc__, "command", "names*", choices=words, seeds=int, longest=HORIZONS[-1], axes=[1, 2],
        counts=[1_000, 10_000, 100_000], set="pyxab", file=RESULTS,
    )  # fmt: skip
    options.seeds = options.seeds or (20 if options.command == "measure" else 3)
    if options.command == "table":
        tables(options)
    else:
        show((measure if options.command == "measure" else times)(options), as_json=False)


if __name__ == "__main__":
    main()
