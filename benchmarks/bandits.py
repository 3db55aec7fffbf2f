"""Regret and time of the bandits in `sparsekit.bandit`, beside PyXAB's algorithms.

    python benchmarks/bandits.py measure SplitUCBV --seeds 40     adds to benchmarks/bandit_results.json
    python benchmarks/bandits.py measure VHCT --set held-out      the same for others; slow ones with fewer seeds
    python benchmarks/bandits.py measure VHCT --set moved         where every seed has its maxima elsewhere
    python benchmarks/bandits.py table                            regret, mean and standard error, from that file
    python benchmarks/bandits.py time                             microseconds per ask + tell

Rewards are the function plus Gaussian noise of deviation 0.1; noise depends on the objective and the seed alone, so that all
algorithms meet the same. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bandit_objectives import DRIFTING, HELD_OUT, MOVED, OBJECTIVES, PYXAB, Objective

from sparsekit.bandit.base import Box, Interval
from sparsekit.bandit.make import make_bandit

RESULTS = Path(__file__).parent / "bandit_results.json"
HORIZONS = (100, 500, 1000)
NOISE = 0.1
SETS = {
    "pyxab": PYXAB,
    "held-out": HELD_OUT,
    "drifting": DRIFTING,
    "moved": MOVED,
}
UNIT = Interval(0.0, 1.0)

Play = tuple[Callable[[], list[float]], Callable[[float], None], Callable[[], list[float]]]
"""Ask for a point of the unit cube; tell the reward of it; the point recommended in the end."""


# --- players ---


def ours(name: str, options: dict[str, Any], axes: int, horizon: int, seed: int) -> Play:
    """A bandit of sparsekit."""
    space = UNIT if axes == 1 else Box({f"x{axis}": UNIT for axis in range(axes)})
    bandit: Any = make_bandit(name, space, rng=np.random.default_rng(seed), horizon=horizon, **options)
    pulls: list[Any] = []

    def point(pull: Any) -> list[float]:
        return [pull.value] if axes == 1 else list(pull.value.values())

    def ask() -> list[float]:
        pulls.append(bandit.ask())
        return point(pulls[-1])

    return ask, lambda reward: bandit.tell(pulls[-1], reward), lambda: point(bandit.best())


def pyxab(name: str, axes: int, horizon: int, seed: int) -> Play:
    """An algorithm of PyXAB with its default parameters; those without a default get those of its examples."""
    import importlib

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
    step = iter(range(1, horizon + 1))
    clock = [0]

    def ask() -> list[float]:
        clock[0] = next(step)
        return [float(v) for v in algorithm.pull(clock[0])]

    return ask, lambda reward: algorithm.receive_reward(clock[0], reward), lambda: list(algorithm.get_last_point())


def at_random(axes: int, seed: int) -> Play:
    """Points drawn uniformly; recommends the one of largest reward."""
    rng = np.random.default_rng(seed)
    told: list[tuple[float, list[float]]] = []
    points: list[list[float]] = []

    def ask() -> list[float]:
        points.append(rng.random(axes).tolist())
        return points[-1]

    return ask, lambda reward: told.append((reward, points[-1])), lambda: max(told)[1]


# Those that need to be told the horizon are run once for each; the others once for the longest.
WITH_HORIZON = {"T_HOO", "POO", "PCT", "VPCT", "StoSOO", "VROOM", "P-UCBV"}
PYXAB_NAMES = ("T_HOO", "HCT", "VHCT", "POO", "PCT", "VPCT", "Zooming", "StoSOO", "VROOM")
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "SplitUCBV": ("split-ucbv", {}),
    "SplitUCBV-0.98": ("split-ucbv", {"discount": 0.98}),
    "P-UCBV": ("p-ucbv", {}),
    "E-UCB": ("e-ucb", {}),
}
# Those that search an interval alone.
ONE_AXIS = {"P-UCBV", "E-UCB"}
NAMES = (*OURS, *PYXAB_NAMES, "Random")


def player(name: str, axes: int, horizon: int, seed: int) -> Play:
    """The algorithm of that name."""
    if name in OURS:
        return ours(*OURS[name], axes, horizon, seed)
    if name in PYXAB_NAMES:
        return pyxab(name, axes, horizon, seed)
    return at_random(axes, seed)


def noise(objective: str, seed: int, count: int) -> list[float]:
    """float (count,); a longer one begins with the shorter."""
    rng = np.random.default_rng([zlib.crc32(objective.encode()), seed])
    draws: list[float] = rng.normal(0.0, NOISE, count).tolist()
    return draws


def trace(name: str, title: str, seed: int, horizon: int, marks: tuple[int, ...]) -> list[tuple[float, float]]:
    """Cumulative regret and that of the recommended point after each of `marks` pulls; neither has noise in it."""
    objective: Objective = OBJECTIVES[title].placed(title, seed)
    ask, tell, recommend = player(name, objective.axes, horizon, seed)
    errors = noise(title, seed, horizon)
    total, found = 0.0, []
    for pull in range(horizon):
        point = ask()
        total += objective.regret(point, pull)
        tell(objective.value(point, pull) + errors[pull])
        if pull + 1 in marks:
            found.append((total, objective.regret(recommend(), pull)))
    return found


def summary(values: list[float]) -> list[float]:
    """Mean, standard error, number of seeds."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return [round(float(np.mean(values)), 5), round(error, 5) if len(values) > 1 else 0.0, len(values)]


