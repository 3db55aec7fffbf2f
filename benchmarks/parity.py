"""Every method on every engine: the same bits? docs/howto/devices.md has the answer.

    python benchmarks/parity.py                                             all methods, all engines
    python benchmarks/parity.py --methods fedlps fedper --out runs/parity.jsonl
    python benchmarks/parity.py --engines ray --out runs/ray.jsonl --json   a line of JSON for each pair on stdout

The reference is the processes engine with one worker, computed anew at each call. What a pair of method and engine gave is a
line of `--out`. A pair that is there under the same settings and versions, and for the same digests of the reference, is not
run again, unless it failed: an interrupted call goes on when it is repeated. The exit code is 1 where a pair failed or differs.

The deployment is one SuperLink and two SuperNodes on the loopback, with TLS and registered keys, which serve all methods one
after the other. It needs Linux, openssl and ssh-keygen.
"""

import argparse
import hashlib
import json
import logging
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import ROOT, add, read, show
from local_grid import InProcess, task_of
from replies import Changed

from sparsekit_fl.cli.experiment import Experiment
from sparsekit_fl.cli.flower_app import AppOptions
from sparsekit_fl.cli.simulate import simulate
from sparsekit_fl.client.messages import Reply
from sparsekit_fl.engine import Engine, Processes
from sparsekit_fl.methods import registry
from sparsekit_fl.rounds import run

CLIENTS = 20
# Three rounds of seven are more than the clients there are: whoever is sampled, some client meets its memory again.
COHORT = 7

Result = Mapping[str, Any]
"""What `RunResult.to_dict` gives."""

_ROUND = ("round", "cohort", "loss", "accuracy", "ratios", "seconds", "evaluation")
_COST = ("flops", "flops_paper", "uplink_bytes", "downlink_bytes", "simulated_seconds")

# --- engines ---


def plan_of(method: str, rounds: int) -> AppOptions:
    """The settings: a convolutional model on scikit-learn's digits, two classes a client, levels drawn in every round."""
    return AppOptions(method=method, rounds=rounds, cohort=COHORT, seed=3, eval_every=rounds, local_epochs=1)


def fails(client_id: int, round: int) -> bool:
    """Whom an error is planted in: at most 3 of the 20 clients in a round, so that more than half of a cohort answers."""
    return (client_id + round) % 7 == 0


def _lost(reply: Reply, round: int) -> Reply:
    planted = fails(reply.client_id, round)
    return Reply(client_id=reply.client_id, round=round, error="planted") if planted else reply


def _error_reply(message: Any, reply: Any) -> Any:
    from flwr.app import Error, Message

    task = task_of(message)
    planted = task["task"] == "train" and fails(task["client_id"], task["round"])
    return Message(Error(code=5, reason="planted"), reply_to=message) if planted else reply


def _here(engine: Callable[[], Engine]) -> Callable[[AppOptions], Result]:
    def result(plan: AppOptions) -> Result:
        made = Experiment.of(plan)
        return run(plan.make_method(), made.problem, made.clients, made.config, engine=engine()).to_dict()

    return result


@contextmanager
def deployed(clients: int, *, tls: bool = False, data_dir: str = "", **options: Any) -> Iterator[Any]:
    """A SuperLink and two SuperNodes on the loopback, each with half of the clients.

    Args:
        clients: Number of clients.
        tls: Encrypt, and let in only nodes whose key was registered.
        data_dir: Folder of the data sets on the nodes.
        **options: Of the tests' own class, which also watches that no process contacts anybody outside this machine.
    """
    sys.path.append(str(ROOT / "tests" / "sparsekit_fl" / "flower"))
    from fault_deployment import Deployment

    with (
        tempfile.TemporaryDirectory(prefix="sparsekit-") as folder,
        Deployment(Path(folder), planted=False, tls=tls, **options) as deployment,
    ):
        deployment.start_superlink()
        for key, ids in enumerate((f"0-{clients // 2 - 1}", f"{clients // 2}-{clients - 1}")):
            if tls:
                deployment.register(key)
            deployment.start_node(f"node-{key}", ids, key=key if tls else None, data_dir=data_dir)
        yield deployment


