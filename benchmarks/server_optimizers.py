"""A table of server optimizers: rates are chosen on validation data, scores are those of test data over several seeds.

python benchmarks/server_optimizers.py --out runs/server --data-dir DIR [--preset mnist] [--rounds 20] [--local-epochs 1]

Every run has a folder in --out. The same command goes on where it was stopped: finished runs are read, a run that was cut off
is resumed. `server_optimizers.json` in --out holds every score.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import sparsekit_fl as fl
from sparsekit_fl.experiment.build import build_problem
from sparsekit_fl.paper.presets import PRESETS

# A value on either side of a first guess; a best value at an end of its range is marked.
RATES = {
    "none": (1.0,),
    "fedavgm": (0.1, 0.3, 1.0),
    "fedadam": (0.003, 0.01, 0.03),
    "fedyogi": (0.003, 0.01, 0.03),
    "fedadagrad": (0.01, 0.03, 0.1),
}


def run(given: argparse.Namespace, name: str, rate: float, seed: int) -> fl.RunResult:
    """One run, from its folder where it is finished."""
    epochs = {} if given.local_epochs is None else {"local_epochs": given.local_epochs}
    out = given.out / "-".join(map(str, (given.preset, given.rounds, *epochs.values()))) / f"{name}-{rate:g}-{seed}"
    if (out / "result.json").exists():
        return fl.load_result(out)
    preset = PRESETS[given.preset]
    problem, clients = build_problem(preset, data_dir=given.data_dir, seed=seed)
    options = {"server_optimizer": name, "server_lr": rate, "eval_every": given.rounds, "rounds": given.rounds, "seed": seed}
    config = preset.config({**options, **epochs}, len(clients))
    resume = (out / "run.json").exists()
    return fl.run(fl.methods.registry["fedavg"](), problem, clients, config, out=out, resume=resume)


def validation(result: fl.RunResult) -> float:
    """Accuracy of the last global model on the clients' validation data, in percent."""
    scores = result.rounds[-1].evaluation
    assert scores is not None
    return 100 * scores.validation["accuracy"]


def main(given: argparse.Namespace) -> None:
    """Choose rates by the first seed, then run the others."""
    print("| server | rate | of | validation, seed 0 | test, mean and deviation |\n|---|---|---|---|---|")
    table = {}
    for name, rates in RATES.items():
        tried = {rate: validation(run(given, name, rate, 0)) for rate in rates}
        best = max(tried, key=lambda rate: tried[rate])
        found = [100 * run(given, name, best, seed).final.shared["accuracy"] for seed in range(given.seeds)]
        end = " (an end of the range)" if len(rates) > 1 and best in (rates[0], rates[-1]) else ""
        table[name] = {"validation": tried, "rate": best, "test": found}
        of = ", ".join(f"{rate:g}" for rate in rates)
        spread = f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} %"
        print(f"| {name} | {best:g}{end} | {of} | {tried[best]:.1f} % | {spread} |", flush=True)
    (given.out / "server_optimizers.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--preset", default="mnist", choices=sorted(PRESETS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-epochs", type=int, help="default: the preset's")
    parser.add_argument("--seeds", type=int, default=3)
    main(parser.parse_args())
