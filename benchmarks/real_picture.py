"""Draw docs/pictures/real.svg, the picture of the README, from results/real.csv: python benchmarks/real_picture.py."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

ROOT = Path(__file__).parent.parent
OURS, RIVALS, CHANCE = "#00796b", ("#e64a19", "#f9a825", "#8d6e63"), "#9e9e9e"
ARMS = {
    "smollm2": (
        ("position_fisher/by_loss", "sparsekit", OURS),
        ("llm-pruner", "LLM-Pruner's cut", RIVALS[0]),
        ("wanda-sp", "Wanda-sp's cut", RIVALS[1]),
        ("flap", "FLAP's cut", RIVALS[2]),
        ("random", "random units", CHANCE),
    ),
    "efficientnet-lite0": (
        ("fisher/by_cost", "sparsekit", OURS),
        ("tp taylor", "Torch-Pruning's cut (Taylor)", RIVALS[0]),
        ("tp l2", "Torch-Pruning's cut (L2)", RIVALS[1]),
        ("random", "random units", CHANCE),
    ),
}


def main() -> None:
    """Write the picture."""
    cells = pd.read_csv(ROOT / "results" / "real.csv")
    plt.rcParams.update(
        {
            "svg.hashsalt": "real",
            "svg.fonttype": "none",
            "font.sans-serif": ["Arial", "Helvetica", "DejaVu Sans"],
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for axis, (network, metric, corner, title) in zip(
        axes,
        (
            ("smollm2", "perplexity", "upper right", "SmolLM2-135M: perplexity (lower is better)"),
            ("efficientnet-lite0", "accuracy", "upper left", "EfficientNet-Lite0: accuracy in % (higher is better)"),
        ),
        strict=True,
    ):
        rows = cells[cells.network == network]
        scale = 100 if metric == "accuracy" else 1
        dense = scale * float(rows[rows.arm == "dense"][metric].iloc[0])
        axis.axhline(dense, color="black", linewidth=1, linestyle=":")
        axis.annotate("dense", (1, dense), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        for arm, label, color in ARMS[network]:
            found = rows[(rows.arm == arm) & (rows.how == "reconstructed")].sort_values("share")
            axis.plot(100 * found.share, scale * found[metric], "o-", color=color, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("FLOPs kept in %")
        axis.set_xticks(sorted(100 * rows[rows.share < 1].share.unique()))
        axis.legend(frameon=False, loc=corner, bbox_to_anchor=(0.0, 0.0, 1.0, 0.93 if metric == "accuracy" else 1.05))
        if metric == "perplexity":
            axis.set_yscale("log")
            axis.set_yticks([25, 50, 100, 200, 500, 1000, 2000], labels=["25", "50", "100", "200", "500", "1,000", "2,000"])
            axis.minorticks_off()
        else:
            axis.set_ylim(0, 50)
    figure.savefig(ROOT / "docs" / "pictures" / "real.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
