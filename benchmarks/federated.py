"""Federated learning on devices that differ: personal submodels against nested prefixes, whole networks and clients alone.

    python benchmarks/federated.py --out federated [--settings classes domain scratch] [--arms fedlps heterofl] [--seeds 0 1 2]

Ten clients with capabilities from 1 to 1/16 of the FLOPs, two of each, all of them in every round. The settings are fine-tuning
on clients of three classes, fine-tuning on grey, inverted images of five classes, each for two networks, and training from
scratch. Networks for fine-tuning are trained first, once. Settings that begin with the name of a preset run that experiment,
with capabilities as shares of FLOPs or of units. Every arm deploys the best of the models that a client trained, by its own
validation images. A run that was measured is not repeated: its row is in OUT/federated.jsonl. `--show` prints tables and draws
the picture.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import nets
import numpy as np
import torch
import torch.nn.functional as F
from common import ROOT, add, options_of, read, show, spread
from narrow_vgg import vgg11
from torch import Tensor, nn

import sparsekit_fl as fl
from sparsekit_fl.paper.build import build_problem
from sparsekit_fl.paper.presets import PRESETS
from sparsekit_fl.problem.images import cifar10

TRAINED_ON = 20_000  # images of CIFAR-10 that the network for fine-tuning was trained on; clients have the others
LEVELS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)


def network() -> nn.Module:
    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nets.resnet(stem, 32, (1, 1, 1), 32, 1, 10)


@cache
def images(data: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = cifar10(data)
    return source.train.inputs[0], source.train.targets, source.test.inputs[0], source.test.targets


def scaled(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.47) / 0.25


def grey(pixels: Tensor) -> Tensor:
    """The images of another domain: without colours, and inverted."""
    return -scaled(pixels).mean(1, keepdim=True).expand(-1, 3, -1, -1).contiguous()


def trained(build: Callable[[], nn.Module], out: Path, data: Path, *, epochs: int = 6, batch: int = 128) -> dict[str, Tensor]:
    path = out / f"{build.__name__}.pt"
    if not path.exists():
        torch.manual_seed(0)
        pixels, labels, others, truth = images(data)
        model, steps = build(), TRAINED_ON // batch
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.15, total_steps=epochs * steps)
        for _ in range(epochs):
            order = torch.randperm(TRAINED_ON)
            for places in order[: steps * batch].split(batch):
                x = scaled(pixels[places])
                x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
                optimizer.zero_grad()
                F.cross_entropy(model(x), labels[places]).backward()
                optimizer.step()
                schedule.step()
        model.eval()
        with torch.no_grad():
            right = [(model(scaled(x)).argmax(1) == y).float().mean() for x, y in zip(others.split(500), truth.split(500))]
        print(f"{build.__name__}: {float(torch.stack(right).mean()):.4f}", flush=True)
        torch.save(model.state_dict(), path)
    return torch.load(path)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Whose images a client has, how the network begins, and how it is trained.

    `classes` of a client; `train`, `validation` and `test` are images of each class.
    """

    classes: int
    train: int
    validation: int
    test: int
    rounds: int
    lr: float
    model: Callable[[], nn.Module] = network
    trained: bool = True
    seen: Callable[[Tensor], Tensor] = scaled


_DOMAIN = Setting(classes=5, train=20, validation=20, test=40, rounds=5, lr=0.01, seen=grey)
_CLASSES = Setting(classes=3, train=34, validation=34, test=66, rounds=5, lr=0.01)
SETTINGS: dict[str, Setting | fl.RunConfig] = {
    "domain": _DOMAIN,
    "classes": _CLASSES,
    "scratch": Setting(classes=3, train=50, validation=34, test=66, rounds=8, lr=0.05, model=vgg11, trained=False),
    "domain, VGG": replace(_DOMAIN, model=vgg11),
    "classes, VGG": replace(_CLASSES, model=vgg11),
}
for _preset in ("digits", "mnist"):
    for _share in ("flops", "units"):
        SETTINGS[f"{_preset}, {_share}"] = PRESETS[_preset].config(
            {"capability_of": _share, "deploy": "best"}, PRESETS[_preset].clients
        )
EPOCHS, CLIENTS = 2, 10


