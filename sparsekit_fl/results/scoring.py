"""What saved costs say of the passes by which methods decide while they train, in files of every version.

`cost.flops_compact` contains them from schema 3 on. Files of schema 2 have them apart, as `flops_scoring`, and those of version
0.1 did not count them at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["FLOPS_LACK", "SECONDS_LACK", "complete_cost", "complete_result", "lacks"]

FLOPS_LACK = "Run by version 0.1, which did not count the passes by which a method decides: FLOPs and times here lack them."
SECONDS_LACK = "Its times lack the passes by which a method decides, which its FLOPs contain."

# Policies of version 0.1 that score while they train: which model is kept, the accuracy before the first round, what is pruned.
_SCORES = re.compile(r"select='(best|loss)'|^(LearnableSgd|PatternSgd|Tickets|Subnetworks|GatedPruning)\b")


def complete_cost(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved cost whose `flops_compact` contains `flops_scoring`, with the numbers of training alone beside it.

    Args:
        raw: The `cost` of a result or of a round, of any version.
    """
    cost = dict(raw)
    if "flops_compact_training" not in cost and "flops_compact" in cost:
        cost["flops_compact_training"] = cost["flops_compact"]
        cost["flops_compact"] += cost.get("flops_scoring", 0)
    if "simulated_seconds" in cost:
        cost.setdefault("simulated_seconds_training", cost["simulated_seconds"])
    return cost


def complete_result(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved result whose costs are complete, that of each round too.

    Args:
        raw: As in `result.json`, of any version.
    """
    records = [{**record, "cost": complete_cost(record["cost"])} for record in raw["rounds"]]
    return {**raw, "cost": complete_cost(raw["cost"]), "rounds": records}


def lacks(result: Mapping[str, Any]) -> str:
    """Say which numbers of a result lack scoring; empty where none does.

    Args:
        result: As in `result.json`, of any version.
    """
    cost = result["cost"]
    if cost.get("flops_scoring"):
        return "" if "simulated_seconds_scoring" in cost or _asynchronous(result) else SECONDS_LACK
    old = "schema" not in result and any(_SCORES.search(str(text)) for text in result.get("policies", {}).values())
    return FLOPS_LACK if old else ""


def _asynchronous(result: Mapping[str, Any]) -> bool:
    """Whether times are those of a clock that ran while clients scored, so that training alone has no time of its own."""
    return result.get("config", {}).get("async_buffer") is not None
