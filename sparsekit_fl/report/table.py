"""Numbers of saved results as text: units, mean ± deviation, and the table of one run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from sparsekit_fl.problem.names import lower_by_name
from sparsekit_fl.results.read import read_result
from sparsekit_fl.results.text import (
    bytes_scale,
    bytes_text,
    flops_step,
    flops_text,
    minutes_text,
    seconds_scale,
    seconds_text,
    share_text,
)

__all__ = [
    "COLUMNS",
    "Column",
    "Spread",
    "base_columns",
    "bytes_text",
    "flops_text",
    "metric_columns",
    "read_result",
    "result_table",
    "seconds_text",
    "seconds_to",
    "share_text",
    "spread",
    "value_of",
]


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds.

    Args:
        mean: None where no run has a value.
        deviation: None with fewer than two values.
        count: Number of runs with a value.
        of: Number of runs.
    """

    mean: float | None
    deviation: float | None
    count: int = 0
    of: int = 0


def spread(values: Sequence[float | None]) -> Spread:
    """Return mean and deviation of the values that are there."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    mean = statistics.fmean(found) if found else None
    return Spread(mean, statistics.stdev(found) if len(found) > 1 else None, len(found), len(values))


_TEXTS: Mapping[str, Callable[[float], str]] = {
    "share": share_text,
    "flops": flops_text,
    "bytes": bytes_text,
    "seconds": seconds_text,
    "number": "{:.4g}".format,
}


@dataclass(frozen=True)
class Column:
    """One number of a result.

    Args:
        name: Name in files.
        title: Title in tables.
        path: Keys that lead to it in a result.
        unit: "share", "flops", "bytes", "seconds" or "number".
        larger: Whether large values are the good ones.
    """

    name: str
    title: str
    path: tuple[str, ...]
    unit: str
    larger: bool = False

    def text(self, value: float | None) -> str:
        """Write a value with its unit; a dash for None."""
        return "–" if value is None else _TEXTS[self.unit](value)

    def spread_text(self, found: Spread) -> str:
        """Write mean ± deviation with one unit for both, as in `0.49 ± 0.01T`; add the number of runs if some have no value."""
        if found.mean is None:
            return "–"
        mean, deviation = found.mean, found.deviation
        if deviation is not None:
            text = self._both(mean, deviation)
        else:
            # The second digit of a short simulated time matters.
            text = f"{mean:.2f} s" if self.unit == "seconds" and 0.1 <= mean < 10 else self.text(mean)
        return text if found.count == found.of else f"{text} ({found.count} of {found.of})"

    def _both(self, mean: float, deviation: float) -> str:
        if self.unit == "seconds" and mean >= 120:
            return f"{seconds_text(mean)} ± {minutes_text(deviation)}"
        if self.unit == "number":
            return f"{mean:.4g} ± {deviation:.2g}"
        if self.unit == "flops":
            size, letter = flops_step(mean)
            # Three digits of the mean, and as many decimals of the deviation.
            decimals = max(0, 2 - math.floor(math.log10(mean / size))) if mean > 0 else 0
        else:
            scales = {"share": (0.01, "%", 1), "bytes": bytes_scale(mean), "seconds": seconds_scale(mean)}
            size, letter, decimals = scales[self.unit]
        return f"{mean / size:,.{decimals}f} ± {deviation / size:,.{decimals}f}{letter}"


COLUMNS = (
    Column("personal_accuracy", "personal accuracy", ("final", "personal", "accuracy"), "share"),
    Column("global_accuracy", "global accuracy", ("final", "global", "accuracy"), "share"),
    Column("flops_compact", "FLOPs, compact", ("cost", "flops_compact"), "flops"),
    Column("flops_rowmask", "FLOPs, row mask", ("cost", "flops_rowmask"), "flops"),
    Column("uplink_bytes", "sent up", ("cost", "uplink_bytes"), "bytes"),
    Column("downlink_bytes", "sent down", ("cost", "downlink_bytes"), "bytes"),
    Column("simulated_seconds", "simulated time", ("cost", "simulated_seconds"), "seconds"),
    Column("wall_seconds", "wall time", ("cost", "wall_seconds"), "seconds"),
)

_TRAINING = {
    "flops_compact": Column("flops_compact_training", "training alone", ("cost", "flops_compact_training"), "flops"),
    "simulated_seconds": Column(
        "simulated_seconds_training", "training alone", ("cost", "simulated_seconds_training"), "seconds"
    ),
}
"""Beside a number that contains the passes by which methods decide: the same without them. Goes with 0.3."""


def base_columns(results: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return `COLUMNS`, with the numbers of training alone beside FLOPs and simulated time where a method scores as it trains.

    Args:
        results: As `read_result` gives them.
    """
    parts = {"flops_compact": "flops_scoring", "simulated_seconds": "simulated_seconds_scoring"}
    known = {name for name, part in parts.items() if any(result["cost"].get(part) for result in results)}
    pairs = ((column, _TRAINING[column.name] if column.name in known else None) for column in COLUMNS)
    return tuple(column for pair in pairs for column in pair if column is not None)


