"""The numbers of a round by name, as loggers want them."""

from __future__ import annotations

import math

from sparsekit_fl.results.frames import rounds_table
from sparsekit_fl.results.rounds import RoundRecord

__all__ = ["numbers_of"]

_TRAIN = ("train_loss", "train_accuracy")
_COST = (
    "flops_compact",
    "flops_rowmask",
    "uplink_bytes",
    "downlink_bytes",
    "simulated_seconds",
    "wall_seconds",
    "memory_bytes",
    "flops_scoring",
    "flops_compact_training",
    "simulated_seconds_scoring",
    "simulated_seconds_training",
)
_ROUND = ("cohort", "dropped", "round_seconds")


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round, those that are finite: `train/loss`, `personal/accuracy`, `personal/accuracy_worst`,
    `cost/flops_compact`, `round/dropped`, …

    Args:
        record: Of the round.
    """
    (row,) = rounds_table([record])
    found = {}
    for name, value in row.items():
        if name == "round" or value is None or not math.isfinite(value):
            continue
        group = "cost" if name in _COST else "round" if name in _ROUND else name.partition("_")[0]
        found[f"{group}/{name.removeprefix(f'{group}_')}"] = float(value)
    return found
