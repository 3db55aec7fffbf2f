"""Results as pandas DataFrames, a row per round and a row per client; and as curves over the rounds."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sparsekit.errors import InvalidValueError, nearest
from sparsekit_fl.errors import need
from sparsekit_fl.results.part import Cost
from sparsekit_fl.results.scores import KINDS, PARTS, FinalScores, RoundRecord, parts_of, primary_metric, value_of

_LINES = (
    ("personal", "mean", "personal models, mean", "#0072B2", "-"),
    ("personal", "weighted", "personal models, by examples", "#56B4E9", "-"),
    ("personal", "worst_decile", "personal models, worst tenth", "#0072B2", ":"),
    ("global", "mean", "global model, mean", "#D55E00", "--"),
    ("global", "worst_decile", "global model, worst tenth", "#D55E00", ":"),
)
_GROUPS = {**dict.fromkeys(Cost.model_fields, "cost"), **dict.fromkeys(("cohort", "dropped", "round_seconds"), "round")}


def _row(record: RoundRecord) -> dict[str, Any]:
    """Return the numbers of a round: its training loss and accuracy, work of the run so far, and scores.

    Scores are `PART_METRIC`, as in `personal_accuracy`, for the mean over clients, `PART_METRIC_weighted` and
    `PART_METRIC_worst_decile`; PART is personal, validation or global. A round without scores has none of them.
    """
    row: dict[str, Any] = {
        "round": record.round,
        "train_loss": record.loss,
        "train_accuracy": record.accuracy,
        "cohort": len(record.cohort),
        "dropped": len(record.dropped),
        "round_seconds": record.seconds,
        **Cost.of(record.cost).to_dict(),
    }
    if record.evaluation is not None:
        for kind, part in itertools.product(KINDS, PARTS):
            for name, value in record.evaluation.over(part, kind).items():
                row[f"{part}_{name}" if kind == "mean" else f"{part}_{name}_{kind}"] = value
    return row


def rounds_frame(records: Sequence[RoundRecord]) -> Any:
    """Return a DataFrame with a row per round and its number as the index; `_row` says which columns.

    Raises:
        MissingDependencyError: pandas is not installed.
    """
    return need("pandas").DataFrame([_row(record) for record in records]).set_index("round")


def clients_frame(records: Sequence[RoundRecord], final: FinalScores) -> Any:
    """Return a DataFrame with a row per client and its id as the index.

    Columns: `examples` of its test data, `ratio` of its personal model, `PART_METRIC` as in `personal_accuracy`, `trained` and
    `dropped` (numbers of rounds), and `reason` (of the last round in which it was dropped).

    Raises:
        MissingDependencyError: pandas is not installed.
    """
    trained = Counter(client_id for record in records for client_id in record.ratios)
    dropped = Counter(client_id for record in records for client_id, _ in record.dropped)
    reasons = {client_id: reason for record in records for client_id, reason in record.dropped}
    scored = {evaluation.client_id: evaluation for evaluation in final.per_client}
    rows = []
    for client_id in sorted({*scored, *trained, *dropped}):
        own = scored.get(client_id)
        parts = {} if own is None else parts_of(own)
        rows.append(
            {
                "client": client_id,
                "examples": None if own is None else own.examples,
                "ratio": None if own is None else own.ratio,
                **{f"{part}_{name}": value_of(scores, name) for part, scores in parts.items() for name in scores},
                "trained": trained[client_id],
                "dropped": dropped[client_id],
                "reason": reasons.get(client_id, ""),
            }
        )
    return need("pandas").DataFrame(rows).set_index("client")


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round, those that are finite: `train/loss`, `personal/accuracy`,
    `personal/accuracy_worst_decile`, `cost/flops`, `round/dropped`, …
    """
    found = {}
    for name, value in _row(record).items():
        if name != "round" and value is not None and math.isfinite(value):
            group = _GROUPS.get(name, name.partition("_")[0])
            found[f"{group}/{name.removeprefix(f'{group}_')}"] = float(value)
    return found


def plot_rounds(records: Sequence[RoundRecord], metric: str | None = None, *, axes: Any = None, title: str = "") -> Any:
    """Draw a metric over the rounds: personal models and, where it was scored, the global one. See `RunResult.plot`."""
    scored = [(record.round, record.evaluation) for record in records if record.evaluation is not None]
    names = list(dict.fromkeys(name for _, scores in scored for name in scores.personal))
    if not names:
        raise InvalidValueError("no round of this run was scored, so there is no curve; run it with a smaller eval_every")
    metric = primary_metric(names) if metric is None else metric
    if metric not in names:
        raise InvalidValueError(f"no round was scored by {metric!r}; {nearest(metric, names)}")
    if axes is None:
        axes = need("matplotlib.figure").Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
    for part, kind, legend, colour, dash in _LINES:
        points = {round: means[metric] for round, scores in scored if metric in (means := scores.over(part, kind))}
        if points:
            axes.plot(list(points), list(points.values()), dash, color=colour, marker="o", markersize=3, label=legend)
    axes.set_xlabel("round")
    axes.set_ylabel(metric)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    return axes.figure
