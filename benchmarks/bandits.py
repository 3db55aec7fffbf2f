"""Regret and time of the bandits in `sparsekit.bandit`, next to PyXAB's algorithms and Optuna's samplers.

    python benchmarks/bandits.py measure SplitUCBV --seeds 40     adds to results/bandits.csv
    python benchmarks/bandits.py measure VHCT --set held-out      the same for others; slow ones with fewer seeds
    python benchmarks/bandits.py measure VHCT --set moved         where every seed has its maxima elsewhere
    python benchmarks/bandits.py table                            regret, mean and standard error, from that file
    python benchmarks/bandits.py time                             microseconds per ask + tell

Rewards are the function plus Gaussian noise of deviation 0.1; noise depends on the objective and the seed alone, so that all
algorithms meet the same. Needs PyXAB and Optuna (`pip install --group bench`).
"""

import argparse
import math
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from bandit_objectives import DRIFTING, HELD_OUT, MOVED, OBJECTIVES, PYXAB
from common import read, show
from stored_tables import write_rows

from sparsekit.bandit.base import Box, Interval
from sparsekit.bandit.make import make_bandit

RESULTS = Path(__file__).parents[1] / "results" / "bandits.csv"
HORIZONS = (100, 500, 1000)
NOISE = 0.1
SETS = {"pyxab": PYXAB, "held-out": HELD_OUT, "drifting": DRIFTING, "moved": MOVED}
UNIT = Interval(0.0, 1.0)

Play = tuple[Callable[[], list[float]], Callable[[float], None], Callable[[], list[float]]]
"""Ask for a point of the unit cube; tell the reward of it; the point recommended in the end."""


def ours(name: str, options: dict[str, Any], axes: int, horizon: int, seed: int) -> Play:
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
    """An algorithm of PyXAB with its default parameters; parameters without a default come from its examples."""
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
    pull = 0

    def ask() -> list[float]:
        nonlocal pull
        pull += 1
        return [float(v) for v in algorithm.pull(pull)]

    return ask, lambda reward: algorithm.receive_reward(pull, reward), lambda: list(algorithm.get_last_point())


def optuna(name: str, axes: int, seed: int) -> Play:
    """A sampler of Optuna with its default settings; recommends the point of largest reward, as a study does."""
    from optuna import create_study, logging, samplers

    logging.set_verbosity(logging.ERROR)
    study = create_study(direction="maximize", sampler=getattr(samplers, f"{name.removeprefix('Optuna-')}Sampler")(seed=seed))
    trials: list[Any] = []

    def ask() -> list[float]:
        trials.append(study.ask())
        return [trials[-1].suggest_float(f"x{axis}", 0.0, 1.0) for axis in range(axes)]

    return ask, lambda reward: study.tell(trials[-1], reward), lambda: list(study.best_params.values())


def at_random(axes: int, seed: int) -> Play:
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
}
# Those that search an interval alone.
ONE_AXIS = {"P-UCBV"}
OPTUNA = ("Optuna-TPE", "Optuna-GP")
NAMES = (*OURS, *PYXAB_NAMES, *OPTUNA, "Random")


def player(name: str, axes: int, horizon: int, seed: int) -> Play:
    if name in OURS:
        return ours(*OURS[name], axes, horizon, seed)
    if name in PYXAB_NAMES:
        return pyxab(name, axes, horizon, seed)
    if name in OPTUNA:
        return optuna(name, axes, seed)
    return at_random(axes, seed)


def noise(objective: str, seed: int, count: int) -> list[float]:
    """float (count,); a longer one begins with the shorter."""
    rng = np.random.default_rng([zlib.crc32(objective.encode()), seed])
    draws: list[float] = rng.normal(0.0, NOISE, count).tolist()
    return draws


def trace(name: str, title: str, seed: int, marks: tuple[int, ...]) -> list[tuple[float, float]]:
    """Cumulative regret and simple regret after each of `marks` pulls, both without noise."""
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
        if name in ONE_AXIS and OBJECTIVES[title].axes > 1:
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
        cell = results.setdefault(row["function"], {}).setdefault(str(row["horizon"]), {})
        cell[row["bandit"]] = {what: row[what] for what in ("cumulative", "simple")}
    return results


def table(cells: dict[str, dict[str, Any]], what: str) -> Iterator[dict[str, Any]]:
    def merit(name: str) -> float:
        return geometric_mean(max(cell[name][what][0], 1e-6) for cell in cells.values() if name in cell)

    for name in sorted({name for cell in cells.values() for name in cell} & {*NAMES}, key=merit):
        found = {title: cell[name][what] for title, cell in cells.items() if name in cell}
        yield {what: name, **dict.fromkeys(cells)} | {title: f"{v[0]:.3f} ± {v[1]:.3f}" for title, v in found.items()}


def ratio(cell: dict[str, Any], rivals: tuple[str, ...]) -> tuple[float, str] | None:
    """Ratio of SplitUCBV's cumulative regret to the best rival's, and the same in words, with simple regrets."""
    found = [name for name in rivals if name in cell]
    if not found or "SplitUCBV" not in cell:
        return None
    best = min(found, key=lambda name: cell[name]["cumulative"][0])
    least = min(cell[name]["simple"][0] for name in found)
    value = cell["SplitUCBV"]["cumulative"][0] / cell[best]["cumulative"][0]
    return value, f"{value:.2f} of {best} ({cell['SplitUCBV']['simple'][0]:.3f} to {least:.3f})"


def tables(options: argparse.Namespace) -> None:
    """Print what the file holds of a set: regrets, and SplitUCBV's over the best rival's."""
    results = _load(options.file)
    cells = {h: {title: results.get(title, {}).get(str(h), {}) for title in SETS[options.set]} for h in HORIZONS}
    for what, horizon in product(("cumulative", "simple"), HORIZONS):
        print(f"\n{what} regret, T = {horizon}\n")
        show(table(cells[horizon], what), as_json=False)
    rivals = PYXAB_NAMES if options.set == "pyxab" else ("VHCT",)
    ratios = {(title, h): ratio(cells[h][title], rivals) for title in SETS[options.set] for h in HORIZONS}
    print(f"\nSplitUCBV over the best of {', '.join(rivals)}: cumulative regret (simple regret)\n")
    rows = ({"": title, **{f"T = {h}": (ratios[title, h] or ("", "–"))[1] for h in HORIZONS}} for title in SETS[options.set])
    show(rows, as_json=False)
    values = [found[0] for found in ratios.values() if found]
    if values:
        print(f"geometric mean {geometric_mean(values):.3f}, largest {max(values):.2f}")


def times(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Processor microseconds per ask + tell over the first so many pulls, and since the last mark; means over seeds."""
    for name, axes in product(options.names, options.axes):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("measure", "table", "time"):
        sub = commands.add_parser(command)
        if command == "measure":
            sub.add_argument("names", nargs="+", choices=NAMES)
            sub.add_argument("--seeds", type=int, default=20)
            sub.add_argument("--longest", type=int, default=HORIZONS[-1], help="the longest horizon; GP takes minutes for 500")
        if command == "time":
            sub.add_argument("--names", nargs="+", default=["SplitUCBV"])
            sub.add_argument("--axes", type=int, nargs="+", default=[1, 2])
            sub.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
            sub.add_argument("--seeds", type=int, default=3)
        if command != "time":
            sub.add_argument("--set", choices=SETS, default="pyxab")
            sub.add_argument("--file", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "table":
        tables(options)
    else:
        show((measure if options.command == "measure" else times)(options), as_json=False)


if __name__ == "__main__":
    main()
