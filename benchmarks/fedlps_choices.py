"""FedLPS with one choice changed at a time, on images that no client trains on and that are no test images.

Half of a data set's training images is dealt to the clients; the other half scores them. So choices can be compared without a
look at the test set. Each line that is printed is also added to FILE; arms that are there already are not run again.

    python benchmarks/fedlps_choices.py mnist --rounds 100 --seeds 10 --out choices.jsonl fedlps means classes fedlps-own
    python benchmarks/fedlps_choices.py cifar10 --model vgg11-quarter --rounds 10 --out choices.jsonl half classes-half

`SPARSEKIT_DATA` is the folder of the data sets. An arm of MNIST takes one to three minutes on one free core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.graph.state import StateDict
from sparsekit.training.loss_importance import LossImportance
from sparsekit_fl.context.client import ClientContext
from sparsekit_fl.context.server import ServerContext
from sparsekit_fl.datasets import datasets
from sparsekit_fl.datasets.base import DataSource
from sparsekit_fl.experiment.build import build_problem
from sparsekit_fl.methods.fedlps import fedlps, fedlps_own
from sparsekit_fl.methods.method import Method
from sparsekit_fl.paper.ablations import fedlps_magnitude, fedlps_ordered, fedlps_random
from sparsekit_fl.paper.presets import preset_for
from sparsekit_fl.policies.aggregate import CoverageMean
from sparsekit_fl.policies.bandit import BanditRatio
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.own_classes import OwnClasses
from sparsekit_fl.policies.personal import LocalModel, PersonalModel
from sparsekit_fl.policies.ratio import ByCapability
from sparsekit_fl.policies.share import PrivateHead
from sparsekit_fl.policies.touched_rows import TouchedRowsMean
from sparsekit_fl.server.loop import run
from sparsekit_fl.wire.kept import Kept

__all__ = ["ARMS", "OPTIONS", "AtMost", "cifar10", "mnist", "narrow", "vgg11_quarter"]


def _held_out(name: str) -> DataSource:
    source: DataSource = datasets[name](Path(os.environ["SPARSEKIT_DATA"]) if "SPARSEKIT_DATA" in os.environ else None)
    order = torch.randperm(len(source.train), generator=torch.Generator().manual_seed(12345))
    half = len(order) // 2
    return replace(
        source, train=source.train.take(order[:half].sort().values), test=source.train.take(order[half:].sort().values)
    )


def mnist() -> DataSource:
    """Return MNIST's training images as a data set of their own."""
    return _held_out("mnist")


def cifar10() -> DataSource:
    """Return CIFAR-10's training images as a data set of their own."""
    return _held_out("cifar10")


