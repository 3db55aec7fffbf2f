"""Every method on every engine: the same bits? Writes the page docs/evidence/parity.md.

    python benchmarks/parity.py                                             all methods, all engines
    python benchmarks/parity.py --methods fedlps fedper --out runs/parity.md
    python benchmarks/parity.py --engines ray --out runs/ray.md --json      a line of JSON for each pair on stdout

The reference is the embedded engine with one worker, computed anew at each call. What a pair of method and engine gave is
kept in a JSON lines file beside the page. A pair that is there under the same settings and versions, and for the same digests
of the reference, is not run again, unless it failed: an interrupted call goes on when it is repeated, and a method that gives
other bits runs again on all engines. To run anything else again, remove the file or its lines. The exit code is 1 where a pair
failed, differs, or was not run.

The deployment is one SuperLink and two SuperNodes on the loopback, with TLS and registered keys, which serve all methods one
after the other. It needs Linux, openssl and ssh-keygen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from parity_engines import CLIENTS, COHORT, COLUMNS, REFERENCES, Result, plan_of
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.methods import registry
from sparsekit_fl.results.state.storage import write_atomically

PAGE = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "parity.md"

_ROUND = ("round", "cohort", "loss", "accuracy", "ratios", "seconds", "evaluation")
_COST = ("flops_compact", "flops_rowmask", "uplink_bytes", "downlink_bytes", "simulated_seconds")
_FACTS = """\
# Every method on every engine: the same bits

