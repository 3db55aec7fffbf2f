"""What benchmarks share: seconds measured in turns, files of results that go on where they ended, rows shown as they come."""

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
    """Read the command line, and compute on one thread; words without a flag may end in "?" or "*".

    A default has the type of its option; a type stands for no default, False for a flag, and a list for several values.
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
    """Processor time of one call; other work of a busy machine does not count."""
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
    """Run every case once in each turn, in a fresh order; returns the seconds of each turn that counts.

    `warm` turns come before, and `before` is called before each. After `limit` seconds no turn begins, but five are made, the
    warm ones among them.
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
    """Run a call in a process of its own, on one thread.

    Returns:
        What it returns, or {"failed": a reason} if it raises or takes more seconds of processor time.
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
    """First quartile, median and third quartile of a case's time over another's in the same turn."""
    low, median, high = np.quantile(np.array(times[case]) / np.array(times[base]), [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def round_seconds(marks: Sequence[float]) -> list[float]:
    """Lengths of rounds from the times at which they ended, without the first, which builds all, and the last, which scores."""
    return [after - before for before, after in pairwise(marks[:-1])]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results, or the rows of a stored one (.csv); none where there is no file."""
    if path.suffix == ".csv":
        from stored_tables import read_rows

        return read_rows(path) if path.exists() else []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add(path: Path, row: Mapping[str, Any], *, quiet: bool = False) -> None:
    """Add a line to a file of results, and print it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    if not quiet:
        print(json.dumps(row), flush=True)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation, the latter where there are several; empty without values."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def show(rows: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    """Print each row when it is there: as a line of JSON, or of a Markdown table, with a head where the columns change."""
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
    """The units that another library kept, as a mask over ours.

    Vectors of batch norms lose the entries of their own units alone, so that their statistics say which are left.
    """
    import sparsekit as sk

    left, whole, keep = small.state_dict(), dense.state_dict(), {}
    for name, group in graph.groups.items():
        piece = next(each for each in group.slices if each.name.endswith("running_mean"))
        known = {(float(a), float(b)) for a, b in zip(left[piece.name], left[piece.name.replace("mean", "var")])}
        mean, variance = whole[piece.name], whole[piece.name.replace("mean", "var")]
        keep[name] = torch.tensor([(float(mean[i]), float(variance[i])) in known for i in piece.index[:, 0]])
    return sk.UnitMask(keep)