@dataclass(frozen=True, kw_only=True)
class Alone(fl.methods.fedlps):
    """FedLPS whose clients share nothing: what federation adds to a submodel."""

    def check(self, setup: fl.Setup) -> fl.Setup:
        return replace(super().check(setup), private=setup.graph.shapes)


fedlps, plain = fl.methods.fedlps, {"scaler": False, "clip": None}
# HeteroFL's scaler changes nothing before a batch norm, and its clipping would make its steps shorter than those of others.
ARMS: dict[str, fl.Method] = {
    "fedlps": fedlps(),
    "heterofl": fl.methods.heterofl(**plain),
    "fedrolex": fl.methods.fedrolex(**plain),
    "fjord": fl.methods.fjord(),
    "rcr": fl.methods.rcr_fix(),
    "no refit": fedlps(refit=False),
    "magnitude": fedlps(pattern="magnitude"),
    "random": fedlps(pattern="random"),
    "ordered": fedlps(pattern="ordered"),
    "magnitude, no refit": fedlps(pattern="magnitude", refit=False),
    "magnitude, shared head": fedlps(pattern="magnitude", head="shared"),
    "magnitude, mean of all": fedlps(pattern="magnitude", average="all"),
    "ratio = capability": fedlps(ratios="capability"),
    "half, not filled": fedlps(ratios="half", fill=False),
    "bandit": fedlps(ratios="bandit"),
    "random ratio": fedlps(ratios="random"),
    "rcr, redrawn": fl.methods.rcr_dyn(),
    "alone": Alone(),
    "local": fl.methods.local(),
    "fedavg": fl.methods.fedavg(),
    "fedper": fl.methods.fedper(),
}
SAME = {True: ("ratio = capability",), False: ("ordered", "no refit")}
"""Arms that are `fedlps` itself in settings with, and without, a trained network."""


