"""Shared by the benchmarks: the command line, timing in turns, result files that another call continues, and tables."""

import argparse
import json
import math
import multiprocessing
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
# Some benchmarks use modules of the tests, which they import after this one.
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]


def options_of(doc: Any, *words: str, choices: Mapping[str, Iterable[str]] = {}, **defaults: Any) -> argparse.Namespace:
    """Parse the command line, and set torch to one thread. `words` are positional arguments; "?" or "*" at the end is `nargs`.

    `defaults` are the options. A default has the type of its option; a type means that there is no default, False a flag, and a
    list several values.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    allowed = {name: list(each) for name, each in choices.items()}
    for word in words:
        name = word.rstrip("?*")
        parser.add_argument(name, choices=allowed.get(name), nargs=word[len(name) :] or None)
    for name, default in defaults.items():
        flag, one = f"--{name.replace('_', '-')}", default[0] if isinstance(default, list) else default
        if default is False:
            parser.add_argument(flag, action="store_true")
            continue
        kind, value = (one, None) if isinstance(one, type) else (type(one), default)
        nargs = "*" if isinstance(default, list) else None
        told = "" if value is None else f"default {value}".replace("%", "%%")
        parser.add_argument(flag, type=kind, nargs=nargs, default=value, choices=allowed.get(name), help=told)
    torch.set_num_threads(1)
    return parser.parse_args()


def processor_seconds(call: Callable[[], Any]) -> float:
    """Return the processor seconds of one call, which other work on the machine does not count towards."""
    began = time.process_time()
    call()
    return time.process_time() - began


def in_turns(
    cases: Mapping[str, Callable[[], Any]],
    turns: int,
    *,
    warm: int = 0,
    limit: float = math.inf,
    seconds: Callable[[Callable[[], Any]], float] = processor_seconds,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Run every case once in each turn, in a new random order; return case → seconds of each turn.

    The first `warm` turns are additional and do not count. `before` is called before each turn. After `limit` seconds, no turn
    starts, except that at least five run, including warm ones.
    """
    order, end = np.random.default_rng(0), time.perf_counter() + limit
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm + turns):
        if turn >= 5 and time.perf_counter() > end:
            break
        before()
        for name in order.permutation(list(cases)):
            times[name].append(seconds(cases[name]))
    return {name: values[warm:] for name, values in times.items()}


def in_process(call: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Run a call in a separate process, on one thread.

    Returns:
        The result of the call, or {"failed": a reason} if it raises, or takes more than `seconds` of processor time.
    """

    def child(pipe: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            pipe.send(call())
        except Exception as error:  # noqa: BLE001 - a package that is not installed or has changed is a result, too
            pipe.send({"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]})

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        found = {"failed": f"more than {seconds:.0f} s"}
    process.join()
    return found


def over(times: Mapping[str, list[float]], case: str, base: str) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile of the ratio of a case's time to that of `base` in the same turn."""
    low, median, high = np.quantile(np.array(times[case]) / np.array(times[base]), [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def round_seconds(marks: Sequence[float]) -> list[float]:
    """Return the seconds of rounds from the times at which they ended, without the first (setup) and the last (scoring)."""
    return [after - before for before, after in pairwise(marks[:-1])]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a result file, JSON lines or a stored .csv; empty if there is no file."""
    if path.suffix == ".csv":
        from stored_tables import read_rows

        return read_rows(path) if path.exists() else []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add(path: Path, row: Mapping[str, Any], *, quiet: bool = False) -> None:
    """Append a line to a result file, and print it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    if not quiet:
        print(json.dumps(row), flush=True)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± standard deviation as text; only the mean of a single value, and empty without values."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def show(rows: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    """Print each row as soon as it is computed: as JSON, or in a Markdown table, with a header whenever the columns change."""
    head: list[str] = []
    for row in rows:
        if as_json:
            print(json.dumps(row), flush=True)
            continue
        if list(row) != head:
            head = list(row)
            print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
        print(f"| {' | '.join(map(_cell, row.values()))} |", flush=True)


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def mask_of(graph: Any, dense: Any, small: Any) -> Any:
    """Return the mask of the units that another library kept.

    Kept units are recognized by their batch norm statistics, since these vectors lose only the entries of removed units.
    """
    import sparsekit as sk

    left, whole, keep = small.state_dict(), dense.state_dict(), {}
    for name, group in graph.groups.items():
        piece = next(each for each in group.slices if each.name.endswith("running_mean"))
        known = {(float(a), float(b)) for a, b in zip(left[piece.name], left[piece.name.replace("mean", "var")])}
        mean, variance = whole[piece.name], whole[piece.name.replace("mean", "var")]
        keep[name] = torch.tensor([(float(mean[i]), float(variance[i])) in known for i in piece.index[:, 0]])
    return sk.UnitMask(keep)
