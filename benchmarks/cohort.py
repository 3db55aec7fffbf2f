"""The engine `cohort` beside one client at a time, in paired ratios.

    python benchmarks/cohort.py                                   the small CNN on this machine, one JSON on stdout
    python benchmarks/cohort.py --device cuda --models cnn vgg11 lstm --out cohort.json
    python benchmarks/cohort.py --methods fedavg heterofl --widths mixed --repeats 7

In each repetition both engines run the same few rounds, one after the other, and the time of the embedded engine is divided
by that of the cohort; shown are the median and the range of these ratios, and of the seconds of a round. A ratio above 1 says
that the cohort is faster. `wall` are seconds on the clock: on a machine that does other work too, they say little, and `load`
says what it did. `cpu` are the seconds of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import sparsekit_fl as fl
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.methods import registry
from sparsekit_fl.problem.models.cnn import Cnn
from sparsekit_fl.problem.models.lstm import NextWordLstm
from sparsekit_fl.problem.models.vgg import Vgg
from sparsekit_fl.results.rounds import RoundRecord

LEVELS = (1.0, 0.5, 0.25, 0.125, 0.0625)
ENGINES = {"embedded": fl.Embedded, "cohort": fl.Cohort}


class Clock(Callback):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """A round is over."""
        del record
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def case(model: str, clients: int, examples: int, widths: str) -> tuple[fl.Problem, list[fl.Client]]:
    """A problem of noise; clients of full width, or of the five levels in turn."""
    generator = torch.Generator().manual_seed(0)
    if model == "lstm":
        inputs = torch.randint(0, 10_000, (256, 9), generator=generator)
        targets = inputs.roll(-1, 1)
        problem = fl.Problem(model=NextWordLstm, example_inputs=(torch.zeros(2, 9, dtype=torch.long),))
    else:
        shape = (1, 28, 28) if model == "cnn" else (3, 32, 32)
        inputs = torch.randn(256, *shape, generator=generator)
        targets = torch.randint(0, 10, (256,), generator=generator)
        build = Cnn if model == "cnn" else lambda: Vgg(11, classes=10)
        problem = fl.Problem(model=build, example_inputs=(torch.zeros(2, *shape),), channels_last=model == "cnn")

    def split(first: int, size: int) -> fl.TensorData:
        return fl.TensorData((inputs,), targets, (torch.arange(size) + first) % 256)

    found = []
    for number in range(clients):
        data = fl.ClientData(split(17 * number, examples), split(number, 4), split(number, 4))
        ratio = LEVELS[number % len(LEVELS)] if widths == "mixed" else 1.0
        found.append(fl.Client(id=number, data=data, capability=fl.Capability(ratio=ratio)))
    return problem, found


def seconds(engine: str, method: str, model: str, options: argparse.Namespace) -> dict[str, float]:
    """Wall and CPU seconds of a round, without the first, which warms up, and the last, which scores."""
    problem, clients = case(model, options.clients, options.examples, options.widths)
    config = fl.RunConfig(
        rounds=options.rounds + 2,
        cohort=options.clients,
        training=fl.TrainingConfig(local_epochs=options.epochs, batch_size=20, lr=0.01),
        eval_every=options.rounds + 2,
        device=options.device,
    )
    clock = Clock()
    fl.run(registry[method](), problem, clients, config, engine=ENGINES[engine](), callbacks=[clock])
    return {name: (times[-2] - times[0]) / options.rounds for name, times in vars(clock).items()}


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(statistics.median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}


def measure(method: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both engines, and their ratio."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    for repeat in range(options.repeats):
        for name in ENGINES if repeat % 2 == 0 else reversed(ENGINES):  # in turn, as a machine gets slower or faster meanwhile
            found[name].append(seconds(name, method, model, options))
    row: dict[str, Any] = {"model": model, "method": method}
    for clock in ("wall", "cpu"):
        times = {name: [one[clock] for one in runs] for name, runs in found.items()}
        row[f"{clock}_seconds"] = {name: spread(values) for name, values in times.items()}
        row[f"{clock}_ratio"] = spread([a / b for a, b in zip(times["embedded"], times["cohort"], strict=True)])
    return row


def main() -> int:
    """Read the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("cnn", "vgg11", "lstm"), default=["cnn"])
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--widths", choices=("full", "mixed"), default="full", help="capabilities of the clients")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--examples", type=int, default=100, help="per client")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="measured, beside the first and the last")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    before = os.getloadavg()
    rows = [measure(method, model, options) for model in options.models for method in options.methods]
    report = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "cpu",
        "load": {"before": before, "after": os.getloadavg()},
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
