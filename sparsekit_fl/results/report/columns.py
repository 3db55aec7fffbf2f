"""Columns of tables: where a result has each number, its title, and means and deviations as text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from sparsekit_fl.problem.names import lower_by_name
from sparsekit_fl.results.text import scale, seconds_text


@dataclass(frozen=True)
class Column:
    """One number of a result.

    Args:
        name: Name in files, and of the metric in the long table.
        title: Title in tables.
        path: Keys that lead to it in a result.
        unit: "share", "flops", "bytes", "seconds" or "number".
        larger: Whether large values are the good ones.
        less: Keys that lead to a part which is taken off.
    """

    name: str
    title: str
    path: tuple[str, ...] = ()
    unit: str = "number"
    larger: bool = False
    less: tuple[str, ...] = ()


COLUMNS = (
    Column("personal_accuracy", "personal accuracy", ("final", "personal", "accuracy"), "share", larger=True),
    Column("validation_accuracy", "validation accuracy", ("final", "validation", "accuracy"), "share", larger=True),
    Column("global_accuracy", "global accuracy", ("final", "global", "accuracy"), "share", larger=True),
    Column("flops", "FLOPs", ("cost", "flops"), "flops"),
    Column("flops_paper", "FLOPs, paper", ("cost", "flops_paper"), "flops"),
    Column("uplink_bytes", "sent up", ("cost", "uplink_bytes"), "bytes"),
    Column("downlink_bytes", "sent down", ("cost", "downlink_bytes"), "bytes"),
    Column("simulated_seconds", "simulated time", ("cost", "simulated_seconds"), "seconds"),
    Column("wall_seconds", "wall time", ("cost", "wall_seconds"), "seconds"),
)

# Beside a number that contains the passes by which a method decides while it trains: the same without them.
_TRAINING = {
    "flops": Column(
        "flops_training", "FLOPs, training alone", ("cost", "flops"), "flops", less=("cost", "flops_scoring")
    ),
    "simulated_seconds": Column(
        "simulated_seconds_training", "time, training alone", ("cost", "simulated_seconds"), "seconds",
        less=("cost", "simulated_seconds_scoring"),
    ),
}  # fmt: skip


def columns_of(results: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return `COLUMNS`, training alone where a method scores as it trains, and what else clients were scored by."""
    found: list[Column] = []
    for column in COLUMNS:
        found.append(column)
        beside = _TRAINING.get(column.name)
        if beside is not None and any(_at(result, beside.less) for result in results):
            found.append(beside)
    return (*found, *_metrics(results))


def _metrics(results: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return columns of other metrics than accuracy, of means by examples, and of the worst tenth of the clients."""
    finals = [result["final"] for result in results if result.get("final", {}).get("worst_decile")]
    columns = []
    for name in dict.fromkeys(name for final in finals for name in final["personal"]):
        unit, larger = ("share", True) if name == "accuracy" else ("number", not lower_by_name(name))
        kinds = [("", "", ("personal",)), ("_weighted", ", by examples", ("weighted", "personal")),
                 ("_worst_decile", ", worst tenth", ("worst_decile", "personal"))]  # fmt: skip
        # The mean of accuracy is there in any case.
        columns += [
            Column(f"personal_{name}{end}", f"{name}{title}", ("final", *path, name), unit, larger)
            for end, title, path in kinds[name == "accuracy" :]
        ]
    return columns


def _at(result: Mapping[str, Any], path: Sequence[str]) -> Any:
    found: Any = result
    for step in path:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def value_of(result: Mapping[str, Any], column: Column) -> float | None:
    """Return a number of a result; None where it has none."""
    found = _at(result, column.path)
    return None if found is None else float(found) - float((_at(result, column.less) if column.less else 0) or 0)


def texts(unit: str, means: Sequence[float | None], deviations: Sequence[float | None] = ()) -> list[str]:
    """Write the numbers of one column, all with one prefix: that of the largest.

    Args:
        unit: As of `Column`.
        means: Values; None and NaN become a dash.
        deviations: As many as there are values, written behind ±; empty for none.

    Returns:
        As many texts; those of FLOPs, bytes and seconds have three digits of the mean.
    """
    known = [abs(mean) for mean in means if mean is not None and math.isfinite(mean)]
    size, ending = scale(unit, max(known, default=0.0))
    return [
        "–" if mean is None or not math.isfinite(mean) else _text(unit, mean, deviation, size, ending)
        for mean, deviation in zip(means, deviations or [None] * len(means), strict=True)
    ]


def _text(unit: str, mean: float, deviation: float | None, size: float, ending: str) -> str:
    spread = deviation is not None and math.isfinite(deviation)
    if unit == "number":
        return f"{mean:.4g}" + (f" ± {deviation:.2g}" if spread else "")
    if unit == "seconds" and mean >= 120:
        # Beside minutes 84.3 s would have to be converted.
        return seconds_text(mean) + (f" ± {seconds_text(deviation or 0.0, minutes_from=60)}" if spread else "")
    decimals = 1 if unit == "share" else max(0, 2 - math.floor(math.log10(abs(mean) / size))) if mean else 0
    return f"{mean / size:,.{decimals}f}" + (f" ± {(deviation or 0.0) / size:,.{decimals}f}" if spread else "") + ending


def result_table(result: Mapping[str, Any]) -> Table:
    """Make the table of one run, a row per number."""
    config = result["config"]
    about, rounds = config.get("experiment", {}), config["rounds"]
    where = f" · {about['model']} on {about['dataset']}" if {"model", "dataset"} <= set(about) else ""
    title = f"{result['method']}{where} · {rounds} round{'' if rounds == 1 else 's'} · seed {result['seed']}"
    table = Table(title=escape(title), title_justify="left", show_header=False, min_width=len(title))
    table.add_column()
    table.add_column(justify="right")
    columns = columns_of([result])
    # A problem without accuracy has other metrics.
    others = len(columns) > len(COLUMNS)
    for column in sorted(columns, key=lambda column: column.path[0] != "final"):
        value = value_of(result, column)
        if value is not None or not (others and column.unit == "share"):
            table.add_row(column.title, *texts(column.unit, [value]))
    return table
