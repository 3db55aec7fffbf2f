"""Pruning to a budget: how long it takes, how near it comes, and a picture of the widths.

python benchmarks/prune_budget.py --time              # ResNet-50 to half of its FLOPs, on one thread
python benchmarks/prune_budget.py --asked             # FLOPs asked and got, of four networks and the zoo of the tests
python benchmarks/prune_budget.py --rivals            # the same of these and 20 models of the zoo, by Torch-Pruning too
python benchmarks/prune_budget.py --picture FILE.svg  # the widths of ResNet-50 at half of its FLOPs
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from nets import DenseNet121, ResNet50, VisionTransformer, vgg11
from torch import nn

import sparsekit as sk
from sparsekit.allocation.rounding import free_counts
from sparsekit.pruning.page import draw_widths

NETS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "VGG11": (vgg11, (1, 3, 32, 32)),
    "ResNet-50": (ResNet50, (1, 3, 224, 224)),
    "ViT-S": (VisionTransformer, (1, 3, 64, 64)),
    "DenseNet-121": (DenseNet121, (1, 3, 64, 64)),
}


def measure_time(repeats: int = 3) -> None:
    """Print processor seconds of the parts and of the whole call; the least of some repeats."""
    x = torch.randn(1, 3, 224, 224)
    rows: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = run()
        rows.setdefault(name, []).append(time.process_time() - start)
        return found

    def once() -> Any:
        model = ResNet50()
        graph = timed("trace and verify", lambda: sk.trace_units(model, x))
        costs = timed("costs", lambda: sk.cost_model(model, x, graph=graph))
        scores = timed("magnitudes", lambda: sk.criteria.Magnitude().scores(graph, sk.View(weights=model.state_dict())))
        plan = sk.allocation.ByCost(sk.Budget(flops="50%"))
        timed("allocation by cost, unit by unit", lambda: plan.counts(graph, scores, costs))
        timed("prune, with memory at 60 % too", lambda: sk.prune(model, (x,), budget="flops=50%,memory=60%"))
        return timed("the whole call of prune", lambda: sk.prune(model, (x,), budget="flops=50%"))

    for _ in range(repeats):
        pruned = once()
    for name, seconds in rows.items():
        print(f"{name:36s} {min(seconds):6.2f} s")
    print(f"FLOPs kept: {pruned.report.after['flops'] / pruned.report.before['flops']:.4%}")


def compare_asked(shares: tuple[float, ...] = (0.75, 0.5, 0.25), multiples: tuple[int, ...] = (1, 8)) -> None:
    """Print what was asked and got, in % of the dense model's FLOPs between the least possible and all of them."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import zoo

    models: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
        name: (lambda make=make, shape=shape: (make(), (torch.randn(shape),), {}))  # type: ignore[misc]
        for name, (make, shape) in NETS.items()
    }
    models.update({f"zoo: {name}": (lambda name=name: zoo.build(name)) for name in sorted(zoo.ZOO)})  # type: ignore[misc]
    worst = dict.fromkeys(multiples, 0.0)
    over = runs = 0
    for name, build in models.items():
        model, args, kwargs = build()
        try:
            graph = sk.trace_units(model, *args, example_kwargs=kwargs)
        except sk.errors.NoUnitsError:
            continue
        costs = sk.cost_model(model, *args, graph=graph, **kwargs)
        dense = costs.dense_costs()["flops"]
        scores = sk.criteria.Magnitude().scores(graph, sk.View(weights=model.state_dict()))
        cells = []
        for multiple in multiples if name in NETS else (1,):
            free = free_counts(graph, {}, multiple)
            least = costs.costs({name: counts[0] for groups, counts in free.items() for name in groups})["flops"]
            for share in shares:
                limit = least + share * (dense - least)
                plan = sk.allocation.ByCost(sk.Budget(flops=limit), multiple_of=multiple)
                got = costs.costs(plan.counts(graph, scores, costs))["flops"]
                runs += 1
                over += got > limit
                if name in NETS:
                    worst[multiple] = max(worst[multiple], 1 - got / limit)
                cells.append(f"{100 * limit / dense:5.1f} → {100 * got / dense:5.1f}")
        print(f"{name:34s} {'   '.join(cells)}")
    print(f"budgets exceeded: {over} of {runs}")
    for multiple, share in worst.items():
        print(f"multiple_of={multiple}: the part of a budget left over is at most {share:.2%}, of the four networks")


