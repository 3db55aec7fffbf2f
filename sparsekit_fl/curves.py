"""Curves of finished runs: mean scores over rounds, FLOPs and simulated time. Needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparsekit.errors import require
from sparsekit.page import chart
from sparsekit_fl.stored import number_text, primary_metric

Results = Sequence[Mapping[str, Any]]
"""Contents of `result.json` files."""

AXES = (
    ("round", "round", "number"),
    ("flops", "FLOPs of all clients so far", "flops"),
    ("simulated_seconds", "simulated time so far", "seconds"),
)
_OVER = {"round": "rounds", "flops": "FLOPs", "simulated_seconds": "simulated time"}


def curves_of(results: Results, methods: Sequence[str], draw: Callable[..., str] = chart) -> list[str]:
    """Return charts of the mean score over rounds, FLOPs and simulated time; they are empty if no method was scored twice."""
    metric, unit = metric_of(results)
    means = means_of(results, metric)
    charts = []
    for name, title, x_unit in AXES:
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for method in methods:
            own = means[means["series"] == method]
            lines |= {method: list(zip(own[name], own["y"], own["deviation"], strict=True))} if len(own) else {}
        about = f"Mean personal {metric} over {_OVER[name]}"
        charts.append(draw(lines, x=title, y=about, x_text=writer_of(x_unit), y_text=writer_of(unit)))
    return charts


def writer_of(unit: str) -> Callable[[float], str]:
    return (lambda value: f"{value:g}") if unit == "number" else (lambda value: number_text(unit, value))


def metric_of(results: Results) -> tuple[str, str]:
    """Return the metric that stands for all, and its unit."""
    name = primary_metric(dict.fromkeys(name for result in results for name in result["final"].get("personal", {})))
    return name, "share" if name == "accuracy" else "number"


def scores_of(result: Mapping[str, Any], metric: str) -> list[dict[str, float]]:
    return [
        {"round": record["round"], **record["cost"], "y": record["evaluation"]["personal"][metric]}
        for record in result["rounds"]
        if record["evaluation"] and (record["evaluation"].get("personal") or {}).get(metric) is not None
    ]


def means_of(results: Results, metric: str) -> Any:
    """Return mean scores by method and round as a DataFrame, without rounds that a seed did not score, and single points."""
    names = [name for name, _, _ in AXES]
    rows = [
        {"series": result["method"], "seed": result["seed"], **{name: score[name] for name in (*names, "y")}}
        for result in results
        for score in scores_of(result, metric)
    ]
    frame = require("pandas").DataFrame(rows, columns=["series", "seed", *names, "y"]).dropna()
    groups = frame.assign(at=frame["round"]).groupby(["series", "at"])
    means = groups.agg(n=("seed", "nunique"), y=("y", "mean"), deviation=("y", "std"), **{one: (one, "mean") for one in names})
    means = means.fillna({"deviation": 0.0}).reset_index()
    means = means[means["n"] == means["series"].map(frame.groupby("series")["seed"].nunique())]
    return means[means.groupby("series")["at"].transform("size") > 1]
