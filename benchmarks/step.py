"""Time of one FedLPS step against a plain SGD step of a natively narrow network of the same size.

Paired and interleaved in one process, one thread, medians of the ratios of neighbouring steps after a warm-up:

    python benchmarks/step.py                        a table
    python benchmarks/step.py --json                 one line per case, for machines
    python benchmarks/step.py --models cnn --ratios 1 0.5 --steps 50

The cases: `narrow`, a plain module with fewer channels, trained with torch.optim.SGD; `ours`, the whole FedLPS step
(task loss, importance update, both regularisers, look at the pattern); `wrapper`, a LearnableMask with torch.optim.SGD;
`dense`, the whole network. `remask_over_narrow` is the time to change the pattern by one unit in a hundred (at least one) of
every group, in steps of the narrow network.

    python benchmarks/step.py --training --ratios 0.25

times whole trainings of a LearnableMask as it comes, `explored`, of the same with `explore=0`, `fixed`, and of the narrow
network, in turns of ten steps, in CPU seconds; a perceptron and a small transformer are among the models. The mask may
settle, and then costs what a fixed one does: `share_explored` says what exploration came to in FLOPs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from nets import VisionTransformer
from torch import Tensor, nn

from sparsekit import GradientImportance, LearnableMask, UnitGraph, UnitMask, compact, trace_units
from sparsekit.allocation.shares import keep_count
from sparsekit_fl.client.loop import Batch
from sparsekit_fl.client.optimizer import make_step
from sparsekit_fl.options.config import TrainingConfig
from sparsekit_fl.policies.learnable import learning, pull_to_received
from sparsekit_fl.policies.local import local_step, trained_leaves
from sparsekit_fl.problem.models.cnn import Cnn
from sparsekit_fl.problem.models.lstm import NextWordLstm
from sparsekit_fl.problem.models.vgg import Vgg

LR = 1e-3


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Over classes in the last axis."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def vgg11() -> tuple[nn.Module, Tensor, Tensor]:
    """VGG11 on CIFAR shapes, batch 20."""
    return Vgg(11, classes=10), torch.randn(20, 3, 32, 32), torch.randint(0, 10, (20,))


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """The MNIST network, batch 20."""
    return Cnn(), torch.randn(20, 1, 28, 28), torch.randint(0, 10, (20,))


def lstm() -> tuple[nn.Module, Tensor, Tensor]:
    """The two-layer LSTM, batch 20 of nine tokens."""
    return NextWordLstm(), torch.randint(0, 10_000, (20, 9)), torch.randint(0, 10_000, (20, 9))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """Two hidden layers of 256 on MNIST shapes, batch 64."""
    layers = (nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(*layers), torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """Two layers of width 128 with four heads, on images of 64 pixels, batch 20."""
    return VisionTransformer(128, 2, 4, classes=10), torch.randn(20, 3, 64, 64), torch.randint(0, 10, (20,))


MODELS = {"vgg11": vgg11, "cnn": cnn, "lstm": lstm, "mlp": mlp, "transformer": transformer}


def plain_step(
    call: Callable[[Tensor], Tensor], parameters: Iterator[nn.Parameter], x: Tensor, y: Tensor
) -> Callable[[], None]:
    """One step as everybody writes it."""
    optimizer = torch.optim.SGD(parameters, lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(call(x), y).backward()
        optimizer.step()

    return step


def our_step(
    model: nn.Module, graph: UnitGraph, ratio: float, x: Tensor, y: Tensor
) -> tuple[Callable[[], None], LearnableMask]:
    """One step of FedLPS on its learnable mask."""
    # The pattern is looked at in every step but must not change here: changes are timed on their own.
    masked = LearnableMask(model, graph=graph, learning=GradientImportance(explore=0.0, lr=0.0))
    masked.load(model.state_dict(), ratio=ratio, importance=torch.rand(graph.units))
    training, leaves = TrainingConfig(lr=LR), trained_leaves(masked)
    entries = sum(p.numel() for p in model.parameters())
    adjusts = [learning(masked), pull_to_received(masked, leaves, model.state_dict(), 2.0 / entries, training)]
    one = local_step(masked, cross_entropy, make_step(training, leaves.values()), adjusts)
    batch = Batch((x,), y, len(x))
    masked.train()
    return lambda: one(batch) and None, masked


def shifted(graph: UnitGraph, mask: UnitMask, generator: torch.Generator) -> UnitMask:
    """Another mask of the same counts that differs by one unit in a hundred of every group, at least one."""
    entries = {}
    for name, keep in mask.items():
        changed = keep.clone()
        kept, dropped = keep.nonzero().flatten(), (~keep).nonzero().flatten()
        count = min(keep_count(0.01, graph.groups[name].size), len(kept), len(dropped))
        changed[kept[torch.randperm(len(kept), generator=generator)[:count]]] = False
        changed[dropped[torch.randperm(len(dropped), generator=generator)[:count]]] = True
        entries[name] = changed
    return UnitMask(entries)


def timed(step: Callable[[], Any]) -> float:
    """Processor seconds of one call: those of a busy machine's other work are not in them."""
    began = time.process_time()
    step()
    return time.process_time() - began


