"""Does a learned mask beat a fixed one at equal training FLOPs? Clients adapt a trained network, with many arms.

    python benchmarks/learning.py pretrain --out learning    the network: hours on one core, a minute on cuda
    python benchmarks/learning.py run --out learning --shares 0.016 --budgets 15 --seeds 0 1 2
    python benchmarks/learning.py table --out learning
    python benchmarks/learning.py candidates --out learning    are candidates of `prune` better judged after a short training?

A budget is a number of dense training steps of 64 images, which an arm may divide as it likes. All passes count: a training
step as three forward passes, Fisher scores as two, refits and recalibration as one. All arms see the same examples in the same
order. Cells in OUT/learning.jsonl are not run again. Choices were made on `val`.
"""

import argparse
import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import add, options_of, read, show
from learning_nets import Data, Task, tasks
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import Schedule, allocate, by_cost, ratio_counts, uniform
from sparsekit.criteria import Fisher, ScoringContext
from sparsekit.pruning.settings import CANDIDATES

WIDE = partial(by_cost, scale="none", width_penalty=2.0)  # widths for networks that train further
Scores = dict[str, Tensor]


@dataclass
class Run:
    """One arm on one client, with the cost that it has spent, and the source of its examples."""

    task: Task
    share: float
    budget: float
    seed: int
    lr: float
    spent: float = 0.0
    """Cost until now, in dense training steps of 64 images."""
    steps: int = 0
    flops: float = 0.0
    """Forward FLOPs of an example through the model in training."""
    calibration: list[Data] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        x, y = self.task.train
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
        chosen = order[: self.task.calibration].to(x.device)
        self.calibration = list(zip(x[chosen].split(32), y[chosen].split(32)))
        self.masked = self.task.masked
        self.limit, self.flops = sk.Budget(flops=self.share * self.dense()), self.dense()

    def dense(self) -> float:
        return self.task.costs.dense_costs()["flops"]

    def pay(self, images: float, passes: float, flops: float | None = None) -> None:
        """Add the cost of forward passes of some images, at `flops` per image and pass; None: those of the dense model."""
        self.spent += images * passes / 3 / 64 * (1.0 if flops is None else flops / self.dense())

    def batches(self) -> Iterator[Data]:
        x, y = self.task.train
        while True:
            chosen = torch.randint(len(x), (self.task.batch,), generator=self.generator).to(x.device)
            flipped = (torch.rand(self.task.batch, generator=self.generator) < 0.5).to(x.device)
            images = x[chosen]
            yield torch.where(flipped[:, None, None, None], images.flip(3), images), y[chosen]

    def fisher(self) -> Scores:
        self.pay(self.calibrating, 2)
        return Fisher(self.calibration, F.cross_entropy).scores(self.task.graph, ScoringContext(model=self.task.model))

    @property
    def calibrating(self) -> int:
        return sum(len(y) for _, y in self.calibration)

    def mask(self, scores: Scores, rule: Any = WIDE, order: Scores | None = None) -> sk.UnitMask:
        """Return the mask with `share` of the FLOPs: widths by `scores`, and the best units by `order` (None: `scores`)."""
        counts = allocate(rule, self.task.graph, scores, self.task.costs, budget=self.limit)
        return sk.mask_from_scores(self.task.graph, order or scores, counts)

    def fixed(self, mask: sk.UnitMask, *, refit: bool = True) -> nn.Module:
        """Refit the dense network under a mask, and train until the budget is spent."""
        self.masked.load(self.task.model.state_dict(), mask=mask)
        if refit:
            sk.reconstruct(self.task.model, self.masked.model, self.task.graph, mask, self.calibration)
            self.pay(self.calibrating, 1)
        return self.train()

    def learned(self, until: float, cuts: int, *, half_life: float = 20.0, first: Scores | None = None) -> nn.Module:
        """Narrow the dense network during training; `first` is the initial importance."""
        shares = [self.share ** (at / cuts) for at in range(cuts + 1)]
        left = self.budget - self.spent - sum(self.calibrating / 3 / 64 * share for share in shares[:-1])
        wide = [until / cuts / share for share in shares[:-1]]
        steps = left * (sum(wide) + (1 - until) / shares[-1]) * 64 / self.task.batch
        rule = sk.LearnedNarrowing(steps=int(steps), until=until, cuts=cuts, half_life=half_life, least_steps=1)
        given = None if first is None else torch.cat([first[name].float() for name in self.task.graph.groups])
        self.masked.budget = self.limit
        self.masked.load(self.task.model.state_dict(), learning=rule, importance=given, batches=self.calibration)
        return self.train()

    def train(self, end: float = math.inf, model: nn.Module | None = None) -> nn.Module:
        """Train the mask, or a plain model of its widths, until `end` or until the budget is spent."""
        module = self.masked if model is None else model
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr, momentum=0.9, nesterov=True)
        self.task.mode(module)
        for x, y in self.batches():
            mask = self.masked.unit_mask()
            if model is None:
                self.flops = float(self.task.costs.forward_flops(mask))
            if self.spent + len(x) / 64 * self.flops / self.dense() > min(end, self.budget):
                return module
            self.pay(len(x), 3, self.flops)
            for group in optimizer.param_groups:
                group["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * self.spent / self.budget))
            loss = F.cross_entropy(module(x.contiguous(memory_format=torch.channels_last)), y)
            optimizer.zero_grad()
            loss.backward()
            if self.task.clip:
                nn.utils.clip_grad_norm_(module.parameters(), self.task.clip)
            optimizer.step()
            self.steps += 1
            if model is None and self.masked.unit_mask() is not mask:
                self.pay(self.calibrating, 1, self.flops)  # cost of a refit
        raise AssertionError("batches do not end")


def _random(run: Run) -> Scores:
    generator = torch.Generator().manual_seed(1000 + run.seed)
    return {name: torch.rand(group.size, generator=generator) for name, group in run.task.graph.groups.items()}


def _iterative(run: Run) -> nn.Module:
    """Prune in three steps by Fisher scores, with half of the training between the steps."""

    def between(small: nn.Module, step: int) -> nn.Module:
        run.pay(run.calibrating, 3, run.flops)  # scores and a refit, at the previous widths
        run.flops = float(sk.count_cost(small, run.task.example).flops)
        return run.train(run.budget * (step / 6 if step < 3 else 1.0), small)

    options: dict[str, Any] = {"batches": run.calibration, "loss": F.cross_entropy, "criterion": "fisher", "multiple_of": 1}
    options |= {"allocation": WIDE, "reconstruct": "layers", "graph": run.task.graph, "budget": run.limit}
    return sk.prune(run.task.model, run.task.example, schedule=Schedule("linear", 3), finetune=between, **options).model


def _scratch(run: Run) -> nn.Module:
    """Train the widths of the best fixed mask from random weights. The cost of its scores does not count."""
    mask = run.mask(run.fisher())
    run.spent = 0.0
    run.masked.load(run.task.model.state_dict(), mask=mask)
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        for module in run.masked.model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
                module.reset_parameters()
    return run.train()


def _paper(run: Run) -> nn.Module:
    """Learn the mask by the rule of the FedLPS paper, from the largest weights, at equal widths that meet the share."""
    graph, costs, most = run.task.graph, run.task.costs, run.share * run.dense()
    fitting = (r / 1000 for r in range(1000, 0, -1) if costs.costs(ratio_counts(graph, r / 1000))["flops"] <= most)
    ratio = next(fitting, 0.001)
    rule = sk.GradientImportance(target="absolute", lr=run.lr, refresh_every=1)
    run.masked.budget = None
    run.masked.load(run.task.model.state_dict(), ratio=ratio, learning=rule)
    return run.train()


def _transplant(run: Run) -> nn.Module:
    """Train with the mask that "L4 .7" learned, fixed from the start. The cost of learning it does not count."""
    donor = Run(run.task, run.share, run.budget, run.seed, run.lr)
    donor.learned(0.7, 4)
    return run.fixed(donor.masked.unit_mask())


ARMS: dict[str, Callable[[Run], nn.Module]] = {
    "fixed n2": lambda run: run.fixed(run.mask(run.fisher())),
    "L4 .7": lambda run: run.learned(0.7, 4),
    "O4 .7": lambda run: run.learned(0.7, 4, half_life=1e9, first=run.fisher()),
    "fixed": lambda run: run.fixed(run.mask(run.fisher(), by_cost)),
    "fixed uniform": lambda run: run.fixed(run.mask(run.fisher(), uniform)),
    "transplant": _transplant,
    "random": lambda run: run.fixed(run.mask(run.fisher(), order=_random(run))),
    "scratch": _scratch,
    "paper": _paper,
    "iterative": _iterative,
    "L3 .5": lambda run: run.learned(0.5, 3),  # the default
    "L4 .7 from Fisher": lambda run: run.learned(0.7, 4, first=run.fisher()),
}


def accuracy(model: nn.Module, data: Data) -> float:
    model.eval()
    with torch.no_grad():
        parts = zip(data[0].split(250), data[1].split(250))
        right = sum(int((model(x.contiguous(memory_format=torch.channels_last)).argmax(1) == y).sum()) for x, y in parts)
    return 100 * right / len(data[1])


def run_cells(out: Path, options: argparse.Namespace) -> None:
    path = out / "learning.jsonl"
    done = {tuple(row[key] for key in ("task", "seed", "share", "budget", "arm", "lr")) for row in read(path)}
    for seed, name in itertools.product(options.seeds, options.tasks):
        task: Task | None = None
        for share, budget, arm in itertools.product(options.shares, options.budgets, options.arms):
            if (name, seed, share, budget, arm, options.lr) in done:
                continue
            task = task or tasks(name, seed, out, options.device)
            run = Run(task, share, budget, seed, options.lr)
            model = copy.deepcopy(task.model) if arm == "dense" else ARMS[arm](run)
            row = {"network": task.network, "task": name, "seed": seed, "share": share, "budget": budget}
            row |= {"arm": arm, "lr": options.lr}
            row |= {"val": accuracy(model, task.val), "test": accuracy(model, task.test)}
            row |= {"spent": run.spent, "steps": run.steps, "units": list(run.masked.unit_mask().counts().values())}
            add(path, row)


def table(out: Path, against: str = "fixed n2") -> None:
    """Print the mean of each arm, and the mean paired difference ± standard error, by network, share and budget."""
    rows = read(out / "learning.jsonl")
    cells = {(row["network"], row["share"], row["budget"]): list[dict[str, Any]]() for row in rows}
    for row in rows:
        cells[row["network"], row["share"], row["budget"]].append(row)
    for (network, share, budget), here in sorted(cells.items()):
        print(f"\n{network}: {share:.1%} of the FLOPs, {budget:g} dense steps\n")
        base = {(row["task"], row["seed"]): row for row in here if row["arm"] == against}
        lines = []
        for arm in dict.fromkeys(row["arm"] for row in here):
            own = [row for row in here if row["arm"] == arm]
            apart = [row["test"] - base[row["task"], row["seed"]]["test"] for row in own if (row["task"], row["seed"]) in base]
            error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
            val, test = (f"{statistics.mean(row[part] for row in own):.1f}" for part in ("val", "test"))
            told = f"{statistics.mean(apart):+.1f} ± {error:.1f}" if len(apart) > 1 else ""
            lines.append({"arm": arm, "n": len(own), "validation": val, "test": test, "difference on test": told})
        show(lines, as_json=False)


def candidates(out: Path, seeds: list[int], steps: int = 200) -> None:
    """Prune with each candidate of `prune`; score right after pruning, after 20 steps, and after all steps on other images."""
    from learning_nets import cifar10

    (x, y), _ = cifar10()
    task = tasks("turned", 0, out)

    def judged(model: nn.Module, images: slice) -> tuple[float, float]:
        model.eval()
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in x[images].split(250)])
        return float(F.cross_entropy(outputs, y[images])), 100 * float((outputs.argmax(1) == y[images]).float().mean())

    for seed, share, (criterion, allocation) in itertools.product(seeds, (0.5, 0.25, 0.1), CANDIDATES):
        drawn = torch.randperm(40_000, generator=torch.Generator().manual_seed(seed))[:256].split(32)
        options: dict[str, Any] = {"batches": [(x[part], y[part]) for part in drawn], "loss": F.cross_entropy}
        options |= {"criterion": criterion, "allocation": allocation, "reconstruct": "layers", "graph": task.graph}
        model = sk.prune(task.model, task.example, budget=f"flops={share:.0%}", **options).model
        row: dict[str, Any] = {"seed": seed, "share": share, "candidate": f"{criterion} {allocation}"}
        row["cut"] = judged(model, slice(40_000, 40_512))
        generator, optimizer = torch.Generator().manual_seed(seed), torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        for step in range(steps):
            model.train()
            part = torch.randint(0, 40_000, (64,), generator=generator)
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
            if step == 19:
                row["after 20"] = judged(model, slice(40_000, 40_512))
        add(out / "candidates.jsonl", row | {"after all": judged(model, slice(47_000, None))})


def main() -> None:
    options = options_of(
        __doc__, "command", choices={"command": ["pretrain", "run", "table", "candidates"], "arms": ARMS}, out=Path("learning"),
        tasks=["cat dog", "car ship truck", "bird deer frog", "turned"], seeds=[0, 1, 2], shares=[0.016, 0.06], budgets=[15.0],
        arms=list(ARMS), lr=0.05, epochs=90, device="cpu",
    )  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    if options.command == "pretrain":
        from learning_nets import pretrain

        pretrain(options.out, options.epochs, options.device)
    elif options.command == "run":
        run_cells(options.out, options)
    elif options.command == "candidates":
        candidates(options.out, options.seeds)
    else:
        table(options.out)


if __name__ == "__main__":
    main()
