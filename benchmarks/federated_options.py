"""Tables of the page on training: server optimizers over seeds, and time to accuracy with and without waiting.

python benchmarks/federated_options.py server | async [--data-dir DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import sparsekit_fl as fl
from sparsekit_fl.experiment.build import build_problem
from sparsekit_fl.paper.presets import PRESETS

SERVERS = {
    "none": {},
    "fedavgm": {"server_optimizer": "fedavgm", "server_lr": 0.3},
    "fedadam": {"server_optimizer": "fedadam", "server_lr": 0.01},
    "fedyogi": {"server_optimizer": "fedyogi", "server_lr": 0.01},
    "fedadagrad": {"server_optimizer": "fedadagrad", "server_lr": 0.03},
}


def _run(seed: int, data_dir: Path | None, method: str = "fedavg", **options: object) -> fl.RunResult:
    preset = PRESETS["mnist" if data_dir else "digits"]
    problem, clients = build_problem(preset, clients=40, data_dir=data_dir, seed=seed)
    if "async_buffer" in options:
        # Devices on which computing takes longer than sending, at five speeds.
        speeds = [5e8 / 2**place for place in range(5)]
        clients = [
            replace(client, capability=fl.Capability(flops_per_second=speeds[client.id % len(speeds)])) for client in clients
        ]
        options = {**options, "capability_levels": None}
    training = {"local_epochs": 1, "batch_size": 20, "lr": 0.05}
    config = preset.config({**training, "seed": seed, "capability": "fixed", **options}, len(clients))
    return fl.run(fl.methods.registry[method](), problem, clients, config)


def server(data_dir: Path | None, rounds: int, methods: tuple[str, ...] = ("fedavg", "heterofl")) -> None:
    """Global accuracy of the last round, mean and deviation over three seeds; whole models and submodels."""
    print("| server | " + " | ".join(methods) + " |\n|---" + "|---" * len(methods) + "|")
    for name, options in SERVERS.items():
        cells = []
        for method in methods:
            found = [
                100 * _run(seed, data_dir, method, rounds=rounds, eval_every=rounds, **options).final.shared["accuracy"]
                for seed in range(3)
            ]
            cells.append(f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} %")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def asynchronous(data_dir: Path | None, rounds: int) -> None:
    """Simulated seconds until the global model reaches each accuracy, for one seed; devices of speeds 1 to 1/16."""
    print("| accuracy | rounds that wait, s | asynchronous, s |\n|---|---|---|")
    curves = []
    for buffer in (None, 4):
        options, steps = {"async_buffer": buffer}, rounds if buffer is None else 4 * rounds
        result = _run(0, data_dir, rounds=steps, eval_every=4, eval_global_every=4, **options)
        scored = [record for record in result.rounds if record.evaluation is not None and record.evaluation.shared]
        curves.append([(record.cost.seconds, record.evaluation.shared["accuracy"]) for record in scored])
    best = min(max(accuracy for _, accuracy in curve) for curve in curves)
    for target in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        if target <= best:
            times = [next(seconds for seconds, accuracy in curve if accuracy >= target) for curve in curves]
            print(f"| {target:.0%} | " + " | ".join(f"{seconds:.3g}" for seconds in times) + " |")
    print(f"end: {[(round(curve[-1][0], 2), round(curve[-1][1], 3)) for curve in curves]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("server", "async"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    {"server": server, "async": asynchronous}[given.what](given.data_dir, given.rounds)
