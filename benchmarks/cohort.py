"""The engine `cohort` beside one client at a time, in paired ratios.

    python benchmarks/cohort.py                                   the small CNN on this machine, one JSON on stdout
    python benchmarks/cohort.py --device cuda --models cnn vgg11 lstm --out cohort.json
    python benchmarks/cohort.py --methods fedavg fedlps --widths mixed --repeats 7
    python benchmarks/cohort.py --device cuda --engines cohort-batched cohort-one-stream cohort-no-graphs

In each repetition every engine runs the same few rounds, one after the other, and its time is divided by that of the
reference beside it; shown are the median and the range of these ratios, and of the seconds of a round. A ratio above 1 says
that the engine is faster than its reference. References: `embedded-1`, one client at a time in this process, for engines of
one process; `embedded-2`, the embedded engine with two workers, for `cohort-2`.

`wall` are seconds on the clock: on a machine that does other work too, they say little, and `load` says what it did. `cpu`
are the seconds of this process, which do not see worker processes; they are given for engines of one process.
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
from sparsekit_fl.methods import registry
from sparsekit_fl.models.cnn import Cnn
from sparsekit_fl.models.lstm import NextWordLstm
from sparsekit_fl.models.vgg import Vgg
from sparsekit_fl.results.records import Observer, RoundRecord

LEVELS = (1.0, 0.5, 0.25, 0.125, 0.0625)
ENGINES: dict[str, tuple[str, Any]] = {
    "embedded-1": ("embedded-1", lambda: fl.Embedded()),
    "cohort-1": ("embedded-1", lambda: fl.Cohort(batched=False)),
    "cohort-batched": ("embedded-1", lambda: fl.Cohort(batched=True)),
    "cohort-one-stream": ("embedded-1", lambda: fl.Cohort(batched=True, streams=1)),
    "cohort-no-graphs": ("embedded-1", lambda: fl.Cohort(batched=True, graphs=False)),
    "cohort-no-graphs-one-stream": ("embedded-1", lambda: fl.Cohort(batched=True, graphs=False, streams=1)),
    "embedded-2": ("embedded-2", lambda: fl.Embedded(2)),
    "cohort-2": ("embedded-2", lambda: fl.Cohort(2, batched=False)),
}
"""Name → its reference, and how it is made."""


class Clock(Observer):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_round(self, record: RoundRecord) -> None:
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


def seconds(engine: str, method: str, model: str, options: argparse.Namespace) -> tuple[float, float, str]:
    """Wall and CPU seconds of a round, without the first, which warms up, and the last, which scores; and a digest."""
    problem, clients = case(model, options.clients, options.examples, options.widths)
    config = fl.RunConfig(
        rounds=options.rounds + 2,
        cohort=options.clients,
        training=fl.TrainingConfig(local_epochs=options.epochs, batch_size=20, lr=0.01),
        eval_every=options.rounds + 2,
        device=options.device,
    )
    clock = Clock()
    result = fl.run(registry[method](), problem, clients, config, engine=ENGINES[engine][1](), observers=[clock])
    wall, cpu = ((times[-2] - times[0]) / options.rounds for times in (clock.wall, clock.cpu))
    return wall, cpu, result.final.state_sha256[:12]


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(statistics.median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}


def measure(method: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each engine."""
    wanted = [name for name in ENGINES if name in options.engines or any(ENGINES[e][0] == name for e in options.engines)]
    wall: dict[str, list[float]] = {name: [] for name in wanted}
    cpu: dict[str, list[float]] = {name: [] for name in wanted}
    digests: dict[str, str] = {}
    for repeat in range(options.repeats):
        for name in wanted if repeat % 2 == 0 else reversed(wanted):  # in turn, as a machine gets slower or faster meanwhile
            one, two, digests[name] = seconds(name, method, model, options)
            wall[name].append(one)
            cpu[name].append(two)
    rows = []
    for name in wanted:
        reference = ENGINES[name][0]
        row: dict[str, Any] = {"model": model, "method": method, "engine": name, "reference": reference}
        row["wall_seconds"] = spread(wall[name])
        row["wall_ratio"] = spread([a / b for a, b in zip(wall[reference], wall[name], strict=True)])
        if reference == "embedded-1":
            row["cpu_ratio"] = spread([a / b for a, b in zip(cpu[reference], cpu[name], strict=True)])
        row["same_bits"] = digests[name] == digests[reference]
        rows.append(row)
    return rows


def main() -> int:
    """Read the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("cnn", "vgg11", "lstm"), default=["cnn"])
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["cohort-1", "cohort-batched", "cohort-2"])
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
    rows = [row for model in options.models for method in options.methods for row in measure(method, model, options)]
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
