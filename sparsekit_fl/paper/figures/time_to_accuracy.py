"""Figure 5: simulated time until a target accuracy, a bar per method."""

from __future__ import annotations

import math

from sparsekit_fl.paper.figures.common import as_in_the_paper, is_rival, level_of_figure, own_method, plate_of, short_seconds
from sparsekit_fl.paper.published import published_text
from sparsekit_fl.report.chart import Chart, Series
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.plate import Plate
from sparsekit_fl.report.table import Spread, seconds_to, spread

__all__ = ["time_to_accuracy"]

_NUMBER = "Figure 5"


def time_to_accuracy(comparison: Comparison) -> Plate | None:
    """Make Figure 5 at the paper's target, or where it has none at that of the comparison; None where nobody reached it.

    Args:
        comparison: Results under one protocol.
    """
    says = published_text(_NUMBER, comparison.section.dataset)
    target = comparison.target or says.get("target") or comparison.goal
    own, times = own_method(comparison), _times(comparison, target)
    reached = {method: found.mean for method, found in times.items() if found.mean is not None}
    if own not in times or not any(map(is_rival, times)) or not reached:
        return None
    published = says if says.get("target") == target else {}
    series = [
        Series(
            method=method,
            place=comparison.places[method],
            x=(),
            y=() if found.mean is None else (found.mean,),
            deviation=() if found.mean is None else (found.deviation or 0.0,),
            second=published.get("fedlps_seconds") if method == own else None,
            subject=method == own,
        )
        for method, found in times.items()
    ]
    if published:
        series.append(
            Series(
                method="published baseline",
                place=max(comparison.places.values()) + 1,
                x=(),
                y=(),
                deviation=(),
                second=published["baseline_seconds"],
                label="best baseline, published",
            )
        )
    series.sort(key=lambda one: one.y[0] if one.y else math.inf if one.second is None else one.second)
    rings = "; ring: published" if published else ""
    chart = Chart(
        name="paper-5-time-to-accuracy", title=f"simulated time to {100 * target:.3g}% accuracy", kind="bar",
        series=tuple(series), x=f"simulated seconds; no bar: never reached{rings}", y="", unit="seconds",
    )  # fmt: skip
    seeds = " with every seed" if len(comparison.section.seeds) > 1 else ""
    return plate_of(comparison, _NUMBER, as_in_the_paper(comparison, chart), _found(own, reached, times, seeds))


def _times(comparison: Comparison, target: float) -> dict[str, Spread]:
    """Mean over the seeds, where all of them reached the target; a method that some seeds do not reach it with has none."""
    level, found = level_of_figure(comparison), {}
    own = own_method(comparison)
    if level is None:
        return {}
    for method in comparison.section.methods:
        if method != own and not is_rival(method):
            continue
        trials = comparison.section.of(method, level)
        values = [seconds_to(trial.result, target) for trial in trials if trial.result]
        if values:
            found[method] = spread(values if None not in values else [None] * len(values))
    return found


def _found(own: str, reached: dict[str, float], times: dict[str, Spread], seeds: str) -> str:
    faster = [(seconds, method) for method, seconds in reached.items() if is_rival(method)]
    never = sum(is_rival(method) and method not in reached for method in times)
    rest = f"; {never} of its rivals do not reach it{seeds}" if never else ""
    if own not in reached:
        best = f"; {min(faster)[1]} does after {short_seconds(min(faster)[0])}" if faster else ""
        return f"{own} does not reach it{seeds}{best}."
    if not faster:
        return f"{own} takes {short_seconds(reached[own])}{rest}."
    seconds, method = min(faster)
    change = 100 * (1 - reached[own] / seconds)
    than = f"{abs(change):.0f} % {'less' if change >= 0 else 'more'} than the fastest rival"
    return f"{own} takes {short_seconds(reached[own])}, {than}, {method}, with {short_seconds(seconds)}{rest}."