def _stepwise(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float, round_to: int | None) -> nn.Module:
    """Torch-Pruning has no budget, so it takes small steps until the FLOPs are met, as its own scripts do."""
    import torch_pruning as tp

    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    pruner = tp.pruner.BasePruner(
        model,
        kwargs or (args if len(args) > 1 else args[0]),
        importance=tp.importance.MagnitudeImportance(p=2),
        global_pruning=True,
        pruning_ratio=1.0,
        iterative_steps=200,
        ignored_layers=layers[-1:],
        round_to=round_to,
    )
    for _ in range(200):
        pruner.step()
        if sk.count_cost(model, *args, **kwargs).flops_compact <= limit:
            break
    return model


def _nearest(costs: Any, free: Mapping[tuple[str, ...], tuple[int, ...]], limit: float) -> float | None:
    """The most FLOPs within a limit that any allowed widths have, by trying all of them; None where these are too many."""
    if math.prod(len(counts) for counts in free.values()) > 100_000:
        return None
    every = itertools.product(*free.values())
    found = (costs.costs({name: n for groups, n in zip(free, counts) for name in groups})["flops"] for counts in every)
    return max(flops for flops in found if flops <= limit)


def compare_rivals(count: int = 20) -> None:
    """Print a table: half of what can be pruned of the FLOPs of every k-th model of the zoo and of four networks.

    In a cell stands what was got as a share of what was asked; above 1 the budget was exceeded. The models of the zoo are tiny,
    one unit may be a tenth of the FLOPs: "possible" is the best that any widths reach. Torch-Pruning is told nothing that it
    must be told layer by layer, such as numbers of heads.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import zoo

    names = sorted(name for name, architecture in zoo.ZOO.items() if architecture.groups)
    builds: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]], int]] = {}
    for place in range(count):
        name = names[place * len(names) // count]
        builds[name] = ((lambda name=name: zoo.build(name)), 2)  # type: ignore[misc]
    for name, (make, shape) in NETS.items():
        builds[name] = ((lambda make=make, shape=shape: (make(), (torch.randn(shape),), {})), 8)  # type: ignore[misc]
    print("| model | asked | possible | ours | torch-pruning | multiples of | possible | ours | torch-pruning |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (build, multiple) in builds.items():
        model, args, kwargs = build()
        model.eval()
        graph = sk.trace_units(model, *args, example_kwargs=kwargs)
        costs = sk.cost_model(model, *args, graph=graph, **kwargs)
        dense = costs.dense_costs()["flops"]
        least = free_counts(graph, {}, multiple)
        asked = (dense + costs.costs({each: counts[0] for groups, counts in least.items() for each in groups})["flops"]) / 2
        cells = []
        for widths in (1, multiple):
            best = _nearest(costs, free_counts(graph, {}, widths), asked)
            cells += [str(multiple)] if widths > 1 else []
            cells.append("" if best is None else f"{best / asked:.3f}")
            for library in ("ours", "torch-pruning"):
                try:
                    if library == "ours":
                        inputs = kwargs if kwargs and not args else args
                        small = sk.prune(model, inputs, budget={"flops": asked}, graph=graph, multiple_of=widths).model
                    else:
                        small = _stepwise(
                            build()[0].eval(), args, kwargs, asked * costs.examples, widths if widths > 1 else None
                        )
                    with torch.no_grad():
                        small(*args, **kwargs)
                    cells.append(f"{sk.count_cost(small, *args, **kwargs).flops_compact / costs.examples / asked:.3f}")
                except Exception as error:  # noqa: BLE001 - what goes wrong in a library is a result
                    cells.append(f"{type(error).__name__}")
        print(f"| {name} | {asked / dense:.1%} | {' | '.join(cells)} |", flush=True)


def draw(path: Path) -> None:
    """Write the picture of widths."""
    pruned = sk.prune(ResNet50(), torch.randn(1, 3, 224, 224), budget="flops=50%", multiple_of=8)
    style = "<style>text { font: 11px ui-monospace, monospace; fill: #1b1f24; } .dim { fill: #6a7380; }</style>"
    path.write_text(draw_widths(pruned.report.layers).replace("<g>", style + "<g>", 1), encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--asked", action="store_true")
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if options.time:
        measure_time()
    if options.asked:
        compare_asked()
    if options.rivals:
        compare_rivals()
    if options.picture:
        draw(options.picture)


if __name__ == "__main__":
    main()
