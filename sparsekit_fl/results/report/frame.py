"""All numbers of a comparison as one long table: a row per run, round and metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparsekit_fl.results.extra import need
from sparsekit_fl.results.report.columns import Column, value_of
from sparsekit_fl.results.report.trials import Trial

END = -1
"""The "round" of the numbers of a whole run: its final scores and its costs."""

LEVEL = ["heterogeneity", "lack_classes"]

_COSTS = ("flops_compact", "flops_rowmask", "simulated_seconds")


def long_frame(trials: Sequence[Trial], columns: Sequence[Column]) -> Any:
    """Return a DataFrame of finished trials with the columns method, heterogeneity, lack_classes, seed, round, metric, value.

    A round has `PART_METRIC` and `PART_METRIC_worst` of what was scored in it, its costs so far, and under `ratio C` the mean
    ratio that devices of capability C executed. The round `END` has the columns of the table.

    Args:
        trials: The trials.
        columns: Columns of the table.

    Raises:
        MissingDependencyError: pandas is not installed.
    """
    rows = []
    for trial in trials:
        about = (trial.method, trial.heterogeneity, trial.lack_classes, trial.seed)
        result = trial.result or {}
        ended = ((END, column.name, value_of(result, column)) for column in columns)
        rows += [(*about, *row) for row in (*ended, *_rounds(result.get("rounds", ())))]
    frame = need("pandas").DataFrame(rows, columns=["method", *LEVEL, "seed", "round", "metric", "value"])
    return frame.astype({"value": float})


def _rounds(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, float | None]]:
    for record in records:
        round, cost, scores = int(record["round"]), record["cost"], record["evaluation"] or {}
        able = record.get("capabilities") or {}
        executed: dict[float, list[float]] = {}
        for client, ratio in (record.get("ratios") or {}).items():
            if client in able:
                executed.setdefault(able[client], []).append(ratio)
        for capability, ratios in executed.items():
            yield round, f"ratio {capability:g}", sum(ratios) / len(ratios)
        if not scores:
            continue
        for kind, parts in (("", scores), ("_worst", scores.get("worst") or {})):
            for part in ("personal", "global"):
                for metric, value in (parts.get(part) or {}).items():
                    yield round, f"{part}_{metric}{kind}", value
        for name in _COSTS:
            yield round, name, cost.get(name)


def runs_frame(frame: Any, target: float) -> Any:
    """Return a row per run and a column per number, and `target_seconds`: the simulated time until a mean accuracy.

    Only rounds that were scored can reach it, so the time is no finer than the run's `eval_every`.

    Args:
        frame: From `long_frame`.
        target: The mean personal accuracy.
    """
    runs = ["method", *LEVEL, "seed"]
    wide = frame[frame["round"] == END].pivot(index=runs, columns="metric", values="value")
    scored = frame[frame["round"] != END].pivot(index=[*runs, "round"], columns="metric", values="value").reset_index("round")
    wide["target_seconds"] = math.nan
    if "personal_accuracy" in scored:
        reached = scored[scored["personal_accuracy"] >= target].sort_values("round")
        wide["target_seconds"] = reached.groupby(level=runs)["simulated_seconds"].first()
    return wide


def curve_points(frame: Any, x: str, y: str) -> Any:
    """Return the points of curves: means over the seeds of a method, in the rounds in which all of them were scored.

    Args:
        frame: From `long_frame`, at one level.
        x: Metric of the x axis, or "round".
        y: Metric of the y axis.

    Returns:
        Columns series, x, y, deviation (0 for a single run); empty where nothing is known.
    """
    numbers = frame[(frame["round"] != END) & frame["metric"].isin([x, y])]
    wide = numbers.pivot(index=["method", "seed", "round"], columns="metric", values="value").reset_index()
    if not {x, y} <= set(wide):
        return need("pandas").DataFrame(columns=["series", "x", "y", "deviation"])
    groups = wide.dropna(subset=[x, y]).groupby(["method", "round"], sort=False)
    points = groups.agg(x=(x, "mean"), y=(y, "mean"), deviation=(y, "std"), n=("seed", "nunique")).reset_index()
    seeds = frame.groupby("method")["seed"].nunique()
    points = points[points["n"] == points["method"].map(seeds)].sort_values("round", kind="stable")
    return points.rename(columns={"method": "series"})[["series", "x", "y", "deviation"]].fillna({"deviation": 0.0})
