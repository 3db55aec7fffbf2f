"""A picture of what `benchmarks/prune.py` has measured: accuracy against FLOPs, as cut and repaired, and after fine-tuning.

python benchmarks/prune_picture.py prune.json docs/pictures/side-by-side.svg --task resnet20-cifar10 --schedule cpu-short
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

STYLES = {
    "ours": ("#00796b", "-", "o"),
    "ours, no teacher": ("#00796b", "--", "o"),
    "ours: group-sl": ("#4db6ac", "--", "s"),
    "ours: group-sl, repaired": ("#4db6ac", "-", "s"),
    "torch-pruning: L2": ("#e65100", "-", "^"),
    "torch-pruning: L2, global": ("#f57c00", "--", "v"),
    "torch-pruning: L2, isomorphic": ("#ffb74d", "-", "<"),
    "torch-pruning: taylor": ("#8d6e63", "-", ">"),
    "torch-pruning: group-sl": ("#bf360c", ":", "D"),
    "scratch, uniform": ("#90a4ae", "-", "x"),
    "scratch, our widths": ("#546e7a", "-", "+"),
}
ONE_SHOT = ("compensated", "recalibrated")


def draw(cells: dict[str, dict[str, Any]], task: str, schedule: str, path: Path) -> None:
    """Write the picture: one panel before any training, one after it."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "sparsekit"
    import matplotlib.pyplot as plt

    means: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for key, cell in cells.items():
        of_task, of_schedule, arm, share, _ = key.split(" | ")
        if (of_task, of_schedule) == (task, schedule):
            means.setdefault(arm, {}).setdefault(float(share), []).append(cell)
    dense = statistics.mean(cell["finetuned"] for cell in means["dense"][1.0])
    figure, panels = plt.subplots(1, 2, figsize=(11.5, 4.2), sharey=True)
    for panel, title in zip(panels, ("no training after the cut", "after fine-tuning")):
        panel.axhline(100 * dense, color="#9e9e9e", linewidth=0.8)
        panel.text(12, 100 * dense + 0.4, "dense", color="#757575", fontsize=8)
        for arm, (color, line, marker) in STYLES.items():
            if arm == "ours, no teacher" and panel is panels[0]:
                continue  # the same model as "ours" until it is trained
            points = []
            for found in means.get(arm, {}).values():
                name = "finetuned" if panel is panels[1] else next((n for n in ONE_SHOT if n in found[0]), None)
                if name is not None:
                    share = statistics.mean(cell["share"] for cell in found)
                    points.append((100 * share, 100 * statistics.mean(cell[name] for cell in found)))
            if points:
                panel.plot(*zip(*sorted(points)), color=color, linestyle=line, marker=marker, markersize=5, label=arm)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("FLOPs, % of the dense model")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("test accuracy, %")
    panels[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, handlelength=3.5)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", default="resnet20-cifar10")
    parser.add_argument("--schedule", default="cpu-short")
    options = parser.parse_args()
    draw(json.loads(options.results.read_text())["accuracy"], options.task, options.schedule, options.out)


if __name__ == "__main__":
    main()
