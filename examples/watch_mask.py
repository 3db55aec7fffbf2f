"""Watch a mask learn: 4 of 16 units see the signal, the mask starts with others, and finds them. Seconds, offline.

Needs matplotlib (`pip install "sparsekit-torch[report]"`). Run it with `python examples/watch_mask.py`; it draws
watch_mask.svg.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparsekit as sk

UNITS, STEPS = 16, 1500


def task(seed: int) -> tuple[nn.Module, Tensor, Tensor, list[int]]:
    """A network whose hidden unit j sees input j alone, and labels that follow from four of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(UNITS, UNITS, bias=False), nn.ReLU(), nn.Linear(UNITS, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(UNITS))
    model[0].requires_grad_(False)
    good = torch.randperm(UNITS, generator=generator)[:4].tolist()
    x = torch.randn(4000, UNITS, generator=generator)
    signal = x[:, good].relu().sum(1)
    return model, x, (signal > signal.median()).long(), sorted(good)


def train(masked: sk.LearnableMask, x: Tensor, y: Tensor) -> list[Tensor]:
    """Train with an ordinary loop; which units were kept after every step, bool (units,) each."""
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(STEPS):
        batch = torch.randint(0, len(x), (64,), generator=generator)
        loss = F.cross_entropy(masked(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(masked.unit_mask()["0"])
    return seen


def draw(histories: dict[str, list[Tensor]], good: list[int], path: Path) -> None:
    """A row of pictures: steps to the right, units upwards, dark where a unit is kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots(1, len(histories))
    for axis, (name, history) in zip(axes, histories.items(), strict=True):
        axis.imshow(torch.stack(history, 1), aspect="auto", cmap="Blues", interpolation="nearest", vmin=-0.2, vmax=1.2)
        axis.set(title=name, xlabel="step", yticks=range(UNITS), yticklabels=range(UNITS))
        for unit in good:
            axis.get_yticklabels()[unit].set_color("tab:orange")
            axis.get_yticklabels()[unit].set_fontweight("bold")
    axes[0].set_ylabel("unit (orange: sees the signal)")
    figure.savefig(path)


def main(folder: Path) -> None:
    """Train by both rules and draw."""
    torch.set_num_threads(1)
    model, x, y, good = task(seed=3)
    rules = {
        "importance in units of loss": sk.LossImportance(steps=STEPS),
        "importance as a parameter (paper)": sk.GradientImportance(lr=0.2, refresh_every=1),
    }
    histories = {}
    for name, learning in rules.items():
        masked = sk.LearnableMask(model, (x[:2],), ratio=0.25, learning=learning)
        histories[name] = train(masked, x, y)
        kept = histories[name][-1].nonzero().flatten().tolist()
        masked.eval()
        accuracy = float((masked(x).argmax(1) == y).float().mean())
        print(f"{name}: kept {kept}, of {good} that see the signal {len(set(kept) & set(good))}; accuracy {accuracy:.1%}")
    path = folder / "watch_mask.svg"
    draw(histories, good, path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