Runs of the preset `digits` (a convolutional model; each of {clients} clients draws its capability anew in every round),
{rounds} rounds of {cohort} clients, one local epoch, seed 3. "same" says that the engine gave the digests of the embedded
engine with one worker: of the global model, of all final scores, each client's with its own model among them, of the
records of the rounds and of the costs. Where clients fail, the reference is the embedded engine on which the same clients
fail. The deployment has TLS and SuperNodes with registered keys. **This holds on one kind of processor and one version of
torch**: others round differently, on all engines alike ([what that means](../howto/devices.md#what-same-bits-covers)).

`python benchmarks/parity.py --rounds {rounds}` makes this page: {versions}.

"""


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digests(result: Result) -> dict[str, str]:
    """What must be the same.

    Args:
        result: Of a run.

    Returns:
        `model`: of the global model; `scores`: of all final scores, each client's with its own model among them; `rounds`: of
        what the records say of every round and of the costs, but for measured seconds and the wording of errors.
    """
    final = {name: value for name, value in result["final"].items() if name != "state_sha256"}
    records = [
        [[record[name] for name in _ROUND], sorted(lost["client"] for lost in record["dropped"])] for record in result["rounds"]
    ]
    costs = [result["cost"][name] for name in _COST]
    return {"model": result["final"]["state_sha256"], "scores": _sha256(final), "rounds": _sha256([records, costs])}


@dataclass(frozen=True)
class Pair:
    """What came of a method on an engine: a line of the record."""

    method: str
    engine: str
    case: Mapping[str, Any]
    reference: Mapping[str, str]
    found: Mapping[str, str] | None = None
    error: str = ""
    seconds: float = 0.0

    def text(self) -> str:
        """The cell of the page."""
        if not self.reference:
            return "failed: the reference"
        if self.found is None:
            return f"failed: {self.error}".replace("|", "/").replace("\n", " ")[:120]
        unlike = [f"{name} {digest[:12]}" for name, digest in self.found.items() if digest != self.reference[name]]
        return ", ".join(unlike) or "same"


def case_of(plan: Plan) -> dict[str, Any]:
    """Settings and versions, which decide whether a pair of the record still counts."""
    settings = {name: value for name, value in plan.to_run_config().items() if value != Plan().to_run_config()[name]}
    packages = {name: version(name) for name in ("torch", "numpy", "flwr", "ray")}
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "settings": {**settings, "preset": plan.preset, "method": plan.method},
        "versions": {"python": platform.python_version(), **packages, "processor": processor},
    }


def read_record(path: Path) -> list[Pair]:
    """The pairs of a record, later ones last; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Pair(**json.loads(line)) for line in lines]


def _append(path: Path, pair: Pair) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    write_atomically(path, before + json.dumps(vars(pair)).encode() + b"\n")


def attempt(method: str, engine: str, plan: Plan, reference: Mapping[str, str]) -> Pair:
    """Run a pair."""
    began = time.perf_counter()
    found, error = None, ""
    try:
        found = digests(COLUMNS[engine].run(plan))
    except Exception as problem:  # noqa: BLE001 - one pair that fails must not lose the others
        error = f"{type(problem).__name__}: {problem}"
    return Pair(method, engine, case_of(plan), reference, found, error[:2000], round(time.perf_counter() - began, 1))


def _reference(plan: Plan, errors: bool, console: Console) -> dict[str, str]:
    try:
        return digests(REFERENCES[errors](plan))
    except Exception as problem:  # noqa: BLE001 - the other methods go on
        console.print(escape(f"{plan.method} on the reference: {type(problem).__name__}: {problem}"), highlight=False)
        return {}


_COHORT = """\
The engine `cohort` is a parity class of its own, since the products of several clients round differently. Over a whole run in
float64 it equals the embedded engine within 1e-9: tested for eight methods.
"""


def page(
    pairs: Mapping[tuple[str, str], Pair],
    references: Mapping[str, Mapping[str, str]],
    engines: Sequence[str],
    rounds: int,
) -> str:
    """The page.

    Args:
        pairs: By method and engine; those that are missing were not run.
        references: Method → digests of the run without errors.
        engines: The columns.
        rounds: Of each run.
    """
    case = case_of(plan_of("fedlps", rounds))
    versions = ", ".join(f"{name} {text}" for name, text in case["versions"].items())
    alike: dict[tuple[str, ...], list[str]] = {}
    for method, digest in references.items():
        cells = [pairs[method, engine].text() if (method, engine) in pairs else "not run" for engine in engines]
        alike.setdefault(tuple(cells if digest else ["failed"] * len(engines)), []).append(f"`{method}`")
    rows = [[", ".join(methods), *cells] for cells, methods in alike.items()]
    head = ["methods", *(COLUMNS[engine].title for engine in engines)]
    table = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    facts = _FACTS.format(rounds=rounds, cohort=COHORT, clients=CLIENTS, versions=versions)
    return facts + "\n".join(table) + "\n\n" + _COHORT


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(registry), default=list(registry), metavar="METHOD")
    parser.add_argument("--engines", nargs="+", choices=list(COLUMNS), default=list(COLUMNS), help="beside the reference")
    parser.add_argument("--rounds", type=int, default=3, help="of each run (default 3)")
    parser.add_argument("--out", type=Path, default=None, help="the page (default docs/evidence/parity.md)")
    parser.add_argument("--record", type=Path, default=None, help="what ran (default parity.jsonl beside the page)")
    parser.add_argument("--json", action="store_true", help="each pair as a line of JSON on stdout")
    options = parser.parse_args(argv)
    whole = set(options.methods) == set(registry) and set(options.engines) == set(COLUMNS)
    if options.out is None and not whole:
        parser.error(f"{PAGE.name} is the page of all methods and engines; name another one by --out")
    options.engines = [engine for engine in COLUMNS if engine in options.engines]
    options.out = options.out or PAGE
    options.record = options.record or options.out.with_name("parity.jsonl")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the page; 1 where not all is the same."""
    options = _options(argv)
    # Every planted error is a warning.
    logging.getLogger("sparsekit_fl").setLevel(logging.ERROR)
    console = Console(stderr=True)
    plans = {name: plan_of(name, options.rounds) for name in options.methods}
    known = {(pair.method, pair.engine, json.dumps(pair.case, sort_keys=True)): pair for pair in read_record(options.record)}
    clean: dict[str, dict[str, str]] = {}
    pairs: dict[tuple[str, str], Pair] = {}
    # Without a thread that draws: worker processes are forked beside it.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, auto_refresh=False)
    bar = progress.add_task("reference", total=len(plans) * len(options.engines))
    try:
        with progress:
            kinds = sorted({False, *(COLUMNS[engine].errors for engine in options.engines)})
            references = {(name, errors): _reference(plans[name], errors, console) for name in plans for errors in kinds}
            clean.update({name: references[name, False] for name in plans})
            for engine in options.engines:
                for name, plan in plans.items():
                    progress.update(bar, description=f"{name} on {engine}", refresh=True)
                    reference = references[name, COLUMNS[engine].errors]
                    pair = known.get((name, engine, json.dumps(case_of(plan), sort_keys=True)))
                    if not reference:
                        pair = Pair(name, engine, case_of(plan), reference)
                    elif pair is None or pair.found is None or pair.reference != reference:
                        pair = attempt(name, engine, plan, reference)
                        _append(options.record, pair)
                        console.print(escape(f"{name} on {engine}: {pair.text()}, {pair.seconds} s"), highlight=False)
                    pairs[name, engine] = pair
                    if options.json:
                        print(json.dumps(vars(pair)), flush=True)
                    progress.advance(bar)
                COLUMNS[engine].close()
    finally:
        for column in COLUMNS.values():
            column.close()
        if clean:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(page(pairs, clean, options.engines, options.rounds), encoding="utf-8")
    same = sum(pair.text() == "same" for pair in pairs.values())
    console.print(f"{options.out}: {same} of {len(plans) * len(options.engines)} the same", highlight=False)
    return int(same != len(plans) * len(options.engines))


if __name__ == "__main__":
    # Ended from outside, it takes its processes with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
