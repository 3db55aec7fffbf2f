"""Numbers of saved results as text: units, mean ± deviation, and the table of one run. Only here are bytes written as MB."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sparsekit.errors import DataError

__all__ = [
    "COLUMNS",
    "Column",
    "Spread",
    "bytes_text",
    "flops_text",
    "read_result",
    "result_table",
    "seconds_text",
    "seconds_to",
    "share_text",
    "spread",
    "value_of",
]

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _step(flops: float) -> tuple[float, str]:
    """Return the size and the letter of the prefix: `(1e12, "T")` from 1e11 on."""
    return next(((size, letter) for size, letter in _STEPS if flops >= size / 10), (1.0, ""))


def flops_text(flops: float) -> str:
    """For example `0.53T`: three digits and a prefix; below a tenth of a step the next smaller prefix."""
    size, letter = _step(flops)
    return f"{flops / size:.3g}{letter}" if letter else f"{flops:.0f}"


def bytes_text(count: float) -> str:
    """For example `12.3 MB`; below 0.1 MB in kilobytes, of 10³ bytes, and below 0.1 kB in bytes."""
    size, unit, decimals = _bytes_scale(count)
    return f"{count / size:,.{decimals}f}{unit}"


def _bytes_scale(count: float) -> tuple[float, str, int]:
    """Return size, unit and decimals: `(1e6, " MB", 1)` from 1e5 on, and for zero."""
    if count >= 1e5 or count == 0:
        return 1e6, " MB", 1
    return (1e3, " kB", 1) if count >= 1e2 else (1.0, " bytes", 0)


def _seconds_scale(seconds: float) -> tuple[float, str, int]:
    """Return size, unit and decimals: milliseconds below a tenth of a second, where there are any."""
    if 0 < seconds < 0.1:
        return 1e-3, " ms", 0 if seconds >= 0.01 else 1
    return 1.0, " s", 2 if seconds < 10 else 1


def seconds_text(seconds: float) -> str:
    """For example `12.3 s`, `4 min 05 s` from two minutes on, and `4.2 ms` below a tenth of a second."""
    if seconds < 120:
        size, unit, decimals = _seconds_scale(seconds)
        return f"{seconds / size:.{min(decimals, 1)}f}{unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _minutes_text(seconds: float) -> str:
    """For example `1 min 24 s` beside minutes, where `84.3 s` would have to be converted; below a minute `24.3 s`."""
    if seconds < 60:
        return seconds_text(seconds)
    return seconds_text(seconds) if seconds >= 120 else f"1 min {round(seconds) - 60:02d} s"


def share_text(share: float | None) -> str:
    """For example `98.8%`; a dash for None and for numbers that are not finite."""
    return "–" if share is None or not math.isfinite(share) else f"{share:.1%}"


def read_result(path: Path | str) -> dict[str, Any]:
    """Read `result.json`, or the one in a folder.

    Raises:
        DataError: there is none, or it is not a result.
    """
    path = Path(path)
    path = path / "result.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        missing = {"method", "seed", "final", "cost", "rounds"} - set(raw)
    except OSError as error:
        raise DataError(f"no result at {path}: {error.strerror}; pass the --out folder of a finished run") from error
    except (json.JSONDecodeError, TypeError) as error:
        raise DataError(f"{path} is not a result: {error}; pass the --out folder of a finished run") from error
    if missing:
        raise DataError(f"{path} is not a result: it lacks {', '.join(sorted(missing))}")
    assert isinstance(raw, dict)
    return raw


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


_TEXTS = {"share": share_text, "flops": flops_text, "bytes": bytes_text, "seconds": seconds_text}


@dataclass(frozen=True)
class Column:
    """One number of a result.

    Args:
        name: Name in files.
        title: Title in tables.
        path: Keys that lead to it in a result.
        unit: "share", "flops", "bytes" or "seconds".
    """

    name: str
    title: str
    path: tuple[str, ...]
    unit: str

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
            return f"{seconds_text(mean)} ± {_minutes_text(deviation)}"
        if self.unit == "flops":
            size, letter = _step(mean)
            # Three digits of the mean, and as many decimals of the deviation.
            decimals = max(0, 2 - math.floor(math.log10(mean / size))) if mean > 0 else 0
        else:
            scales = {"share": (0.01, "%", 1), "bytes": _bytes_scale(mean), "seconds": _seconds_scale(mean)}
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
    for column in COLUMNS:
        table.add_row(column.title, column.text(value_of(result, column)))
    return table
