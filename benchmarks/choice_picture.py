"""A picture of what `benchmarks/choice.py images` has measured: how far each arm is above or below random units, by ratio.

python benchmarks/choice_picture.py benchmarks/choice.jsonl docs/pictures/choice-images.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

PANELS = {
    "cifar10 16 pixels trained 20000 images 3 epochs": "CIFAR-10, from a trained network",
    "cifar10 16 pixels scratch 20000 images 7 epochs": "CIFAR-10, from scratch",
    "cifar100 16 pixels trained 20000 images 3 epochs": "CIFAR-100, from a trained network",
}
STYLES = {
    "learned": ("#00796b", "-", "o"),
    "widths": ("#4db6ac", "-", "s"),
    "widths-fixed": ("#4db6ac", "--", "s"),
    "magnitude": ("#e65100", "-", "^"),
    "torch-pruning": ("#f57c00", "--", "v"),
    "taylor": ("#8d6e63", "-", ">"),
    "fisher": ("#8d6e63", "--", "<"),
    "ordered": ("#90a4ae", "-", "x"),
    "rigl": ("#5c6bc0", ":", "D"),
    "paper": ("#5c6bc0", "--", "+"),
}


def draw(lines: list[dict[str, object]], path: Path) -> None:
    """Write a panel per cell that was run: means over seeds, bars of one deviation."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "sparsekit"
    import matplotlib.pyplot as plt

    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    for line in lines:
        runs = found.setdefault(str(line["cell"]), {}).setdefault(str(line["arm"]), {})
        runs.setdefault(float(str(line["ratio"])), []).append(100 * float(str(line["accuracy"])))
    shown = [cell for cell in PANELS if cell in found]
    figure, panels = plt.subplots(1, len(shown), figsize=(4.0 * len(shown) + 1.5, 4.0), sharey=True, squeeze=False)
    for panel, cell in zip(panels[0], shown):
        arms = found[cell]
        ratios = sorted(arms["random"], reverse=True)
        panel.axhline(0.0, color="#9e9e9e", linewidth=0.8)
        for number, (arm, (color, line, marker)) in enumerate(STYLES.items()):
            known = [ratio for ratio in ratios if ratio in arms.get(arm, {})]
            above = [statistics.mean(arms[arm][ratio]) - statistics.mean(arms["random"][ratio]) for ratio in known]
            bars = [statistics.stdev(arms[arm][ratio]) if len(arms[arm][ratio]) > 1 else 0.0 for ratio in known]
            at = [ratios.index(ratio) + 0.03 * (number - len(STYLES) / 2) for ratio in known]
            panel.errorbar(at, above, bars, color=color, linestyle=line, marker=marker, markersize=5, elinewidth=0.6, label=arm)
        panel.set_xticks(range(len(ratios)), [f"1/{round(1 / ratio)}" for ratio in ratios])
        panel.set_title(PANELS[cell], fontsize=10)
        panel.set_xlabel("ratio of units kept")
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("accuracy less that of random units, points")
    panels[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, handlelength=3.5)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    draw([json.loads(line) for line in options.results.read_text().splitlines()], options.out)


if __name__ == "__main__":
    main()
