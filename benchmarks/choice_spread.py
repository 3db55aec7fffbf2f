"""How much could any choice of units gain? Random masks of one trained network, each trained several times.

    python benchmarks/choice_spread.py --ratios 0.5 0.25 --masks 16 --orders 3

Accuracy differs between runs of one mask, since batches come in another order, and between masks. The variance of what a mask
is worth is what is left of the variance between masks when the part of the orders is taken off (one-way analysis of variance).
The network, the images and the training are those of `choice.py images --pooled 2 --starts trained --epochs 3`, the dense
network that of seed 0; runs are lines in `--out` and are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from choice import BATCH, _lines, _pretrain, _train
from choice_cells import images

import sparsekit as sk


def spread(accuracies: list[list[float]]) -> dict[str, float]:
    """Deviations, in points, between orders of one mask and between masks; `accuracies` has a list of orders per mask."""
    orders = len(accuracies[0])
    within = statistics.mean(statistics.variance(runs) for runs in accuracies)
    means = [statistics.mean(runs) for runs in accuracies]
    between = statistics.variance(means) - within / orders
    # The error of `between` if masks did not differ: a χ² of masks − 1 degrees of freedom, scaled by within / orders.
    error = within / orders * (2 / (len(means) - 1)) ** 0.5
    return {
        "mean": 100 * statistics.mean(means), "best": 100 * max(means), "orders": 100 * within**0.5,
        "masks": 100 * max(0.0, between) ** 0.5, "masks_at_most": 100 * max(0.0, between + 2 * error) ** 0.5,
    }  # fmt: skip


def _run(options: argparse.Namespace, ratio: float, mask: int, order: int) -> dict[str, Any]:
    cell = images(options.data, 0, options.device, train=20000, test=10000, pooled=2)
    dense = Path(options.out).parent / f"dense-spread-{options.data}.pt"
    steps = 20000 // BATCH
    if not dense.exists():
        _pretrain(cell, 3 * steps, 0)
        torch.save(cell.model.state_dict(), dense)
    cell.model.load_state_dict(torch.load(dense, weights_only=True))
    start = sk.criteria.Random()
    generator = torch.Generator().manual_seed(3000 + mask)
    masked = sk.LearnableMask(cell.model, (cell.train[0][:2],), ratio=ratio, start=start, explore=0.0, generator=generator)
    return {"accuracy": _train(masked, cell, 3 * steps, order)[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["cifar10", "cifar100"], default="cifar10")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.25])
    parser.add_argument("--masks", type=int, default=16)
    parser.add_argument("--orders", type=int, default=3, help="trainings of each mask")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default="benchmarks/choice_spread.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for ratio in options.ratios:
        table = []
        for mask in range(options.masks):
            row = []
            for order in range(options.orders):
                key = {"data": options.data, "ratio": ratio, "mask": mask, "order": order}
                line = next((line for line in _lines(options.out) if key.items() <= line.items()), None)
                if line is None:
                    line = {**key, **_run(options, ratio, mask, order)}
                    with Path(options.out).open("a") as file:
                        file.write(json.dumps(line) + "\n")
                row.append(line["accuracy"])
            table.append(row)
        print(options.data, ratio, {name: round(value, 2) for name, value in spread(table).items()}, flush=True)


if __name__ == "__main__":
    main()
