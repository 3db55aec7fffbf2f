"""The bandits' ratios over the rounds: the mean of what clients executed, by what their devices could do."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from sparsekit_fl.paper.figures.common import level_of_figure, own_method, plate_of
from sparsekit_fl.report.chart import Chart, Series
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.plate import Plate
from sparsekit_fl.report.table import spread
from sparsekit_fl.streams import Streams

__all__ = ["capabilities_of", "ratios_over_time"]

_WINDOWS = 10


def ratios_over_time(comparison: Comparison) -> Plate | None:
    """Make the chart of FedLPS, or of the first method whose ratio is a bandit's; None where there is none.

    A point is the mean over clients and rounds of a tenth of the run, then over seeds.

    Args:
        comparison: Results under one protocol.
    """
    section, level = comparison.section, level_of_figure(comparison)
    if level is None:
        return None
    own = own_method(comparison)
    for method in sorted(section.methods, key=lambda method: method != own):
        trials = [trial for trial in section.of(method, level) if "Bandit" in str(trial.policies.get("ratio", ""))]
        runs = [_means(trial.result) for trial in trials if trial.result]
        series = _series(runs)
        if series:
            chart = Chart(
                name="bandit-ratios", title=f"what bandits of {method} chose, by capability", kind="curve",
                series=series, x="round", y="mean ratio that clients executed", unit="number", y_unit="share", legend=True,
            )  # fmt: skip
            ends = ", ".join(f"{one.y[-1]:.2f} of {one.label.rpartition(' ')[2]}" for one in series)
            return plate_of(
                comparison, "Ratios over time", chart, f"mean ratio at the end, of what the device could train: {ends}."
            )
    return None


def capabilities_of(result: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, float]:
    """Return client id → largest ratio of its device in a round.

    Results before version 0.3 lack it; for presets, whose devices are all equal but for the level that is drawn, it is drawn
    again from the seed.

    Args:
        result: As in `result.json`.
        record: One of its rounds.

    Returns:
        Nothing where it is not known.
    """
    if record.get("capabilities"):
        return dict(record["capabilities"])
    config = result["config"]
    levels = config.get("capability_levels")
    if not levels or "preset" not in config.get("experiment", {}):
        return {}
    round = int(record["round"]) if config.get("capability") == "dynamic" else 0
    streams = Streams(int(result["seed"]))
    return {
        client: float(levels[int(streams.capability(round, int(client)).integers(len(levels)))])
        for client in record.get("ratios", {})
    }


def _means(result: Mapping[str, Any]) -> dict[float, dict[int, float]]:
    """Capability → last round of each tenth of the run → mean of the executed ratios."""
    rounds = result["rounds"]
    size = max(1, len(rounds) // _WINDOWS)
    found: dict[float, dict[int, list[float]]] = {}
    for record in rounds:
        able = capabilities_of(result, record)
        window = min(-(-int(record["round"]) // size) * size, len(rounds))
        for client, ratio in record.get("ratios", {}).items():
            if client in able:
                found.setdefault(able[client], {}).setdefault(window, []).append(float(ratio))
    return {able: {window: sum(own) / len(own) for window, own in sorted(windows.items())} for able, windows in found.items()}


def _series(runs: list[dict[float, dict[int, float]]]) -> tuple[Series, ...]:
    series = []
    levels = sorted({able for run in runs for able in run}, reverse=True)
    for place, able in enumerate(levels):
        windows = sorted({window for run in runs for window in run.get(able, {})})
        found = [spread([run.get(able, {}).get(window) for run in runs]) for window in windows]
        if len(windows) > 1:
            series.append(
                Series(
                    method=f"capability {able:g}",
                    place=place,
                    x=tuple(windows),
                    y=tuple(one.mean or 0.0 for one in found),
                    deviation=tuple(one.deviation or 0.0 for one in found),
                    label=f"devices of {Fraction(able).limit_denominator(1000)}",
                )
            )
    return tuple(series)