def measure(name: str, ratio: float, steps: int, warmup: int) -> dict[str, Any]:
    """All cases of one model at one ratio."""
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    graph = trace_units(model, x[:2])
    ours, masked = our_step(model, graph, ratio, x, y)
    _, changing = our_step(model, graph, ratio, x, y)
    mask = masked.unit_mask()
    narrow = compact(model, graph, mask)
    wrapper = LearnableMask(model, graph=graph, ratio=ratio)
    cases = {
        "narrow": plain_step(narrow, narrow.parameters(), x, y),
        "ours": ours,
        "wrapper": plain_step(wrapper, wrapper.parameters(), x, y),
        "dense": plain_step(model, model.parameters(), x, y),
    }
    times: dict[str, list[float]] = {case: [] for case in cases}
    remasks: list[float] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(warmup + steps):
        for case, run in cases.items():
            times[case].append(timed(run))
        if ratio < 1:
            other = shifted(graph, changing.unit_mask(), generator)
            remasks.append(timed(lambda other=other: changing.change(other)))  # type: ignore[misc]
        if step == warmup - 1:
            times = {case: [] for case in cases}
            remasks = []
    result: dict[str, Any] = {"model": name, "ratio": ratio}
    for case in ("ours", "wrapper", "dense"):
        ratios = [a / b for a, b in zip(times[case], times["narrow"], strict=True)]
        result[f"{case}_over_narrow"] = round(statistics.median(ratios), 3)
    if remasks:
        result["remask_over_narrow"] = round(statistics.median(remasks) / statistics.median(times["narrow"]), 3)
    result["narrow_milliseconds"] = round(1e3 * statistics.median(times["narrow"]), 3)
    return result


def measure_training(name: str, ratio: float, steps: int) -> dict[str, Any]:
    """Whole trainings, exploration and swaps included, batch after batch of other noise."""
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    explored = LearnableMask(model, (x[:2],), ratio=ratio)
    fixed = LearnableMask(model, (x[:2],), ratio=ratio, explore=0.0)
    narrow = compact(model, fixed.graph, fixed.unit_mask())
    cases = {case: plain_step(net, net.parameters(), x, y)
             for case, net in (("explored", explored), ("fixed", fixed), ("narrow", narrow))}  # fmt: skip
    seconds = {case: [] for case in cases}
    for turn in range(-(-steps // 10)):
        if x.is_floating_point():
            x.normal_()
        for case in sorted(cases, key=lambda case: (turn, case), reverse=turn % 2 == 1):
            began = time.process_time()
            for _ in range(10):
                cases[case]()
            seconds[case].append(time.process_time() - began)
    total = {case: sum(turns[1:]) for case, turns in seconds.items()}  # the first turn warms up
    return {"model": name, "ratio": ratio, "steps": steps, "explored_over_fixed": round(total["explored"] / total["fixed"], 3),
            "fixed_over_narrow": round(total["fixed"] / total["narrow"], 3), "share_explored": round(explored.explored, 3),
            "settled": explored.settled}  # fmt: skip


def main() -> None:
    """Read the options and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["vgg11", "cnn", "lstm"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[1.0, 0.5, 0.25, 0.125, 0.0625])
    parser.add_argument("--steps", type=int, default=30, help="counted steps per case (default 30)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before counting (default 5)")
    parser.add_argument(
        "--training", action="store_true", help="whole trainings of --steps steps, with and without exploration"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.training:
        for name in options.models:
            for ratio in options.ratios:
                print(json.dumps(measure_training(name, ratio, options.steps)), flush=True)
        return
    header = ("model", "ratio", "ours", "wrapper", "dense", "remask", "narrow ms")
    if not options.json:
        print("{:>7} {:>7} {:>7} {:>8} {:>7} {:>7} {:>10}".format(*header))
    for name in options.models:
        for ratio in options.ratios:
            row = measure(name, ratio, options.steps, options.warmup)
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            print(
                f"{name:>7} {ratio:>7g} {row['ours_over_narrow']:>7.2f} {row['wrapper_over_narrow']:>8.2f}"
                f" {row['dense_over_narrow']:>7.2f} {row.get('remask_over_narrow', float('nan')):>7.2f}"
                f" {row['narrow_milliseconds']:>10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