def metric_columns(results: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns of what `COLUMNS` lacks: other metrics than accuracy, means by examples, and the worst tenth.

    Args:
        results: As in `result.json`; those of version 0.1 have none of these.
    """
    finals = [result["final"] for result in results if result.get("final", {}).get("worst")]
    names = dict.fromkeys(name for final in finals for name in final["personal"])
    columns = []
    for name in names:
        unit, larger = ("share", True) if name == "accuracy" else ("number", not lower_by_name(name))
        kinds: list[tuple[str, str, tuple[str, ...]]] = []
        kinds += [] if name == "accuracy" else [("", "", ("final", "personal", name))]
        kinds += [("_weighted", ", by examples", ("final", "weighted", "personal", name)),
                  ("_worst", ", worst tenth", ("final", "worst", "personal", name))]  # fmt: skip
        columns += [Column(f"personal_{name}{end}", f"{name}{title}", path, unit, larger) for end, title, path in kinds]
    return tuple(columns)


def value_of(result: Mapping[str, Any], column: Column) -> float | None:
    """Return a number of a result; None where it has none."""
    found: Any = result
    for step in column.path:
        found = found.get(step) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def seconds_to(result: Mapping[str, Any], target: float) -> float | None:
    """Return the simulated seconds until the mean personal accuracy first reached a target.

    Only rounds that were evaluated can reach it, so the answer is no finer than the run's `eval_every`.

    Args:
        result: As in `result.json`.
        target: In (0, 1].

    Returns:
        The seconds; None where no evaluated round reached it.
    """
    for record in result["rounds"]:
        accuracy = ((record["evaluation"] or {}).get("personal") or {}).get("accuracy")
        if accuracy is not None and accuracy >= target:
            return float(record["cost"]["simulated_seconds"])
    return None


def _rounds_text(rounds: int) -> str:
    return f"{rounds} round{'' if rounds == 1 else 's'}"


def result_table(result: Mapping[str, Any]) -> Table:
    """Make the table of one run, a row per number.

    Args:
        result: As in `result.json`.
    """
    config = result["config"]
    about = config.get("experiment", {})
    where = f" · {about['model']} on {about['dataset']}" if {"model", "dataset"} <= set(about) else ""
    title = f"{result['method']}{where} · {_rounds_text(config['rounds'])} · seed {result['seed']}"
    table = Table(title=escape(title), title_justify="left", show_header=False, min_width=len(title))
    table.add_column()
    table.add_column(justify="right")
    more = metric_columns([result])
    shares = [column for column in COLUMNS if column.unit == "share"]
    # A problem without accuracy has other metrics.
    shown = [column for column in shares if not more or value_of(result, column) is not None]
    spent = [column for column in base_columns([result]) if column.unit != "share"]
    for column in (*shown, *more, *spent):
        table.add_row(column.title, column.text(value_of(result, column)))
    return table
