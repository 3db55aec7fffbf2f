"""Does a learned mask choose better than fixed ones? Arms × cells × seeds at equal training FLOPs, exploration counted.

    python benchmarks/choice.py planted --seeds 3                      a minute per family
    python benchmarks/choice.py images --ratios 0.25 --epochs 4        CIFAR-10, a part of it; `--train 50000` takes all
    python benchmarks/choice.py images --data cifar100 --device cuda --train 50000 --test 10000 --epochs 30
    python benchmarks/choice.py tasks --seeds 3                        real data where structure says that choice should matter
    python benchmarks/choice.py planted --trainable --batch 4          the planted layers train too; few examples in a batch
    python benchmarks/choice.py table --out results/choice.csv          what a file holds, as Markdown

Every run is a line in `--out` (choice.jsonl); lines that are there are not run again. An arm that scores units on data, or
explores, trains fewer steps by what that cost, as it is spent, so that all arms of a cell have the same FLOPs. `start` is
"scratch", or "trained": three epochs of the dense network, which are no arm's cost.

The arms: `learned` (a LearnableMask as it comes, in a plain loop), `paper` (GradientImportance), `random`, `ordered`,
`magnitude`, `fisher`, `torch-pruning` (its group magnitude), `oracle` for planted units, and of tasks `scratch` (the
narrow network from scratch, in as many FLOPs as the others after the cut; the dense network before it is given to them).
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from choice_cells import PLANTED, TASKS, Cell, images, planted, task
from common import add, read, show, spread

import sparsekit as sk

BATCH, EXPLORE, SCORED = 64, 0.1, 2
FIXED: dict[str, Callable[[Any], Any]] = {
    "random": lambda _: sk.criteria.Random(),
    "ordered": lambda _: sk.criteria.Ordered(),
    "magnitude": lambda _: sk.criteria.Magnitude(),
    "fisher": lambda data: sk.criteria.Fisher(data, F.cross_entropy),
    "torch-pruning": lambda _: _torch_pruning(),
}
ARMS = {
    "planted": ["oracle", "learned", "paper", "random", "magnitude", "fisher"],
    "images": ["learned", "paper", *FIXED],
    "tasks": ["learned", "scratch", "random", "magnitude", "fisher"],
}


def _torch_pruning() -> Any:
    import torch_pruning as tp

    from sparsekit.criteria.torch_pruning import TorchPruning

    return TorchPruning(tp.importance.GroupMagnitudeImportance(p=2))


def _train(masked: sk.LearnableMask, cell: Cell, steps: int, seed: int) -> tuple[float, int]:
    """Train for the FLOPs of `steps` plain narrow steps, in one cycle of the learning rate.

    Returns:
        The accuracy on the test images at its end, and the steps that exploration left.
    """
    optimizer = torch.optim.SGD(masked.parameters(), cell.lr, momentum=0.0 if cell.good else 0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, cell.lr, total_steps=max(2, steps))
    generator = torch.Generator().manual_seed(1000 + seed)
    taken = turned = 0
    for x, y in cell.batches(steps, generator):
        loss = F.cross_entropy(masked(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        taken += 1
        spent = taken * (1.0 + masked.exploration_cost)
        if spent >= steps:
            break
        for _ in range(turned, int(spent)):  # the cycle follows the work, whatever it was spent on
            schedule.step()
        turned = int(spent)
    masked.eval()
    x, y = cell.test
    with torch.no_grad():
        right = sum(int((masked(x[i : i + 500]).argmax(1) == y[i : i + 500]).sum()) for i in range(0, len(x), 500))
    masked.train()
    return right / len(x), taken


def _run(arm: str, cell: Cell, steps: int, ratio: float, seed: int) -> dict[str, Any]:
    """Train an arm; `steps` are those of a plain narrow network."""
    example = (cell.train[0][:2],)
    data = [(cell.train[0][i : i + 100], cell.train[1][i : i + 100]) for i in range(0, 100 * SCORED, 100)]
    graph = sk.trace_units(cell.model, *example)
    costs = sk.cost_model(cell.model, *example, graph=graph)
    uniform = sk.allocation.ratio_counts(graph, ratio)
    narrow = costs.costs(uniform)["flops"]
    dense = costs.costs({name: group.size for name, group in graph.groups.items()})["flops"]
    scored = arm == "fisher"
    own = steps - (round(100 * SCORED * dense / (cell.batch * narrow)) if scored else 0)
    options: dict[str, Any] = {"ratio": ratio}
    if arm == "paper":
        options["learning"] = sk.GradientImportance()
    elif arm != "learned":  # `learned` is what the class does by itself, in a plain loop
        options["explore"] = 0.0
    start = FIXED[arm](data) if arm in FIXED else sk.criteria.Random() if arm == "learned" and cell.good else None
    torch.manual_seed(2000 + seed)
    begun = time.perf_counter()
    masked = sk.LearnableMask(cell.model, example, **options)
    if start is not None or arm == "oracle":
        worth = masked.importance()
        for name, units in _good(cell, worth).items() if start is None else ():
            worth[name] = torch.zeros_like(worth[name]).index_fill_(0, torch.tensor(units), 1.0)
        if start is not None:
            generator = torch.Generator().manual_seed(3000 + seed)
            context = sk.ScoringContext(weights=cell.model.state_dict(), generator=generator, model=cell.model)
            worth = dict(start.scores(masked.graph, context))
        masked.load(cell.model.state_dict(), importance=torch.cat([worth[name] for name in masked.graph.groups]))
    accuracy, taken = _train(masked, cell, max(2, own), seed)
    mask = masked.unit_mask()
    found = [float(mask[name][units].float().mean()) for name, units in _good(cell, mask).items()]
    return {
        "accuracy": accuracy, "steps": taken, "explored": masked.exploration_cost, "widths": list(mask.counts().values()),
        "flops": costs.costs(mask.counts())["flops"] / dense,
        "swapped": getattr(masked._rule, "clock", {}).get("swapped", 0),
        "found": statistics.mean(found) if found else None, "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def _good(cell: Cell, names: Iterable[str]) -> dict[str, list[int]]:
    """Group → its planted units."""
    return {next(name for name in names if name.startswith(start)): sorted(units) for start, units in cell.good.items()}


def _names(options: argparse.Namespace) -> dict[str, str]:
    """Family, task or start → what its cell is called in the file."""
    if options.what == "planted":
        end = (f", batches of {options.batch}" if options.batch != BATCH else "") + (", trainable" if options.trainable else "")
        return {family: f"planted {family}{end}" for family in options.families}
    end = f"{options.train} images {options.epochs} epochs"
    if options.what == "tasks":
        return {name: f"task {name} {end}" for name in TASKS}
    pixels = "" if options.pooled == 1 else f" {32 // options.pooled} pixels"
    return {start: f"{options.data}{pixels} {start} {end}" for start in options.starts}


def _cell(options: argparse.Namespace, kind: str, seed: int, arm: str) -> tuple[Cell, int]:
    """What an arm is trained on, and the steps of a plain narrow network."""
    if options.what == "planted":
        cell = dataclasses.replace(planted(kind, seed, options.device), batch=options.batch)
        if options.trainable:
            cell.model.requires_grad_()
        return cell, options.steps
    sizes = {"train": options.train, "test": options.test}
    if options.what == "tasks":
        before, cell = task(kind, seed, options.device, **sizes)
        name, steps = f"{kind}-{options.train}", options.epochs * len(cell.train[0]) // BATCH
    else:
        before = cell = images(options.data, seed, options.device, **sizes, pooled=options.pooled)
        name, steps = f"{options.data}-small-{options.train}-{options.pooled}", options.epochs * (options.train // BATCH)
    if "scratch" not in (kind, arm):
        # The dense network after three epochs, which are trained once for all arms.
        kept = options.out.parent / f"dense-{name}-{seed}.pt"
        if not kept.exists():
            masked = sk.LearnableMask(before.model, (before.train[0][:2],), explore=0.0)
            _train(masked, before, 3 * options.train // BATCH, seed)
            torch.save(masked.dense_state(), kept)
        cell.model.load_state_dict(torch.load(kept, weights_only=True))
    return cell, steps


def _tables(lines: list[dict[str, Any]]) -> None:
    """A table for each cell: arms, the best on average first, by ratios."""
    for cell, runs in pd.DataFrame(lines).groupby("cell", sort=False):
        means = runs.groupby(["arm", "ratio"])["accuracy"].mean().unstack()
        print(f"\n**{cell}**, accuracy in %, seeds in brackets where they are not 3\n")
        rows = []
        for arm in means.mean(axis=1).sort_values(ascending=False, kind="stable").index:
            own = runs[runs["arm"] == arm]
            row = {"arm": arm}
            for ratio in reversed(means.columns):
                values = (100 * own[own["ratio"] == ratio]["accuracy"]).tolist()
                row[f"ratio {ratio:g}"] = spread(values) + (f" ({len(values)})" if len(values) not in (0, 3) else "")
            found = own["found"].astype(float).dropna()
            rows.append(row | {"planted units found": f"{100 * found.mean():.0f} %" if len(found) else ""})
        show(rows, as_json=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["planted", "images", "tasks", "table"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--families", nargs="+", default=list(PLANTED))
    parser.add_argument("--steps", type=int, default=1500, help="of planted units")
    parser.add_argument("--batch", type=int, default=BATCH, help="examples in a batch, of planted units; few are noise")
    parser.add_argument("--trainable", action="store_true", help="the layers that make the planted units train as well")
    parser.add_argument("--data", choices=["cifar10", "cifar100"], default="cifar10")
    parser.add_argument("--starts", nargs="+", choices=["scratch", "trained"], default=["scratch", "trained"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.25, 0.125, 0.0625])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--train", type=int, default=20000, help="training images")
    parser.add_argument("--test", type=int, default=4000, help="test images")
    parser.add_argument("--pooled", type=int, default=1, help="2 averages images to 16 × 16, at a quarter of the work")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default="choice.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what != "table":
        done = [(line["cell"], line["ratio"], line["seed"], line["arm"]) for line in read(options.out)]
        ratios = [0.25] if options.what == "planted" else options.ratios
        every = product(_names(options).items(), ratios, range(options.seeds), options.arms or ARMS[options.what])
        for (kind, name), ratio, seed, arm in every:
            if (name, ratio, seed, arm) not in done:
                found = _run("random" if arm == "scratch" else arm, *_cell(options, kind, seed, arm), ratio, seed)
                add(options.out, {"cell": name, "ratio": ratio, "arm": arm, "seed": seed, **found})
    if lines := read(options.out):
        _tables(lines)


if __name__ == "__main__":
    main()
