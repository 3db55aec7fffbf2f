"""Which widths train on best: allocations of a trained VGG11 at the FLOPs of one ratio, each trained for as many steps.

    python benchmarks/choice_widths.py                    ratios 1/4 and 1/2, one seed, some ten minutes on an idle core
    python benchmarks/choice_widths.py --seeds 3 --ratios 0.25

Units are scored once by Fisher information on 200 training images; the masks of all widths follow from these scores. A line a
network: ratio, seed, scale and rise of `ByCost` (or "one ratio"), widths, accuracy on the test images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from choice import _pretrain, _train
from choice_cells import images

import sparsekit as sk
from sparsekit.allocation import ByCost, Uniform

PLANS = [("rest", 0.0), ("rest", 1.0), ("rest", 2.0), ("none", 1.0), ("none", 2.0), ("none", 3.0)]


def main() -> None:
    """Read the options and print a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--train", type=int, default=10000, help="training images")
    parser.add_argument("--test", type=int, default=4000, help="test images")
    parser.add_argument("--steps", type=int, default=312)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        cell = images("cifar10", seed, options.device, train=options.train, test=options.test, network="vgg")
        _pretrain(cell, 3 * options.train // cell.batch, seed)
        x = cell.train[0][:2]
        batches = [(cell.train[0][i : i + 100], cell.train[1][i : i + 100]) for i in (0, 100)]
        graph = sk.trace_units(cell.model, x)
        costs = sk.cost_model(cell.model, x, graph=graph)
        view = sk.View(weights=cell.model.state_dict(), model=cell.model)
        scores = sk.criteria.Fisher(batches, F.cross_entropy).scores(graph, view)
        for ratio in options.ratios:
            same = Uniform(ratio).counts(graph, {})
            budget = sk.Budget(flops=float(costs.costs(same)["flops"]))
            plans: dict[str, Mapping[str, int]] = {"one ratio": same}
            for scale, rise in PLANS:
                plan = ByCost(budget, scale=scale, rise=rise)  # type: ignore[arg-type]
                plans[f"{scale}, rise {rise:g}"] = plan.counts(graph, scores, costs)
            for name, counts in plans.items():
                small = sk.compact(cell.model, graph, sk.choose(graph, scores, counts))
                masked = sk.LearnableMask(small, (x,), explore=0.0)
                found = {"ratio": ratio, "seed": seed, "widths": name, "counts": list(counts.values())}
                print(json.dumps({**found, "accuracy": _train(masked, cell, options.steps, seed)[0]}), flush=True)


if __name__ == "__main__":
    main()
