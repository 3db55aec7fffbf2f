"""Time of one FedLPS step against a plain SGD step of a natively narrow network of the same size.

All cases run in turns in one process, on one thread. Results are medians of ratios within a turn, after a warm-up:

    python benchmarks/step.py                        a table
    python benchmarks/step.py --json                 one line per case, for machines
    python benchmarks/step.py --models cnn --ratios 1 0.5 --steps 50

The cases: `narrow`, a plain module with fewer channels, trained with torch.optim.SGD; `ours`, the whole FedLPS step
(task loss, importance update, both regularizers, mask update); `wrapper`, a LearnableMask with torch.optim.SGD; `dense`, the
whole network. `remask_over_narrow` is the time of a mask change by one unit in a hundred (at least one) of every group,
relative to a step of the narrow network.
"""

import statistics
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import torch
import torch.nn.functional as F
from common import in_turns, options_of, over, processor_seconds, show
from nets import VisionTransformer
from torch import Tensor, nn

from sparsekit import GradientImportance, LearnableMask, UnitGraph, UnitMask, compact, trace_units
from sparsekit.allocation.shares import keep_count
from sparsekit_fl.client.fit import Batch, make_step
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.methods.client import local_step, pull_towards, trained_leaves
from sparsekit_fl.problem.models import Cnn, NextWordLstm, Vgg

LR = 1e-3


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def pictures(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: (torch.randn(count, *shape), torch.randint(0, 10, (count,)))


def tokens(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 10_000, (count, 9)), torch.randint(0, 10_000, (count, 9))


def mlp() -> nn.Module:
    layers = (nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int]] = {
    "vgg11": (lambda: Vgg(11, classes=10), pictures(3, 32, 32), 20),
    "cnn": (Cnn, pictures(1, 28, 28), 20),
    "lstm": (NextWordLstm, tokens, 20),
    "mlp": (mlp, pictures(1, 28, 28), 64),
    "transformer": (lambda: VisionTransformer(128, 2, 4, classes=10), pictures(3, 64, 64), 20),
}
"""Name → factory of the model, function from a number of examples to inputs and targets, and batch size."""


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    make, data, batch = MODELS[name]
    return make(), *data(batch)


def plain_step(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()

    return step


def our_step(
    model: nn.Module, graph: UnitGraph, ratio: float, x: Tensor, y: Tensor
) -> tuple[Callable[[], None], LearnableMask]:
    """Return a function that takes one step of FedLPS, and the learnable mask that it trains."""
    # With lr=0, the mask is updated at every step but does not change, since changes are timed separately.
    masked = LearnableMask(model, graph=graph, learning=GradientImportance(lr=0.0))
    masked.load(model.state_dict(), ratio=ratio, importance=torch.rand(graph.units))
    training, leaves = TrainingConfig(lr=LR), trained_leaves(masked)
    entries = sum(p.numel() for p in model.parameters())

    def learn(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        masked.update_importance(gradients)
        return gradients

    adjusts = [learn, pull_towards(masked, leaves, model.state_dict(), 2.0 / entries, training=training)]

    def forward(batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = masked.model(*batch.inputs)
        return outputs, cross_entropy(outputs, batch.targets)

    one = local_step(masked, forward, make_step(training, leaves.values()), adjusts)
    batch = Batch((x,), y, len(x))
    masked.train()
    return lambda: one(batch) and None, masked


def shifted(graph: UnitGraph, mask: UnitMask, generator: torch.Generator) -> UnitMask:
    """Return a mask with the same counts that differs by one unit in a hundred of every group, at least one."""
    entries = {}
    for name, keep in mask.items():
        changed = keep.clone()
        kept, dropped = keep.nonzero().flatten(), (~keep).nonzero().flatten()
        count = min(keep_count(0.01, graph.groups[name].size), len(kept), len(dropped))
        changed[kept[torch.randperm(len(kept), generator=generator)[:count]]] = False
        changed[dropped[torch.randperm(len(dropped), generator=generator)[:count]]] = True
        entries[name] = changed
    return UnitMask(entries)


def measure(name: str, ratio: float, steps: int, warmup: int) -> dict[str, Any]:
    model, x, y = build(name)
    graph = trace_units(model, x[:2])
    ours, masked = our_step(model, graph, ratio, x, y)
    _, changing = our_step(model, graph, ratio, x, y)
    mask = masked.unit_mask()
    wrapper = LearnableMask(model, graph=graph, ratio=ratio)
    plain = {"narrow": compact(model, graph, mask), "wrapper": wrapper, "dense": model}
    cases = {"ours": ours, **{case: plain_step(each, x, y) for case, each in plain.items()}}
    times = in_turns(cases, steps, warm=warmup, seconds=second_call)
    if ratio < 1:
        standing = changing.unit_mask()
        others = cycle([shifted(graph, standing, torch.Generator().manual_seed(1)), standing])
        times["remask"] = in_turns({"remask": lambda: changing.vectors.set_mask(next(others))}, steps, warm=warmup)["remask"]
    result: dict[str, Any] = {"model": name, "ratio": ratio}
    for case in ("ours", "wrapper", "dense", "remask"):
        result[f"{case}_over_narrow"] = round(over(times, case, "narrow")[1], 3) if case in times else None
    return result | {"narrow_milliseconds": round(1e3 * statistics.median(times["narrow"]), 3)}


def second_call(call: Callable[[], Any]) -> float:
    """Return the processor seconds of a step right after another step of the same case, so that caches are warm."""
    call()
    return processor_seconds(call)


def main() -> None:
    options = options_of(
        __doc__, choices={"models": MODELS}, models=["vgg11", "cnn", "lstm"], ratios=[1.0, 0.5, 0.25, 0.125, 0.0625], steps=30,
        warmup=5, json=False,
    )  # fmt: skip
    cells = product(options.models, options.ratios)
    show((measure(name, ratio, options.steps, options.warmup) for name, ratio in cells), options.json)


if __name__ == "__main__":
    main()
