"""Tables of docs/evidence/real.md about whole blocks, from rows of results/blocks.jsonl."""

import itertools
import statistics
from collections.abc import Sequence

from cells import Lines, Row, rows, table
from common import spread

REAL, BLOCKS = "docs/evidence/real.md", "blocks.jsonl"
LABELS = {"resnet20": "ResNet-20, CIFAR-10 (dense 72.7)", "mobilenetv2": "MobileNetV2, CIFAR-10 (dense 38.2)"}


def cells_of(network: str, share: float) -> list[dict[int, Row]]:
    """Number of blocks → row, for each draw."""
    draws = [rows(BLOCKS, what="blocks", network=network, share=share, draw=draw) for draw in range(3)]
    return [{row["blocks"]: row for row in own} for own in draws if own]


@table(
    REAL, "EfficientNet-Lite0, accuracy in % (dense 44.6)", "widths alone", "2 or 3 blocks, then widths", "4 or 5", "6 to 9",
    "lowest held-out loss", "`prune` removes",
)  # fmt: skip
def blocks() -> Lines:
    for share, draw in itertools.product((0.8, 0.65, 0.5, 0.35), range(3)):
        own = {row["blocks"]: row for row in rows(BLOCKS, what="blocks", network="efficientnet-lite0", share=share, draw=draw)}
        if own:
            cells = [
                _accuracy([own[number] for number in pair if number in own]) for pair in ((0,), (1, 2, 3), (4, 5), (6, 7, 8, 9))
            ]
            least = min(own, key=lambda number: own[number]["judge"])
            chosen = [str(number) for number, row in own.items() if row["chosen"]]
            yield [f"{share:.0%} of the FLOPs, draw {draw + 1}".replace("%", " %"), *cells, str(least), *chosen]


def _accuracy(found: Sequence[Row]) -> str:
    return ", ".join(f"{100 * row['accuracy']:.1f}" for row in found)


@table(
    REAL, "accuracy in %, as pruned → after 100 steps", "widths alone", "the fewest blocks", "more blocks", "the most blocks",
    "`prune` removes",
)  # fmt: skip
def others() -> Lines:
    for (network, label), share in itertools.product(LABELS.items(), (0.65, 0.5, 0.35)):
        draws = cells_of(network, share)
        if not draws:
            continue
        line = [f"{label}, {share:.0%} of the FLOPs".replace("%", " %")]
        for place in range(4):
            own = [list(found.items())[place] for found in draws if len(found) > place]
            if not own:
                line.append("")
                continue
            numbers = sorted({number for number, _ in own})
            told = "" if not place else f"{' or '.join(map(str, numbers))}: "
            before = statistics.mean(100 * row["accuracy"] for _, row in own)
            line.append(f"{told}{before:.1f} → {spread([100 * row['trained accuracy'] for _, row in own])}")
        chosen = [number for found in draws for number, row in found.items() if row["chosen"]]
        yield [*line, ", ".join(map(str, chosen))]


@table(REAL, "half of the FLOPs, time over that of the dense network", "dense again", "widths alone", "3 blocks", "7 blocks")
def block_times() -> Lines:
    for row in rows(BLOCKS, what="block times", network="efficientnet-lite0", share=0.5):
        runtime = "ONNX Runtime" if row["runtime"] == "onnx" else "eager"
        told = f"{runtime}, {row['batch']} image{'s' if row['batch'] > 1 else ''}, {row['pixels']} pixels"
        columns = ("dense again", "0 blocks", "3 blocks", "7 blocks")
        yield [told, *("{1:.2f} ({0:.2f} to {2:.2f})".format(*row[name]) for name in columns)]


@table(REAL, "SmolLM2-135M, perplexity (dense 24.4)", "removed branches", "as pruned", "after 50 steps")
def decoder_blocks() -> Lines:
    for row in rows(BLOCKS, what="blocks", network="smollm2"):
        after = f"{row['trained perplexity']:.1f}" if "trained perplexity" in row else ""
        yield [f"{row['share']:.0%} of the FLOPs".replace("%", " %"), str(row["blocks"]), f"{row['perplexity']:.1f}", after]
