"""Results as pandas DataFrames: a row per round, and a row per client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparsekit_fl.client.messages import Evaluation
from sparsekit_fl.results.extra import need
from sparsekit_fl.results.part import Cost
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.results.scores import FinalScores, RoundScores, value_of


def rounds_table(records: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Return a row per round: its number, training loss and accuracy, work of the run so far, and scores.

    Columns of scores are `PART_METRIC`, as in `personal_accuracy`, for the mean over clients, `PART_METRIC_weighted` and
    `PART_METRIC_worst`; PART is personal, validation or global. A round without scores has none of them.

    Args:
        records: One per round.
    """
    rows = []
    for record in records:
        row: dict[str, Any] = {
            "round": record.round,
            "train_loss": record.loss,
            "train_accuracy": record.accuracy,
            "cohort": len(record.cohort),
            "dropped": len(record.dropped),
            "round_seconds": record.seconds,
            **Cost.of(record.cost).to_dict(),
        }
        rows.append(row | ({} if record.evaluation is None else _scores(record.evaluation)))
    return rows


def _scores(scores: RoundScores) -> dict[str, float]:
    means: dict[str, Mapping[str, float]] = {"personal": scores.personal, "validation": scores.validation}
    if scores.shared is not None:
        means["global"] = scores.shared
    found = {f"{part}_{name}": value for part, own in means.items() for name, value in own.items()}
    for kind, parts in (("weighted", scores.weighted), ("worst", scores.worst)):
        found |= {f"{part}_{name}_{kind}": value for part, own in parts.items() for name, value in own.items()}
    return found


def rounds_frame(records: Sequence[RoundRecord]) -> Any:
    """Return `rounds_table` as a DataFrame with the round as its index.

    Args:
        records: One per round.

    Raises:
        MissingDependencyError: pandas is not installed.
    """
    return need("pandas").DataFrame(rounds_table(records)).set_index("round")


def clients_frame(records: Sequence[RoundRecord], final: FinalScores) -> Any:
    """Return a DataFrame with a row per client and its id as the index.

    Columns: `examples` of its test data, `ratio` of its personal model, `PART_METRIC` as in `personal_accuracy`, `trained` and
    `dropped` (numbers of rounds), and `reason` (of the last round in which it was dropped).

    Args:
        records: One per round.
        final: Scores of the end.

    Raises:
        MissingDependencyError: pandas is not installed.
    """
    trained: dict[int, int] = {}
    dropped: dict[int, int] = {}
    reasons: dict[int, str] = {}
    for record in records:
        for client_id in record.ratios:
            trained[client_id] = trained.get(client_id, 0) + 1
        for client_id, reason in record.dropped:
            dropped[client_id] = dropped.get(client_id, 0) + 1
            reasons[client_id] = reason
    scored = {evaluation.client_id: evaluation for evaluation in final.per_client}
    rows = []
    for client_id in sorted({*scored, *trained, *dropped}):
        own = scored.get(client_id)
        rows.append(
            {
                "client": client_id,
                "examples": None if own is None else own.examples,
                "ratio": None if own is None else own.ratio,
                **({} if own is None else _own(own)),
                "trained": trained.get(client_id, 0),
                "dropped": dropped.get(client_id, 0),
                "reason": reasons.get(client_id, ""),
            }
        )
    return need("pandas").DataFrame(rows).set_index("client")


def _own(evaluation: Evaluation) -> dict[str, float | None]:
    parts = {"personal": evaluation.personal, "validation": evaluation.validation, "global": evaluation.shared or {}}
    return {f"{part}_{name}": value_of(scores, name) for part, scores in parts.items() for name in scores}


_GROUPS = {**dict.fromkeys(Cost.model_fields, "cost"), **dict.fromkeys(("cohort", "dropped", "round_seconds"), "round")}


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round, those that are finite: `train/loss`, `personal/accuracy`, `personal/accuracy_worst`,
    `cost/flops_compact`, `round/dropped`, …

    Args:
        record: Record of the round.
    """
    (row,) = rounds_table([record])
    found = {}
    for name, value in row.items():
        if name != "round" and value is not None and math.isfinite(value):
            group = _GROUPS.get(name, name.partition("_")[0])
            found[f"{group}/{name.removeprefix(f'{group}_')}"] = float(value)
    return found