class Kept:
    """A deployment that is started with the first run and kept for the others; anew after one that failed."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.deployment: Any = None

    def __call__(self, plan: AppOptions) -> Result:
        """Submit a run and wait for what it reports."""
        try:
            self.deployment = self.deployment or self.stack.enter_context(deployed(CLIENTS, tls=True))
            out = self.deployment.folder / plan.method
            self.deployment.submit(plan.replaced(out=out))
            return self.deployment.await_result(out)
        except BaseException:
            # It shows the end of its logs when it is told of an error.
            self.deployment = None
            self.stack.__exit__(*sys.exc_info())
            raise


class Column(NamedTuple):
    """An engine of the page: what stands over its column, what a plan gives on it, and whether clients fail on it."""

    title: str
    run: Callable[[AppOptions], Result]
    errors: bool = False


_kept = Kept()
_with_errors = _here(lambda: Changed(_lost))


def _failing(plan: AppOptions) -> Result:
    result = _with_errors(plan)
    assert any(record["dropped"] for record in result["rounds"]), f"{plan.method}: no error fell on a client of a cohort"
    return result


def _simulated(plan: AppOptions) -> Result:
    return simulate(plan.method, plan.replaced(workers=2, supernodes=3, engine="flower"), lambda _: None).to_dict()


# By whether clients fail: the processes engine, where the same ones fail.
REFERENCES: dict[bool, Callable[[AppOptions], Result]] = {False: _here(lambda: Processes(1)), True: _failing}
# Those that fork come first, before there are threads.
COLUMNS = {
    "processes-2": Column("processes, 2 workers", _here(lambda: Processes(2))),
    "grid": Column("Flower's wire, replies shuffled and doubled", _here(lambda: InProcess(nodes=3, seed=5, twice=True))),
    "grid-errors": Column(
        "Flower's wire, clients fail", _here(lambda: InProcess(nodes=3, seed=6, devices=True, fault=_error_reply)), True
    ),
    "ray": Column("Ray, 2 actors", _simulated),
    "deployment": Column("SuperLink and 2 SuperNodes", _kept),
}

# --- pairs ---


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


def text_of(pair: Mapping[str, Any]) -> str:
    """The cell of the table."""
    if not pair["reference"]:
        return "failed: the reference"
    if pair["found"] is None:
        return f"failed: {pair['error']}".replace("|", "/").replace("\n", " ")[:120]
    unlike = [f"{name} {digest[:12]}" for name, digest in pair["found"].items() if digest != pair["reference"][name]]
    return ", ".join(unlike) or "same"


def case_of(plan: AppOptions) -> dict[str, Any]:
    """Settings and versions, which decide whether a pair of the record still counts."""
    settings = {name: value for name, value in plan.to_run_config().items() if value != AppOptions().to_run_config()[name]}
    packages = {name: version(name) for name in ("torch", "numpy", "flwr", "ray")}
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "settings": {**settings, "preset": plan.preset or "", "method": plan.method},
        "versions": {"python": platform.python_version(), **packages, "processor": processor},
    }


def attempt(method: str, engine: str, plan: AppOptions, reference: Mapping[str, str]) -> dict[str, Any]:
    """Run a pair: a line of the record."""
    began = time.perf_counter()
    found, error = None, ""
    try:
        found = digests(COLUMNS[engine].run(plan)) if reference else None
    except Exception as problem:  # noqa: BLE001 - one pair that fails must not lose the others
        error = f"{type(problem).__name__}: {problem}"[:2000]
    pair = {"method": method, "engine": engine, "case": case_of(plan), "reference": reference, "found": found}
    return pair | {"error": error, "seconds": round(time.perf_counter() - began, 1)}


def _reference(plan: AppOptions, errors: bool) -> dict[str, str]:
    try:
        return digests(REFERENCES[errors](plan))
    except Exception as problem:  # noqa: BLE001 - the other methods go on
        print(f"{plan.method} on the reference: {type(problem).__name__}: {problem}", file=sys.stderr)
        return {}


def rows(pairs: Mapping[tuple[str, str], Mapping[str, Any]], engines: Sequence[str]) -> list[dict[str, str]]:
    """Of the table: methods that gave the same on all engines share one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for method in dict.fromkeys(method for method, _ in pairs):
        alike.setdefault(tuple(text_of(pairs[method, engine]) for engine in engines), []).append(f"`{method}`")
    titles = [COLUMNS[engine].title for engine in engines]
    return [{"methods": ", ".join(methods), **dict(zip(titles, cells, strict=True))} for cells, methods in alike.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table; 1 where not all is the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(registry), default=list(registry), metavar="METHOD")
    parser.add_argument("--engines", nargs="+", choices=list(COLUMNS), default=list(COLUMNS), help="beside the reference")
    parser.add_argument("--rounds", type=int, default=3, help="of each run (default 3)")
    parser.add_argument("--out", type=Path, default=Path("parity.jsonl"), help="what ran (default parity.jsonl)")
    parser.add_argument("--json", action="store_true", help="each pair as a line of JSON on stdout")
    options = parser.parse_args(argv)
    # Every planted error is a warning.
    logging.getLogger("sparsekit_fl").setLevel(logging.ERROR)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    plans = {name: plan_of(name, options.rounds) for name in options.methods}
    known = {(row["method"], row["engine"], json.dumps(row["case"], sort_keys=True)): row for row in read(options.out)}
    engines = [engine for engine in COLUMNS if engine in options.engines]
    pairs: dict[tuple[str, str], dict[str, Any]] = {}
    try:
        kinds = sorted({COLUMNS[engine].errors for engine in engines})
        references = {(name, errors): _reference(plans[name], errors) for name in plans for errors in kinds}
        for engine, (name, plan) in product(engines, plans.items()):
            reference = references[name, COLUMNS[engine].errors]
            pair = known.get((name, engine, json.dumps(case_of(plan), sort_keys=True)))
            if pair is None or pair["found"] is None or pair["reference"] != reference:
                pair = attempt(name, engine, plan, reference)
                if reference:
                    add(options.out, pair, quiet=True)
                print(f"{name} on {engine}: {text_of(pair)}, {pair['seconds']} s", file=sys.stderr)
            pairs[name, engine] = pair
            if options.json:
                print(json.dumps(pair), flush=True)
    finally:
        _kept.stack.close()
    if not options.json:
        show(rows(pairs, engines), as_json=False)
        print(", ".join(f"{name} {text}" for name, text in case_of(plan_of("fedlps", options.rounds))["versions"].items()))
    same = sum(text_of(pair) == "same" for pair in pairs.values())
    print(f"{options.out}: {same} of {len(pairs)} the same", file=sys.stderr)
    return int(same != len(pairs))


if __name__ == "__main__":
    # Ended from outside, it takes its processes with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
