"""Pruning side by side: sparsekit, Torch-Pruning and narrow networks from scratch, on equal FLOPs and equal data.

    python benchmarks/prune.py --out prune.json                                  everything, the short schedule, on the CPU
    python benchmarks/prune.py --out prune.json --schedule published --device cuda
    python benchmarks/prune.py --out prune.json --table                          what is in the file, as tables
    python benchmarks/prune.py --out tiny.json --task tiny-digits --schedule tiny --seeds 1

Every result is written when it is there, and a second call goes on where the first one ended, also within a training. One
dense model per task and seed is pretrained for all arms at all budgets. Test accuracy as cut, after compensation where the
arm has it, after recalibration of batch norms, and after fine-tuning at the last epoch; choices are made on a tenth of the
training images. Networks from scratch get the training FLOPs of pretraining and fine-tuning together, up to a limit of epochs
that the file has; `training_flops` says what each arm spent, pretraining included.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import show, spread
from prune_arms import ARMS
from prune_cells import Cell, accuracy, flops_of, train
from prune_tasks import SCHEDULES, TASKS, load

import sparsekit as sk
from sparsekit.measure.latency import measure_latency


class Results:
    """The file of results, written whole after each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found.setdefault("environment", {"torch": torch.__version__, "machine": platform.machine()})
        self.found.setdefault("accuracy", {})

    def has(self, key: str) -> bool:
        return key in self.found["accuracy"]

    def add(self, key: str, value: dict[str, Any]) -> None:
        self.found["accuracy"][key] = value
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.found, indent=1))
        temporary.replace(self.path)
        print(f"accuracy: {key}", flush=True)


def _accuracy(options: argparse.Namespace, results: Results) -> None:
    schedule, device = SCHEDULES[options.schedule], torch.device(options.device)
    for task_name in options.task:
        task = TASKS[task_name]
        data = load(task, schedule, options.data_dir, device)
        for seed in range(options.seeds):
            folder = options.out.with_suffix("") / f"{task_name}-{options.schedule}-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = task.make().to(device)
            if schedule.channels_last:
                model = model.to(memory_format=torch.channels_last)
            cell = Cell(task, schedule, data, model, 1.0, seed, folder)
            pretraining = train(model, cell, "dense", schedule.pretrain, schedule.rates[0])
            model.eval()
            dense = accuracy(model, data.loader("test", 500))
            key = f"{task_name} | {options.schedule} | dense | 1 | {seed}"
            if not results.has(key):
                flops = flops_of(model, cell.example)
                results.add(key, {"finetuned": dense, "share": 1.0, "training_flops": pretraining, "flops": flops})
            shared: dict[str, Any] = {}
            for share in options.budgets:
                for arm in options.arms:
                    key = f"{task_name} | {options.schedule} | {arm} | {share:g} | {seed}"
                    if not results.has(key):
                        place = folder / f"{arm.replace(': ', '-').replace(', ', '-').replace(' ', '-')}-{share:g}"
                        place.mkdir(exist_ok=True)
                        one = Cell(task, schedule, data, model, share, seed, place, tuple(options.budgets), shared)
                        results.add(key, _one(one, arm, pretraining))


def _one(cell: Cell, arm: str, pretraining: float) -> dict[str, Any]:
    begun = time.perf_counter()
    cut = ARMS[arm](cell)
    seconds = time.perf_counter() - begun
    test = cell.data.loader("test", 500)
    small, schedule = cut.model, cell.schedule
    dense_flops, flops = flops_of(cell.dense, cell.example), flops_of(small, cell.example)
    found: dict[str, Any] = {
        "flops": flops,
        "share": flops / dense_flops,
        "parameters": sum(p.numel() for p in small.parameters()),
        "cut_seconds": seconds,
        "latency_ms": measure_latency(small, (cell.example,), {}) if cell.example.device.type == "cpu" else None,
        **cut.notes,
    }
    if cut.scratch:
        wanted = schedule.finetune + pretraining / (3.0 * flops * cell.data.labels["train"].numel())
        epochs = int(min(wanted, schedule.longest * (schedule.pretrain + schedule.finetune)))
        spent = train(small, cell, "scratch", epochs, schedule.rates[0])
        return found | {"epochs": epochs, "training_flops": spent, "finetuned": accuracy(small, test)}
    found["as_cut"] = accuracy(small, test)
    plain = copy.deepcopy(small)
    sk.recalibrate(plain, cell.scoring())
    found["recalibrated"] = accuracy(plain, test)
    start = plain
    if cut.compensated is not None:
        start = cut.compensated
        sk.recalibrate(start, cell.scoring())
        found["compensated"] = accuracy(start, test)
    spent = train(start, cell, "finetuned", schedule.finetune, schedule.rates[1], teacher=cell.dense if cut.teacher else None)
    if cut.teacher:  # its forward passes
        spent += dense_flops * cell.data.labels["train"].numel() * schedule.finetune
    return found | {"training_flops": pretraining + cut.sparse_flops + spent, "finetuned": accuracy(start, test)}


def _rows(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Of the table: budgets from the largest, arms by name."""
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for key, value in found["accuracy"].items():
        cells.setdefault(tuple(key.split(" | ")[:4]), []).append(value)
    columns = {"as_cut": "as cut", "recalibrated": "recalibrated", "compensated": "compensated", "finetuned": "fine-tuned"}
    for (task, schedule, arm, share), values in sorted(
        cells.items(), key=lambda row: (row[0][0], -float(row[0][3]), row[0][2])
    ):
        accuracies = {said: spread([value[name] for value in values if name in value], 3) for name, said in columns.items()}
        got = statistics.mean(value["share"] for value in values)
        flops = statistics.mean(value["training_flops"] for value in values)
        row = {"task": task, "schedule": schedule, "budget": share, "arm": arm, "share": f"{got:.3f}"}
        yield row | accuracies | {"training FLOPs": f"{flops:.2e}"}


def main() -> None:
    """Measure what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("prune.json"))
    parser.add_argument("--task", nargs="+", default=["resnet20-cifar10", "vgg19-cifar100"], choices=sorted(TASKS))
    parser.add_argument("--schedule", default="short", choices=sorted(SCHEDULES))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25, 0.12])
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SPARSEKIT_DATA"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.data_dir = None if options.data_dir is None else Path(options.data_dir)
    results = Results(options.out)
    if not options.table:
        _accuracy(options, results)
    show(_rows(results.found), as_json=False)


if __name__ == "__main__":
    main()
