"""Curves of saved results: accuracy over rounds, FLOPs and simulated time, as means over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsekit.errors import DataError

__all__ = ["Curve", "curves_of", "metrics_of"]


@dataclass(frozen=True, eq=False)
class Curve:
    """One method: means over its runs at the rounds in which all of them were evaluated.

    Args:
        method: Name of the method.
        rounds: int (points,).
        flops: float (points,), compact, of the run so far.
        flops_rowmask: float (points,), by the row-mask convention; NaN where the results have none.
        seconds: float (points,), simulated, of the run so far; NaN where the results have none.
        accuracy: float (points,), personal accuracy in [0, 1], or the value of another metric.
        deviation: float (points,), over runs; zeros for a single one.
        runs: Number of runs.
    """

    method: str
    rounds: np.ndarray[Any, Any]
    flops: np.ndarray[Any, Any]
    seconds: np.ndarray[Any, Any]
    accuracy: np.ndarray[Any, Any]
    deviation: np.ndarray[Any, Any]
    runs: int
    flops_rowmask: np.ndarray[Any, Any]


def _points(result: Mapping[str, Any], metric: str, part: str, kind: str) -> dict[int, tuple[float, ...]]:
    """Map each evaluated round to (FLOPs so far, value of the metric, simulated seconds so far, row-mask FLOPs so far)."""
    found: dict[int, tuple[float, ...]] = {}
    for record in result["rounds"]:
        scores = record["evaluation"] or {}
        value = ((scores if kind == "mean" else scores.get(kind) or {}).get(part) or {}).get(metric)
        if value is not None:
            cost = record["cost"]
            seconds = float(cost.get("simulated_seconds", math.nan))
            rowmask = float(cost.get("flops_rowmask", math.nan))
            found[int(record["round"])] = float(cost["flops_compact"]), float(value), seconds, rowmask
    return found


def curves_of(
    results: Sequence[Mapping[str, Any]], *, metric: str = "accuracy", part: str = "personal", kind: str = "mean"
) -> list[Curve]:
    """Group results by method, in the order in which methods first appear.

    Args:
        results: As in `result.json`.
        metric: Name of the metric.
        part: "personal", "validation" or "global".
        kind: "mean", "weighted" or "worst".

    Raises:
        DataError: a method has no round in which all its runs were evaluated.
    """
    groups: dict[str, list[dict[int, tuple[float, ...]]]] = {}
    for result in results:
        groups.setdefault(str(result["method"]), []).append(_points(result, metric, part, kind))
    curves = []
    for method, runs in groups.items():
        rounds = sorted(set.intersection(*map(set, runs)))
        if not rounds:
            raise DataError(f"the runs of {method!r} have no scored round in common; run them with one --eval-every")
        table = np.array([[run[round] for round in rounds] for run in runs])
        flops, accuracy, seconds, rowmask = table.mean(0).T
        deviation = table[:, :, 1].std(0, ddof=1) if len(runs) > 1 else np.zeros(len(rounds))
        curves.append(Curve(method, np.array(rounds), flops, seconds, accuracy, deviation, len(runs), rowmask))
    return curves


def metrics_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics by which clients were scored at the end, in the order in which they first appear.

    Args:
        results: As in `result.json`.
    """
    return list(dict.fromkeys(name for result in results for name in result["final"]["personal"]))
