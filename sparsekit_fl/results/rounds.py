"""RoundRecord: what one round reports."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from sparsekit_fl.results.part import Count, Failures, Part, SavedCost, about
from sparsekit_fl.results.scores import RoundScores


class RoundRecord(Part):
    """One round: a line of `rounds.jsonl`.

    Args:
        round: Counted from 1.
        cohort: Ids of the sampled clients.
        dropped: Id and reason of those whose work did not count.
        loss: Training loss, mean over the valid updates weighted by examples.
        accuracy: Training accuracy, likewise; None where the problem has none.
        ratios: Client id → executed ratio.
        capabilities: Client id → largest ratio that its device could train in this round.
        cost: Cost of the run so far.
        seconds: Simulated, of this round, with scoring; measured where rounds are asynchronous by the wall clock.
        evaluation: Means over all clients or a sample, where this round was evaluated.
        notes: What else a reader should know, such as a client whose memory was lost.
    """

    round: int = Field(ge=1)
    cohort: tuple[Count, ...] = about("ids of the clients that were asked")
    dropped: Failures = about("clients whose work did not count")
    loss: float | None = about("of training, mean over the valid updates weighted by examples")
    accuracy: float | None = about("of training, likewise")
    ratios: Mapping[int, float] = about("client id → executed ratio, of those whose work counted")
    cost: SavedCost = about("of the run so far")
    seconds: float = about("simulated, of this round")
    evaluation: RoundScores | None
    notes: tuple[str, ...] = ()
    capabilities: Mapping[int, float] = about("client id → largest ratio that its device could train", default={})
