"""Run every method on digits and compare the results of two versions of the code, bit by bit.

    python benchmarks/oracle.py --out before.json --ways processes                       all methods
    python benchmarks/oracle.py --out now.json --methods fedlps --compare before.json    run in all ways, then compare

A method is run for six rounds through the command line, in three ways: `processes`, on two worker processes; `flower`, through
Flower's simulation; `resumed`, killed after the third round and resumed. A way that the older file lacks is compared with its
`processes`, since all ways give the same results. Hashes of models are computed here from the files of the run, so that they do
not depend on the code that is compared. Seconds are shown and never compared.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import options_of
from safetensors.torch import load_file

import sparsekit_fl.cli.run  # noqa: F401 - imported once, for all runs
from sparsekit.cli.main import main as command_line

WAYS = ("processes", "resumed", "flower")
ROUNDS, KILLED_AFTER = 6, 3
COSTS = ("flops", "flops_paper", "uplink_bytes", "downlink_bytes", "simulated_seconds")


def start(*arguments: str, folder: Path) -> int:
    """Run the command line in a forked process, which need not import anything; return its process id."""
    process = os.fork()
    if process == 0:
        os.setsid()
        for name, stream in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        sys.argv[1:] = arguments
        try:
            command_line()
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        finally:
            os._exit(1)
    return process


def kill_after_third_round(process: int, rounds: Path) -> None:
    while not (rounds.exists() and rounds.read_text().count("\n") >= KILLED_AFTER) and os.waitpid(process, os.WNOHANG)[0] == 0:
        time.sleep(0.005)
    with contextlib.suppress(OSError):  # it has ended
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)


def hash_models(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        for name, tensor in sorted(load_file(path).items()):
            total.update(f"{path.name} {name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return total.hexdigest()[:16]


def observe(method: str, way: str) -> dict[str, Any]:
    """Run one method in one way; return the results to compare, or only `error` if it failed."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as name:
        folder, out, began = Path(name), Path(name) / "run", time.perf_counter()
        how = ["--workers", "2", "--out", str(out), "--json", "-q", *(["--engine", "flower"] if way == "flower" else [])]
        process = start("run", method, *how, "--rounds", str(ROUNDS), "--eval-every", "3", folder=folder)
        if way == "resumed":
            kill_after_third_round(process, out / "rounds.jsonl")
            process = start("run", "--resume", *how, folder=folder)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code not in (0, 3):
            return {"error": (folder / "stderr").read_text().strip()[-400:]}
        result = json.loads((folder / "stdout").read_text())
        final, cost, rounds = result["final"], result["cost"], result["rounds"]
        return {
            "state_sha256": final["state_sha256"],
            "global_model": hash_models([out / "models" / "global.safetensors"]),
            "personal_models": hash_models((out / "models").glob("client-*.safetensors")),
            "scores": {part: final[part] for part in ("personal", "global") if final.get(part)},
            **{key: cost[key] for key in COSTS},
            **{key: [one[key] for one in rounds] for key in ("cohort", "ratios", "loss", "dropped")},
            "seconds": round(time.perf_counter() - began, 1),
        }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a text for every key whose value changed; `state_sha256` counts only if the hash of the model changed too."""
    if "error" in new:
        return [f"error: {new['error']}"]
    keys = [key for key in old if key not in ("seconds", "state_sha256") and old[key] != new.get(key)]
    return [f"{key}: changed" if isinstance(old[key], list) else f"{key}: {old[key]} → {new.get(key)}" for key in keys]


def compare(old: dict[str, Any], new: dict[str, Any], methods: Iterable[str]) -> int:
    rows = [(method, way, old[method].get(way, old[method]["processes"]), new[method][way])
            for method in methods if method in old for way in new.get(method, {})]  # fmt: skip
    found = [(method, way, text) for method, way, *both in rows for text in differences(*both)]
    for method, way, text in found:
        print(f"{method:18} {way:10} {text}")
    changed = len({row[:2] for row in found})
    print(f"{len(rows)} runs compared, {changed} differ")
    return changed


def main() -> int:
    options = options_of(__doc__, choices={"ways": WAYS}, out=Path("oracle.json"), methods=[str], ways=list(WAYS), compare=Path)
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        os.waitpid(start("list", "methods", "--json", folder=Path(folder)), 0)
        methods = options.methods or [one["name"] for one in json.loads((Path(folder) / "stdout").read_text())]
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for method in methods if options.ways else ():
        for way in options.ways:
            results.setdefault(method, {})[way] = result = observe(method, way)
            print(f"{method:18} {way:10} {result.get('seconds', 0):6.1f} s  {result.get('error', 'ran')}", flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    return bool(options.compare) and compare(json.loads(options.compare.read_text()), results, methods) > 0


if __name__ == "__main__":
    sys.exit(main())
