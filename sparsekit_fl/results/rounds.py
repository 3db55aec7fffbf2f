"""RoundRecord: what one round reports, and its plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsekit_fl.results.scores import RoundScores
from sparsekit_fl.results.scoring import complete_cost
from sparsekit_fl.wire.messages import WorkCost

__all__ = ["RoundRecord", "cost_dict", "cost_from", "plain"]


def cost_dict(cost: WorkCost) -> dict[str, Any]:
    """Plain JSON values of a cost."""
    return {
        "flops_compact": cost.flops_compact,
        "flops_rowmask": cost.flops_rowmask,
        "uplink_bytes": cost.uplink_bytes,
        "downlink_bytes": cost.downlink_bytes,
        "simulated_seconds": cost.simulated_seconds,
        "wall_seconds": cost.wall_seconds,
        # Only where clients run something to make what they deploy, and where memories travelled.
        **({"flops_deploying": cost.flops_deploying} if cost.flops_deploying else {}),
        **({"memory_bytes": cost.memory_bytes} if cost.memory_bytes else {}),
        # Only where a method scores while it trains. The numbers of training alone, which is what results counted before,
        # go with 0.3: `deprecations.REMOVED_KEYS`.
        **(
            {"flops_scoring": cost.flops_scoring, "flops_compact_training": cost.flops_compact_training}
            if cost.flops_scoring
            else {}
        ),
        **(
            {"simulated_seconds_scoring": cost.scoring_seconds, "simulated_seconds_training": cost.seconds}
            if cost.scoring_seconds
            else {}
        ),
    }


def cost_from(raw: Mapping[str, Any]) -> WorkCost:
    """The inverse of `cost_dict`; also of what results had before `flops_compact` contained scoring."""
    values = complete_cost(raw)
    del values["flops_compact_training"]
    # Both parts, and not a difference with the total, which would round.
    del values["simulated_seconds"]
    seconds = values.pop("simulated_seconds_training")
    return WorkCost(seconds=seconds, scoring_seconds=values.pop("simulated_seconds_scoring", 0.0), **values)


def plain(value: Any) -> Any:
    """JSON values only: numbers that are not finite become null, as JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _by_text(ratios: Mapping[int, float]) -> dict[str, float]:
    return {str(client_id): ratio for client_id, ratio in ratios.items()}


def _by_id(ratios: Mapping[str, float]) -> dict[int, float]:
    return {int(client_id): ratio for client_id, ratio in ratios.items()}


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round.

    Args:
        round: Counted from 1.
        cohort: Ids of the sampled clients.
        dropped: Id and reason of those whose work did not count.
        loss: Training loss, mean over the valid updates weighted by examples.
        accuracy: Training accuracy, likewise; None where the problem has none.
        ratios: Client id → executed ratio.
        capabilities: Client id → largest ratio that its device could train in this round; empty in older results.
        cost: Of the run so far.
        seconds: Simulated, of this round, with scoring; measured where rounds are asynchronous by the wall clock.
        evaluation: Means over all clients or a sample, where this round was evaluated.
        notes: What else a reader should know, such as a client whose memory was lost.
    """

    round: int
    cohort: tuple[int, ...]
    dropped: tuple[tuple[int, str], ...]
    loss: float | None
    accuracy: float | None
    ratios: Mapping[int, float]
    cost: WorkCost
    seconds: float
    evaluation: RoundScores | None = None
    notes: tuple[str, ...] = ()
    capabilities: Mapping[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: a line of `rounds.jsonl`."""
        return {
            "round": self.round,
            "cohort": list(self.cohort),
            "dropped": [{"client": client_id, "reason": reason} for client_id, reason in self.dropped],
            "loss": self.loss,
            "accuracy": self.accuracy,
            "ratios": _by_text(self.ratios),
            "cost": cost_dict(self.cost),
            "seconds": self.seconds,
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            **({"notes": list(self.notes)} if self.notes else {}),
            **({"capabilities": _by_text(self.capabilities)} if self.capabilities else {}),
        }

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RoundRecord:
        """The inverse of `to_dict`."""
        return RoundRecord(
            round=raw["round"],
            cohort=tuple(raw["cohort"]),
            dropped=tuple((item["client"], item["reason"]) for item in raw["dropped"]),
            loss=raw["loss"],
            accuracy=raw["accuracy"],
            ratios=_by_id(raw["ratios"]),
            cost=cost_from(raw["cost"]),
            seconds=raw["seconds"],
            evaluation=None if raw["evaluation"] is None else RoundScores.from_dict(raw["evaluation"]),
            notes=tuple(raw.get("notes", ())),
            capabilities=_by_id(raw.get("capabilities", {})),
        )
