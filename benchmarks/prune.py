"""Pruning side by side: sparsekit, Torch-Pruning and narrow networks from scratch, on equal FLOPs and equal data.

    python benchmarks/prune.py --task resnet20-cifar10 --out prune.jsonl
    python benchmarks/prune.py --out prune.jsonl --table            what is in the file, as tables

Every result is written when it is there, and a second call goes on where the first one ended, also within a training. One
dense model per task and seed is pretrained for all arms at all budgets. Test accuracy as cut, after reconstruction where the
arm has it, after recalibration of batch norms, and after fine-tuning at the last epoch. Networks from scratch train for as
many epochs as pretraining and fine-tuning together; `training_flops` says what each arm spent, pretraining included.
"""

import argparse
import copy
import os
import platform
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import add, read, show, spread
from prune_arms import ARMS
from prune_cells import PRETRAIN_RATE, RATE, TASKS, Cell, accuracy, flops_of, load, train

import sparsekit as sk

KEY = ("task", "arm", "budget", "seed")


def _measure(options: argparse.Namespace) -> None:
    done = [tuple(row[name] for name in KEY) for row in read(options.out)]
    for task_name, seed in product(options.task, range(options.seeds)):
        task = TASKS[task_name]
        data = load(task, options.data_dir)
        folder = options.out.with_suffix("") / f"{task_name}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = task.make().to(memory_format=torch.channels_last)  # which one core trains faster
        cell = Cell(task, data, model, 1.0, seed, folder, tuple(options.budgets))
        pretraining = train(model, cell, "dense", task.pretrain, PRETRAIN_RATE)
        model.eval()
        for share, arm in [(1.0, "dense"), *product(options.budgets, options.arms)]:
            key = (task_name, arm, share, seed)
            if key in done:
                continue
            if arm == "dense":
                found = {"share": 1.0, "training_flops": pretraining, "flops": flops_of(model, cell.example)}
                found["finetuned"] = accuracy(model, data.loader("test"))
            else:
                place = folder / f"{arm.replace(': ', '-').replace(', ', '-').replace(' ', '-')}-{share:g}"
                place.mkdir(exist_ok=True)
                found = _one(replace(cell, share=share, folder=place), arm, pretraining)
            row = {**dict(zip(KEY, key)), **found, "torch": torch.__version__, "machine": platform.machine()}
            add(options.out, row)


def _one(cell: Cell, arm: str, pretraining: float) -> dict[str, Any]:
    cut = ARMS[arm](cell)
    test = cell.data.loader("test")
    small, task = cut.model, cell.task
    dense_flops, flops = flops_of(cell.dense, cell.example), flops_of(small, cell.example)
    found: dict[str, Any] = {"flops": flops, "share": flops / dense_flops, **cut.notes}
    if cut.scratch:
        spent = train(small, cell, "scratch", task.pretrain + task.finetune, PRETRAIN_RATE)
        return found | {"training_flops": spent, "finetuned": accuracy(small, test)}
    found["as_cut"] = accuracy(small, test)
    start = copy.deepcopy(small)
    sk.recalibrate_batchnorm(start, cell.scoring())
    found["recalibrated"] = accuracy(start, test)
    if cut.reconstructed is not None:
        start = cut.reconstructed
        sk.recalibrate_batchnorm(start, cell.scoring())
        found["compensated"] = accuracy(start, test)
    spent = train(start, cell, "finetuned", task.finetune, RATE, teacher=cell.dense if cut.teacher else None)
    if cut.teacher:  # its forward passes
        spent += dense_flops * cell.data.labels["train"].numel() * task.finetune
    return found | {"training_flops": pretraining + spent, "finetuned": accuracy(start, test)}


def _rows(lines: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Of the table: budgets from the largest, arms by name."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["task"], -line["budget"], line["arm"]), []).append(line)
    columns = {"as_cut": "as cut", "recalibrated": "recalibrated", "compensated": "reconstructed", "finetuned": "fine-tuned"}
    for (task, share, arm), values in sorted(cells.items()):
        accuracies = {said: spread([value[name] for value in values if name in value], 3) for name, said in columns.items()}
        got = statistics.mean(value["share"] for value in values)
        flops = statistics.mean(value["training_flops"] for value in values)
        row = {"task": task, "budget": f"{-share:g}", "arm": arm, "share": f"{got:.3f}"}
        yield row | accuracies | {"training FLOPs": f"{flops:.2e}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("prune.jsonl"))
    parser.add_argument("--task", nargs="+", default=["resnet20-cifar10", "vgg11-cifar100"], choices=sorted(TASKS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25, 0.12])
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SPARSEKIT_DATA"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.table:
        _measure(options)
    show(_rows(read(options.out)), as_json=False)


if __name__ == "__main__":
    main()
