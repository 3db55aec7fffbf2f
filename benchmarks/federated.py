"""When federated learning pays: nested submodels against other submodels, whole networks, and clients that train alone.

    python benchmarks/federated.py --out federated --data-dir DIR [--settings shift] [--arms fedlps heterofl] [--seeds 0 1 2]

Fifty clients with little data, ten in each round, capabilities 1 to 1/16 of the FLOPs, ten clients of each. Ten further
devices never take part, ten more only in the last round. "shift": fine-tuning on 30 grey, inverted images of all classes.
"dirichlet": the same, classes drawn by a Dirichlet distribution of 0.5. "scratch": from random weights, Dirichlet 0.3, 100
images. "text": Shakespeare by speaker, an LSTM, from random weights. "plain": "dirichlet" with a network without residuals, on
which no choice was based. "classes" and "domain": ten clients, all in every round, with three classes or five inverted ones.

Each run is scored in three ways: the newest model of a device, the same after one more local training, and the best of these
and of the models that the client trained, by its 30 validation examples. "--show" prints tables and draws the picture. Runs
with a row in OUT/federated.jsonl are not repeated.
"""

import re
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
from federated_arms import ARMS, LEVELS, NEW, ROUNDS, SCORED
from torch import Tensor, nn

import sparsekit_fl as fl
from sparsekit_fl.problem.images import cifar10

TRAINED_ON = 20_000  # images of CIFAR-10 that the networks for fine-tuning are trained on; clients have the others
_SGD = fl.TrainingConfig(local_epochs=2, batch_size=10, lr=0.02, momentum=0.9)


def _stem(width: int, *more: nn.Module, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(3, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), *more]


def residual() -> nn.Module:
    return nets.resnet(_stem(16, stride=2), 16, (1, 1, 1), 16, 1, 10)


def network() -> nn.Module:
    return nets.resnet(_stem(32, nn.MaxPool2d(2)), 32, (1, 1, 1), 32, 1, 10)


def plain() -> nn.Module:
    layers, width = list[nn.Module](), 3
    for after, stride in ((24, 2), (32, 1), (48, 2), (64, 1)):
        layers += [nn.Conv2d(width, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        width = after
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)]
    return nn.Sequential(*layers, *head)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(66, 24), nn.LSTM(24, 64, batch_first=True), nn.Linear(64, 66)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.rnn(self.embedding(x))[0])
        return outputs


