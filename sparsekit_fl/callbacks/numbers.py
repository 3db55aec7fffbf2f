"""The numbers of a round by name, as loggers want them."""

from __future__ import annotations

import math

from sparsekit_fl.results.frames import rounds_table
from sparsekit_fl.results.part import Cost
from sparsekit_fl.results.rounds import RoundRecord

_GROUPS = {**dict.fromkeys(Cost.model_fields, "cost"), **dict.fromkeys(("cohort", "dropped", "round_seconds"), "round")}


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round, those that are finite: `train/loss`, `personal/accuracy`, `personal/accuracy_worst`,
    `cost/flops_compact`, `round/dropped`, …

    Args:
        record: Of the round.
    """
    (row,) = rounds_table([record])
    found = {}
    for name, value in row.items():
        if name != "round" and value is not None and math.isfinite(value):
            group = _GROUPS.get(name, name.partition("_")[0])
            found[f"{group}/{name.removeprefix(f'{group}_')}"] = float(value)
    return found
