"""Run the quick experiments of the README again, recompute the others from stored results, and flag numbers that differ.

    python benchmarks/headline.py --data-dir DIR [--only mnist speed] [--out FOLDER]

takes under half an hour on two cores; what `--out` holds is not made again. Runs take one seed where the page has three or
five, so a number may lie within two deviations of the page's. What takes hours (all methods, CIFAR-10) is counted from the
tables in `results`, whose commands are in its README. The exit code is 1 where a number differs.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

from common import read

from sparsekit_fl.results.stored import read_table

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "results"
WORDS = {"four": 4.0, "all": 100.0}


@dataclass(frozen=True)
class Claim:
    """A sentence of the README: a regular expression with a group for each number, and by how much each may differ."""

    part: str
    sentence: str
    within: tuple[float, ...]

    def numbers(self, page: str) -> tuple[float, ...]:
        """What the page says.

        Raises:
            ValueError: the page does not have the sentence.
        """
        found = re.search(self.sentence.replace(" ", r"\s+"), page)
        if found is None:
            raise ValueError(f"README.md has no sentence {self.sentence!r}; change it here too")
        return tuple(WORDS.get(text.lower()) or float(text) for text in found.groups())


Numbers: TypeAlias = dict[str, tuple[float, ...]]
"""Claim → what was measured, in the order of the sentence."""

CLAIMS = {
    "zoo": Claim(
        "zoo",
        r"of (\d+) architectures Torch-Pruning 1\.6\.1 cuts every group right in (\d+) and is silently wrong in (\d+);"
        r" sparsekit is never wrong and finds units in (\d+)",
        (0, 3, 3, 0),
    ),
    "fedlps": Claim("mnist", r"`fedlps` reaches ([\d.]+) % personal accuracy", (0.3,)),
    "fedlps-local-classes": Claim("mnist", r"`fedlps-local-classes`, for clients .*?, has ([\d.]+) % there", (0.3,)),
    "methods": Claim(
        "mnist", r"(\w+) of (\d+) methods have half a point more, for ([\d.]+) to ([\d.]+) times", (0, 0, 0.1, 0.3)
    ),
    "cifar": Claim(
        "stored",
        r"([\d.]+) % on CIFAR-10 \(([\d.]+) % after 30 of 100 rounds, where `fedlps` has ([\d.]+) %",
        (0.05, 0.05, 0.05),
    ),
    "choice": Claim("choice", r"found them (all) in batches of 64 .*?, and (\d+) to (\d+) % in batches of four", (0, 25, 0)),
    "step": Claim("speed", r"takes ([\d.]+) to ([\d.]+) times as long as that of a network built at that width", (0.05, 0.05)),
}


def run(*arguments: str | Path, cwd: Path = ROOT) -> str:
    """Run a program of ours and return its stdout; progress goes to stderr."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def zoo(out: Path) -> Numbers:
    """Both libraries cut every group of every architecture; one that gives no answer in ten seconds has failed."""
    run("benchmarks/units_vs_torch_pruning.py", "--out", out / "zoo.jsonl", "--limit", "10")
    from units_vs_torch_pruning import outcome

    rows = read(out / "zoo.jsonl")
    theirs, ours = (Counter(outcome(row[side]) for row in rows) for side in ("torch-pruning", "sparsekit"))
    return {"zoo": (len(rows), theirs["ok"], theirs["silent"], ours["ok"])}


def results(folder: Path) -> Iterator[dict[str, Any]]:
    """The results of a folder of runs."""
    for path in sorted(folder.rglob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and "final" in result:
            yield result


def accuracy(result: dict[str, Any]) -> float:
    """Personal accuracy, percent."""
    return 100 * float(result["final"]["personal"]["accuracy"])


def mnist(out: Path, data: Path) -> Numbers:
    """Three methods again; the others from the stored comparison, whose FLOPs are of training alone, as all their work is."""
    run("-m", "sparsekit", "compare", "fedlps", "fedlps-local-classes", "flst", "--preset", "mnist", "--data-dir", data,
        "--seeds", "1", "--jobs", "2", "--workers", "1", "--out", out / "mnist")  # fmt: skip
    made = {result["method"]: result for result in results(out / "mnist")}
    stored: dict[str, list[dict[str, Any]]] = {}
    for result in read_table(STORED / "mnist.csv").values():
        stored.setdefault(result["method"], []).append(result)
    least = mean(map(accuracy, stored["fedlps"])) + 0.35
    better = {name: runs for name, runs in stored.items() if mean(map(accuracy, runs)) > least}
    base = made["fedlps"]["cost"]["flops"]
    times = [(made.get(name) or runs[0])["cost"]["flops"] / base for name, runs in better.items()]
    return {
        "fedlps": (accuracy(made["fedlps"]),),
        "fedlps-local-classes": (accuracy(made["fedlps-local-classes"]),),
        "methods": (len(better), len(stored), min(times), max(times)),
    }


def cifar(_: Path) -> Numbers:
    """The means of the stored runs."""
    names = ("fedlps-own-100", "fedlps-own-30", "fedlps-30")
    runs = read_table(STORED / "long-runs.csv")
    wanted = ([run for key, run in runs.items() if key.startswith(f"cifar10-{name}-rounds-seed")] for name in names)
    return {"cifar": tuple(mean(map(accuracy, found)) for found in wanted)}


def choice(out: Path) -> Numbers:
    """Planted units in layers that stand still, two seeds; the mean of each family, batches of 64 first."""
    found: dict[str, list[float]] = {}
    for batch in ("64", "4"):
        file = out / f"choice-{batch}.jsonl"
        run("benchmarks/choice.py", "planted", "--arms", "learned", "--seeds", "2", "--batch", batch, "--out", file)
        for row in read(file):
            found.setdefault(f"{batch} {row['cell']}", []).append(100 * row["found"])
    many = [mean(shares) for name, shares in found.items() if name.startswith("64 ")]
    few = [mean(shares) for name, shares in found.items() if name.startswith("4 ")]
    return {"choice": (min(many), min(few), max(few))}


def speed(_: Path) -> Numbers:
    """The FedLPS step over that of a narrow network, all models and ratios."""
    rows = [json.loads(line) for line in run("benchmarks/step.py", "--json", "--steps", "20").splitlines()]
    ratios = [row["ours_over_narrow"] for row in rows if row["ratio"] < 1]
    return {"step": (min(ratios), max(ratios))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted({claim.part for claim in CLAIMS.values()})
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="these parts alone")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's parquet files; without it that part is left out")
    parser.add_argument("--out", type=Path, default=Path("headline"), help="folder of what was measured (default headline)")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[Path], Numbers]] = {"stored": cifar, "speed": speed, "choice": choice, "zoo": zoo}
    if options.data_dir is not None:
        data = options.data_dir.resolve()
        parts["mnist"] = lambda folder: mnist(folder, data)
    elif "mnist" in options.only:
        print("mnist: left out; pass --data-dir DIR")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    differ = 0
    for part in (part for part in parts if part in options.only):
        began = time.perf_counter()
        print(f"making {part} ...", file=sys.stderr, flush=True)
        for name, numbers in parts[part](out).items():
            claim = CLAIMS[name]
            for said, number, within in zip(claim.numbers(page), numbers, claim.within, strict=True):
                same = abs(said - number) <= within + 1e-9
                differ += not same
                print(f"{name:<12} page {said:>8g}   now {number:>8.4g}   {'ok' if same else 'DIFFERS'}", flush=True)
        print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