@cache
def images(data: Path, pixels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = cifar10(data)
    small = [F.avg_pool2d(part.inputs[0].float(), 32 // pixels).round().to(torch.uint8) for part in (source.train, source.test)]
    return small[0], source.train.targets, small[1], source.test.targets


def scaled(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.47) / 0.25


def grey(pixels: Tensor) -> Tensor:
    """Return images of another domain: grey and inverted."""
    return -scaled(pixels).mean(1, keepdim=True).expand(-1, 3, -1, -1).contiguous()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data of the clients, initial network, and training; `counts` are numbers of training, validation and test examples."""

    model: Callable[[], nn.Module] = residual
    pixels: int = 16  # height and width of images; 0: text
    seen: Callable[[Tensor], Tensor] = grey
    trained: bool = True
    clients: int = 50
    alpha: float | None = None  # of the Dirichlet distribution of classes; None: equal shares
    classes: int = 0  # number of classes per client; 0: all
    counts: tuple[int, int, int] = (30, 30, 80)
    rounds: int = 20
    training: fl.TrainingConfig = _SGD


_TEN = Setting(model=network, pixels=32, clients=10, rounds=5, training=replace(_SGD, batch_size=32, lr=0.01))
SETTINGS = {
    "shift": Setting(),
    "dirichlet": Setting(alpha=0.5),
    "text": Setting(
        model=Lstm, pixels=0, trained=False, counts=(60, 20, 40), rounds=25,
        training=replace(_SGD, lr=0.01, momentum=0.0, optimizer="adam"),
    ),
    "scratch": Setting(
        seen=scaled, trained=False, alpha=0.3, counts=(100, 30, 80), rounds=30,
        training=replace(_SGD, batch_size=25, lr=0.05),
    ),
    "plain": Setting(model=plain, alpha=0.5),
    "classes": replace(_TEN, classes=3, counts=(102, 102, 198), seen=scaled),
    "domain": replace(_TEN, classes=5, counts=(100, 100, 200)),
}  # fmt: skip


def trained(setting: Setting, out: Path, data: Path, *, epochs: int = 5, batch: int = 128) -> dict[str, Tensor]:
    path = out / f"{setting.model.__name__}.pt"
    if not path.exists():
        torch.manual_seed(0)
        pixels, labels, _, _ = images(data, setting.pixels)
        model, steps = setting.model(), TRAINED_ON // batch
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.15, total_steps=epochs * steps)
        for _ in range(epochs):
            for places in torch.randperm(TRAINED_ON)[: steps * batch].split(batch):
                x = scaled(pixels[places])
                x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
                optimizer.zero_grad()
                F.cross_entropy(model(x), labels[places]).backward()
                optimizer.step()
                schedule.step()
        torch.save(model.state_dict(), path)
    return torch.load(path)


def image_parts(setting: Setting, data: Path, rng: np.random.Generator, total: int) -> list[list[fl.TensorData]]:
    pixels, labels, others, truth = images(data, setting.pixels)
    rows = {c: list(rng.permutation(np.flatnonzero(labels[TRAINED_ON:].numpy() == c) + TRAINED_ON)) for c in range(10)}
    tests = {c: np.flatnonzero(truth.numpy() == c) for c in range(10)}
    found = []
    for _ in range(total):
        shares = np.full(10, 0.1) if setting.alpha is None else rng.dirichlet(np.full(10, setting.alpha))
        if setting.classes:
            shares = np.isin(np.arange(10), rng.choice(10, setting.classes, replace=False)) / setting.classes
        parts = []
        for place, count in enumerate(setting.counts):
            own = np.floor(shares * count).astype(int)
            own[np.argsort(own - shares * count)[: count - own.sum()]] += 1
            pool, y = (others, truth) if place == 2 else (pixels, labels)
            chosen = [
                int(row) for c, n in enumerate(own)
                for row in (rng.choice(tests[c], n, replace=False) if place == 2 else [rows[c].pop() for _ in range(n)])
            ]  # fmt: skip
            parts.append(fl.TensorData((setting.seen(pool[chosen]),), y[chosen]))
        found.append(parts)
    return found


def text_parts(setting: Setting, data: Path, rng: np.random.Generator, total: int) -> list[list[fl.TensorData]]:
    """Return the splits of speakers in Shakespeare's plays with enough text: sequences of 32 characters, in order of time."""
    text, step = (data / "tinyshakespeare" / "input.txt").read_text(), 33
    number = {character: place + 1 for place, character in enumerate(sorted(set(text)))}
    said: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", text):
        name, _, body = block.strip().partition("\n")
        if name.endswith(":") and body:
            said.setdefault(name, []).append(body + "\n")
    length = {name: sum(map(len, lines)) for name, lines in said.items()}
    usable = [name for name in sorted(said, key=lambda name: -length[name]) if length[name] >= step * 80]
    found = []
    for place in rng.permutation(min(len(usable), 100))[:total]:
        codes = torch.tensor([number[character] for character in "".join(said[usable[place]])])
        lines = codes[: len(codes) // step * step].view(-1, step)
        first = min(setting.counts[0], len(lines) // 2)
        second = first + min(setting.counts[1], (len(lines) - first) // 3)
        cuts = (0, first), (first, second), (second, min(len(lines), second + setting.counts[2]))
        parts = [lines[start:stop] for start, stop in cuts]
        found.append([fl.TensorData((part[:, :-1].contiguous(),), part[:, 1:].contiguous()) for part in parts])
    return found


def clients(setting: Setting, data: Path, seed: int) -> list[fl.Client]:
    rng, further = np.random.default_rng(1000 + seed), 2 * NEW if setting.clients > 10 else 0
    parts = (image_parts if setting.pixels else text_parts)(setting, data, rng, setting.clients + further)
    levels = [*rng.permutation(np.repeat(LEVELS, setting.clients // 5)), *np.tile(LEVELS, further // 5)]
    return [
        fl.Client(id=id, data=fl.ClientData(*own), capability=fl.Capability().at(float(level)))
        for id, (own, level) in enumerate(zip(parts, levels, strict=True))
    ]


WAYS = ("newest", "tuned", "best")


def measure(name: str, who: str, seed: int, out: Path, data: Path) -> dict[str, Any]:
    setting, method = SETTINGS[name], ARMS[who]
    everyone = clients(setting, data, seed)
    x = torch.zeros(2, 3, setting.pixels, setting.pixels) if setting.pixels else torch.zeros(2, 32, dtype=torch.int64)
    problem = fl.Problem(model=setting.model, example_inputs=(x,))
    rounds = round(setting.rounds * ROUNDS.get(who, 1.0))
    config = fl.RunConfig(rounds=rounds, cohort=10, seed=seed, eval_every=rounds, deploy="best", training=setting.training)
    init, began = trained(setting, out, data) if setting.trained else None, time.process_time()
    SCORED.clear()
    result = fl.run(method, problem, everyone, config, init=init)
    for one in result.final.per_client:
        SCORED[one.id]["best"] = one.personal["accuracy"], one.validation["accuracy"]
    cost = result.cost
    return {
        "setting": name, "arm": who, "seed": seed,
        "z": [client.capability.ratio for client in everyone],
        **{way: [round(SCORED[client.id][way][0], 4) for client in everyone] for way in WAYS},
        "validation": {way: statistics.mean(SCORED[id][way][1] for id in range(setting.clients)) for way in WAYS},
        "TFLOPs": cost.flops_training / 1e12, "scoring": cost.flops_scoring / 1e12, "seconds": cost.simulated_seconds,
        "MB up": cost.uplink_bytes / 1e6, "MB down": cost.downlink_bytes / 1e6, "processor": time.process_time() - began,
    }  # fmt: skip


def mean_of(row: dict[str, Any], way: str, who: str = "members", level: float | None = None) -> float:
    """Return the mean accuracy in % of some devices: those that train regularly, their worst tenth, late or new ones."""
    members = len(row["z"]) - (2 * NEW if len(row["z"]) > 10 else 0)
    places = {"members": (0, members), "worst": (0, members), "new": (members, members + NEW), "late": (members + NEW, None)}
    found = [a for a, z in list(zip(row[way], row["z"]))[slice(*places[who])] if level is None or z == level]
    found = sorted(found)[: max(1, members // 10)] if who == "worst" else found
    return 100 * statistics.mean(found) if found else float("nan")


def tables(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for name, who, way in product(SETTINGS, ARMS, WAYS):
        own = [row for row in rows if (row["setting"], row["arm"]) == (name, who)]
        ours = {row["seed"]: row for row in rows if (row["setting"], row["arm"]) == (name, "fedlps")}
        if not own:
            continue
        gaps = [mean_of(ours[row["seed"]], way) - mean_of(row, way) for row in own if row["seed"] in ours]
        parts = {part: f"{statistics.mean(mean_of(row, way, part) for row in own):.0f}" for part in ("worst", "new", "late")}
        levels = [statistics.mean(mean_of(row, way, level=level) for row in own) for level in LEVELS]
        lines.append(
            {
                "setting": name, "arm": who, "deployed": way, "n": len(own),
                "accuracy": spread([mean_of(row, way) for row in own]), "fedlps less it": spread(gaps),
                "z = 1 … 1/16": " / ".join(f"{level:.0f}" for level in levels), **parts,
                **{key: statistics.mean(row[key] for row in own) for key in ("TFLOPs", "scoring", "MB up", "MB down")},
            }
        )  # fmt: skip
    return lines


DRAWN = {"fedlps": "#00796b", "heterofl": "#e64a19", "alone": "#f9a825", "fedavg": "#5e35b1", "local": "#9e9e9e"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "federated", "svg.fonttype": "none", "font.size": 9})
    shown = [name for name in ("shift", "dirichlet", "text") if any(row["setting"] == name for row in rows)]
    figure, axes = plt.subplots(1, len(shown), figsize=(10, 3.3), constrained_layout=True, squeeze=False)
    for axis, name in zip(axes[0], shown, strict=True):
        for who, color in DRAWN.items():
            own = [row for row in rows if (row["setting"], row["arm"]) == (name, who)]
            if own:
                levels = [statistics.mean(mean_of(row, "best", level=level) for row in own) for level in LEVELS]
                axis.plot(LEVELS, levels, "o-", color=color, label=who)
        axis.set_xscale("log", base=2)
        axis.set_xticks(LEVELS, ["1", "1/2", "1/4", "1/8", "1/16"])
        axis.set_title(f"{name}: accuracy in %")
        axis.set_xlabel("capability")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(DRAWN), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = options_of(
        __doc__, choices={"settings": SETTINGS, "arms": ARMS}, out=Path("federated"), data_dir=Path, settings=list(SETTINGS),
        arms=list(ARMS), seeds=[0, 1, 2], show=False,
    )  # fmt: skip
    options.out.mkdir(exist_ok=True)
    path = options.out / "federated.jsonl"
    if options.show:
        show(tables(read(path)), False)
        draw(read(path), ROOT / "docs" / "pictures" / "federated.svg")
        return
    for seed, name, who in product(options.seeds, options.settings, options.arms):
        key = {"setting": name, "arm": who, "seed": seed}
        if not any(key == {each: row[each] for each in key} for row in read(path)):
            row = measure(name, who, seed, options.out, options.data_dir)
            add(path, row, quiet=True)
            print(key, row["validation"], f"{row['processor']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