def measure(name: str, titles: list[str], seeds: int, out: Path) -> None:
    """Play, and put mean, standard error and number of seeds into the file; what is there for the same is replaced."""
    for title in titles:
        if name in ONE_AXIS and OBJECTIVES[title].axes > 1:
            continue
        games: dict[int, list[tuple[float, float]]] = {horizon: [] for horizon in HORIZONS}
        for seed in range(seeds):
            if name in WITH_HORIZON:
                for horizon in HORIZONS:
                    games[horizon] += trace(name, title, seed, horizon, (horizon,))
            else:
                for horizon, mark in zip(HORIZONS, trace(name, title, seed, max(HORIZONS), HORIZONS)):
                    games[horizon].append(mark)
        results = json.loads(out.read_text()) if out.exists() else {}
        for horizon, found in games.items():
            place = results.setdefault(title, {}).setdefault(str(horizon), {})
            place[name] = {
                "cumulative": summary([total for total, _ in found]),
                "simple": summary([simple for _, simple in found]),
            }
        out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        shown = "  ".join(f"T={horizon} {np.mean([total for total, _ in found]):.2f}" for horizon, found in games.items())
        print(f"{name:16s} {title:14s} {shown}", flush=True)


# --- what is shown ---


def table(results: dict[str, Any], titles: list[str], what: str) -> None:
    """Print mean ± standard error; the algorithms from the best to the worst by geometric mean over the objectives."""
    for horizon in HORIZONS:
        cells = {title: results.get(title, {}).get(str(horizon), {}) for title in titles}
        names = [name for name in NAMES if any(name in cell for cell in cells.values())]

        def merit(name: str, cells: dict[str, Any] = cells) -> float:
            found = [math.log(max(cell[name][what][0], 1e-6)) for cell in cells.values() if name in cell]
            return sum(found) / len(found)

        print(f"\n{what} regret, T = {horizon}")
        print(f"{'':16s}" + "".join(f"{title:>18s}" for title in titles))
        for name in sorted(names, key=merit):
            row = [cell.get(name, {}).get(what) for cell in cells.values()]
            print(f"{name:16s}" + "".join(f"{v[0]:9.3f} ±{v[1]:7.3f}" if v else f"{'-':>18s}" for v in row))


def ratios(results: dict[str, Any], titles: list[str], rivals: tuple[str, ...]) -> None:
    """Print SplitUCBV's cumulative regret over that of the best of some rivals."""
    print(f"\nSplitUCBV over the best of {', '.join(rivals)}: cumulative regret (simple regret)")
    logs = []
    for title in titles:
        row = []
        for horizon in HORIZONS:
            cell = results.get(title, {}).get(str(horizon), {})
            found = [name for name in rivals if name in cell]
            if not found or "SplitUCBV" not in cell:
                continue
            best = min(found, key=lambda name: cell[name]["cumulative"][0])
            least = min(cell[name]["simple"][0] for name in found)
            ratio = cell["SplitUCBV"]["cumulative"][0] / cell[best]["cumulative"][0]
            logs.append(math.log(ratio))
            row.append(f"T={horizon} {ratio:5.2f} of {best:8s} ({cell['SplitUCBV']['simple'][0]:.3f} to {least:.3f})")
        print(f"{title:14s} " + "   ".join(row))
    if logs:
        print(f"geometric mean {math.exp(sum(logs) / len(logs)):.3f}, largest {math.exp(max(logs)):.2f}")


def measure_time(name: str, axes: int, counts: tuple[int, ...], seeds: int) -> None:
    """Print processor microseconds per ask + tell over the first so many pulls, and since the last mark; means over seeds."""
    title = {1: "Garland", 2: "Himmelblau", 3: "Hartmann3"}[axes]
    objective = OBJECTIVES[title]
    spent = dict.fromkeys(sorted(counts), 0.0)
    for seed in range(seeds):
        ask, tell, _ = player(name, axes, max(counts), seed)
        errors, total = noise(title, seed, max(counts)), 0.0
        for pull in range(max(counts)):
            start = time.thread_time()
            point = ask()
            total += time.thread_time() - start
            reward = objective.value(point, pull) + errors[pull]
            start = time.thread_time()
            tell(reward)
            total += time.thread_time() - start
            if pull + 1 in spent:
                spent[pull + 1] += total / seeds
    last, mark = 0.0, 0
    for count, total in spent.items():
        since = (total - last) / (count - mark)
        print(f"{name:12s} {title:12s} T={count:<7d} {1e6 * total / count:7.1f} us per step, {1e6 * since:7.1f} lately")
        last, mark = total, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("measure", "table", "time"):
        sub = commands.add_parser(command)
        if command == "measure":
            sub.add_argument("names", nargs="+", choices=NAMES)
            sub.add_argument("--seeds", type=int, default=20)
        if command == "time":
            sub.add_argument("--names", nargs="+", default=["SplitUCBV"])
            sub.add_argument("--axes", type=int, nargs="+", default=[1, 2])
            sub.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
            sub.add_argument("--seeds", type=int, default=3)
        if command != "time":
            sub.add_argument("--set", choices=SETS, default="pyxab")
            sub.add_argument("--file", type=Path, default=RESULTS)
    given = parser.parse_args()
    titles = list(SETS[given.set]) if hasattr(given, "set") else []
    if given.command == "measure":
        for name in given.names:
            measure(name, titles, given.seeds, given.file)
    elif given.command == "table":
        results = json.loads(given.file.read_text())
        for what in ("cumulative", "simple"):
            table(results, titles, what)
        ratios(results, titles, PYXAB_NAMES if given.set == "pyxab" else ("VHCT",))
    else:
        for name in given.names:
            for axes in given.axes:
                measure_time(name, axes, tuple(given.counts), given.seeds)


if __name__ == "__main__":
    main()