class _Narrow(nn.Module):
    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (16, 0, 32, 0, 64, 64, 0, 128, 128, 0, 128, 128, 0):
            if width:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """float (N, 3, 32, 32) → logits (N, classes)."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def vgg11_quarter(classes: int = 10, channels: int = 3) -> nn.Module:
    """VGG11 with a quarter of the channels: a sixteenth of the work."""
    return _Narrow(classes, channels)


@dataclass(frozen=True)
class AtMost(ByCapability):
    """The client's capability, cut at a ratio.

    Args:
        high: Largest ratio.
    """

    high: float = 1.0

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        """Return the capability, at most `high`."""
        return min(self.high, ctx.roster[client_id].capability.ratio)

    def choose(self, ctx: ClientContext, proposal: float | None) -> float:
        """Return the capability, at most `high`."""
        del proposal
        return min(self.high, ctx.capability.ratio)


def _means() -> Method:
    return replace(fedlps(), ratio=AtMost(high=0.4), aggregate=CoverageMean("examples"))


def narrow() -> Method:
    """`fedlps_own` with all arms up to 0.4, and what that saves spent on seven epochs instead of five."""
    method = replace(fedlps_own(), name="narrow", ratio=BanditRatio(high=0.4))
    assert isinstance(method.local, LearnableSgd)
    return replace(method, local=replace(method.local, passes=1.4))


def _own_local(**options: Any) -> Method:
    """`fedlps_own` with other options of its local policy."""
    method = fedlps_own()
    assert isinstance(method.local, LearnableSgd)
    return replace(method, local=replace(method.local, **options))


def _by_cost_six() -> Method:
    """Widths by what units cost, six local epochs, and arms up to .37, so that the work stays below .4e12."""
    return replace(_own_local(allocation="by_cost", passes=1.2), ratio=BanditRatio(low=0.25, high=0.37))


@dataclass(frozen=True)
class Blend(LocalModel):
    """The kept model, part of the way back to the global model of the end.

    Args:
        share: Part of the kept model.
    """

    share: float = 0.5

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        """Return the mean of both, in the shapes of the kept model."""
        kept = super().model(ctx, state)
        if not kept.narrow:
            return kept
        part = Kept(ctx.graph, kept.mask)
        start = OwnClasses().enter(ctx, state)
        mean = {name: torch.lerp(part.gather(name, start[name]), own, self.share) for name, own in kept.state.items()}
        return replace(kept, state=mean)


ARMS: dict[str, Callable[[], Method]] = {
    "fedlps": fedlps,
    "half": lambda: replace(fedlps(), ratio=AtMost(high=0.5)),
    "means": _means,
    "classes": lambda: replace(_means(), share=OwnClasses(), aggregate=TouchedRowsMean()),
    "classes-loss": lambda: replace(_means(), share=OwnClasses(), aggregate=TouchedRowsMean(), personal=LocalModel("loss")),
    "classes-half": lambda: replace(fedlps(), ratio=AtMost(high=0.5), share=OwnClasses(), aggregate=TouchedRowsMean()),
    "fedlps-own": fedlps_own,
    "narrow": narrow,
    "own-depth3": lambda: replace(fedlps_own(), share=OwnClasses(depth=3.0)),
    "own-low3": lambda: replace(fedlps_own(), ratio=BanditRatio(low=0.3, high=0.4)),
    "own-passes": lambda: _own_local(passes=1.2),
    "own-momentum": fedlps_own,
    "own-cosine": fedlps_own,
    "own-head": lambda: replace(fedlps_own(), share=PrivateHead(), aggregate=CoverageMean("examples")),
    "own-half-step": fedlps_own,
    "own-decay": fedlps_own,
    "own-rate-half": fedlps_own,
    "own-rate-double": fedlps_own,
    "own-blend": lambda: replace(fedlps_own(), personal=Blend("loss")),
    "own-blend8": lambda: replace(fedlps_own(), personal=Blend("loss", 0.8)),
    "own-loss": lambda: _own_local(learning=LossImportance(explore=0.2, samples=3, rounds=6)),
    "own-by-cost": lambda: _own_local(allocation="by_cost"),
    "own-by-cost-low3": lambda: replace(_own_local(allocation="by_cost"), ratio=BanditRatio(low=0.3, high=0.4)),
    "own-by-cost-six": _by_cost_six,
    "own-by-cost-six-decay": _by_cost_six,
    "own-by-cost-six-momentum": _by_cost_six,
    "own-by-cost-seven": lambda: replace(_own_local(allocation="by_cost", passes=1.4), ratio=BanditRatio(low=0.25, high=0.28)),
    "own-global": lambda: _own_local(allocation="global"),
    "own-isomorphic": lambda: _own_local(allocation="isomorphic"),
    "own-ordered": lambda: fedlps_ordered(whole="fedlps-own"),
    "own-magnitude": lambda: fedlps_magnitude(whole="fedlps-own"),
    "own-random": lambda: fedlps_random(whole="fedlps-own"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "own-momentum": {"server_optimizer": "fedavgm", "server_momentum": 0.5},
    "own-half-step": {"server_optimizer": "fedavgm", "server_momentum": 0.0, "server_lr": 0.5},
    "own-by-cost-six-decay": {"weight_decay": 1e-3},
    "own-by-cost-six-momentum": {"server_optimizer": "fedavgm", "server_momentum": 0.5},
    "own-decay": {"weight_decay": 1e-3},
    "own-rate-half": {"lr": 0.05},
    "own-rate-double": {"lr": 0.2},
    "own-cosine": {"lr_schedule": "cosine", "lr_end": 0.1},
}
"""Options of the run that an arm changes."""


def main() -> None:
    """Run arms and print their scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=["mnist", "cifar10"])
    parser.add_argument("arms", nargs="+", choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10])
    parser.add_argument("--model", choices=["vgg11-quarter"])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    preset = replace(preset_for(preset=given.dataset), dataset=f"fedlps_choices:{given.dataset}")
    for seed in given.seeds:
        problem, clients = build_problem(preset, seed=seed, model="fedlps_choices:vgg11_quarter" if given.model else None)
        for arm in given.arms:
            cell = {"dataset": given.dataset, "model": given.model, "rounds": given.rounds, "seed": seed, "arm": arm}
            if any(cell.items() <= row.items() for row in done):
                continue
            options = {"rounds": given.rounds, "seed": seed, "eval_every": given.rounds, **OPTIONS.get(arm, {})}
            config = preset.config(options, len(clients))
            result = run(replace(ARMS[arm](), name=arm), problem, clients, config)
            scores = {
                "personal": round(result.final.personal["accuracy"], 5),
                "loss": round(result.final.personal["loss"], 4),
                "global": round(result.final.shared["accuracy"], 4),
                "flops_compact": result.cost.flops_compact_training,  # as in the rows of before, which count training alone
                "flops_scoring": result.cost.flops_scoring,
            }
            with given.out.open("a") as file:
                file.write(json.dumps(cell | scores) + "\n")
            print(json.dumps(cell | scores), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