def clients(setting: Setting, data: Path, seed: int) -> list[fl.Client]:
    pixels, labels, others, truth = images(data)
    rng = np.random.default_rng(seed)
    rows = {label: [*rng.permutation(np.flatnonzero(labels[TRAINED_ON:].numpy() == label) + TRAINED_ON)] for label in range(10)}
    tests = {label: rng.permutation(np.flatnonzero(truth.numpy() == label))[: setting.test] for label in range(10)}
    owned = np.concatenate([rng.permutation(10) for _ in range(CLIENTS * setting.classes // 10)]).reshape(CLIENTS, -1)
    while any(len({*own}) < setting.classes for own in owned):
        owned = rng.permuted(owned.reshape(-1)).reshape(CLIENTS, -1)
    levels = rng.permutation(np.repeat(LEVELS, CLIENTS // len(LEVELS)))
    found = []
    for id, own in enumerate(owned):
        splits: tuple[list[int], list[int]] = ([], [])
        for label in own:
            for split, count in zip(splits, (setting.train, setting.validation), strict=True):
                split += [rows[label].pop() for _ in range(count)]
        scored = np.concatenate([tests[label] for label in own])
        pools = [(pixels, labels, splits[0]), (pixels, labels, splits[1]), (others, truth, scored)]
        parts = [fl.TensorData((setting.seen(x[part]),), y[part]) for x, y, part in pools]
        found.append(fl.Client(id=id, data=fl.ClientData(*parts), capability=fl.Capability().at(float(levels[id]))))
    return found


def measure(name: str, arm: str, seed: int, out: Path, data: Path) -> dict[str, Any]:
    setting, init = SETTINGS[name], None
    if isinstance(setting, fl.RunConfig):
        problem, everyone = build_problem(PRESETS[name.split(",")[0]], data_dir=data, seed=seed)
        config = replace(setting, seed=seed, eval_every=setting.rounds)
    else:
        problem, everyone = (
            fl.Problem(model=setting.model, example_inputs=(torch.zeros(2, 3, 32, 32),)),
            clients(setting, data, seed),
        )
        training = fl.TrainingConfig(local_epochs=EPOCHS, batch_size=32, lr=setting.lr, momentum=0.9)
        config = fl.RunConfig(
            rounds=setting.rounds, cohort=CLIENTS, seed=seed, eval_every=setting.rounds, deploy="best", training=training
        )
        init = trained(setting.model, out, data) if setting.trained else None
    began = time.process_time()
    result = fl.run(ARMS[arm], problem, everyone, config, init=init)
    levels = {client.id: client.capability.ratio for client in everyone}
    scores = {level: [] for level in sorted({*levels.values()}, reverse=True)}  # type: dict[float, list[float]]
    for one in result.final.per_client:
        scores[levels[one.id]].append(one.personal["accuracy"])
    cost = result.cost
    return {
        "setting": name, "arm": arm, "seed": seed,
        "validation": result.final.validation["accuracy"], "test": result.final.personal["accuracy"],
        "by level": [statistics.mean(each) for each in scores.values()],
        "TFLOPs": cost.flops_training / 1e12, "scoring": cost.flops_scoring / 1e12, "seconds": cost.seconds,
        "processor": time.process_time() - began,
    }  # fmt: skip


def cell(rows: list[dict[str, Any]], name: str, arm: str) -> tuple[list[dict[str, Any]], list[float]]:
    """Rows of an arm in a setting, and its mean accuracy at each level of capability, in %."""
    own = [row for row in rows if (row["setting"], row["arm"]) == (name, arm)]
    return own, [100 * statistics.mean(each) for each in zip(*(row["by level"] for row in own), strict=True)]


def tables(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for name, arm in product(SETTINGS, ARMS):
        own, levels = cell(rows, name, arm)
        if own:
            best = {row["seed"]: row for row in cell(rows, name, "fedlps")[0]}
            gaps = [100 * (row["test"] - best[row["seed"]]["test"]) for row in own if row["seed"] in best]
            mean = {key: statistics.mean(row[key] for row in own) for key in ("TFLOPs", "scoring", "seconds")}
            lines.append(
                {
                    "setting": name, "arm": arm, "n": len(own), "accuracy": spread([100 * row["test"] for row in own]),
                    "against fedlps": spread(gaps), **{f"z = 1/{round(1 / z)}": f"{a:.0f}" for z, a in zip(LEVELS, levels)},
                    "TFLOPs": mean["TFLOPs"], "scoring": mean["scoring"], "simulated s": mean["seconds"],
                }
            )  # fmt: skip
    return lines


DRAWN = {"fedlps": "#00796b", "rcr": "#f9a825", "heterofl": "#e64a19", "fedper": "#5e35b1", "local": "#9e9e9e"}
_SHOWN = ("domain", "classes", "scratch")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "federated", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(3, len(_SHOWN), figsize=(10, 8), sharey="col", constrained_layout=True)
    for column, name in zip(axes.T, _SHOWN, strict=True):
        column[0].set_title(f"{name}: accuracy in %")
        for arm, color in DRAWN.items():
            own, levels = cell(rows, name, arm)
            if not own:
                continue
            accuracy = 100 * statistics.mean(row["test"] for row in own)
            work = statistics.mean(row["TFLOPs"] + row["scoring"] for row in own)
            column[0].plot(statistics.mean(row["seconds"] for row in own), accuracy, "o", color=color, label=arm)
            column[1].plot(work, accuracy, "o", color=color)
            column[2].plot(LEVELS, levels, "o-", color=color)
        for axis, label in zip(column, ("simulated seconds", "TFLOPs, scoring included", "capability"), strict=True):
            axis.set_xlabel(label)
        column[0].set_xlim(left=0)
        column[1].set_xlim(left=0)
        column[2].set_xscale("log", base=2)
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = options_of(
        __doc__, choices={"settings": SETTINGS, "arms": ARMS}, out=Path("federated"), data_dir=Path, settings=list(SETTINGS),
        arms=list(ARMS), seeds=[0, 1, 2], validation=False, show=False,
    )  # fmt: skip
    options.out.mkdir(exist_ok=True)
    path = options.out / "federated.jsonl"
    if options.show:
        show(tables(read(path)), False)
        draw(read(path), ROOT / "docs" / "pictures" / "federated.svg")
        return
    for seed, name, arm in product(options.seeds, options.settings, options.arms):
        key = {"setting": name, "arm": arm, "seed": seed}
        known = any(key == {each: row[each] for each in key} for row in read(path))
        if known or arm in SAME[getattr(SETTINGS[name], "trained", False)]:
            continue
        row = measure(name, arm, seed, options.out, options.data_dir)
        add(path, row, quiet=True)
        print({k: v for k, v in row.items() if not options.validation or k not in ("test", "by level")}, flush=True)


if __name__ == "__main__":
    main()
