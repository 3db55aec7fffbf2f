"""Results in files and in words, without torch: `result.json`, the CSV table of a comparison, and numbers with their units.

In a CSV table, a row is an evaluated round of a run. Columns are paths in `result.json`, such as `config.training.lr`; those of
a round begin with `rounds.`. Of a round, the table has the costs and the accuracy, to four digits. It leaves out clients,
cohorts, ratios and fingerprints.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sparsekit.errors import DataError

SCHEMA_NUMBER: Final = 4
"""It goes up when a reader of the former schema would misread a file; what is only added leaves it as it is."""

_NEEDED = ("schema", "method", "seed", "final", "cost", "rounds")
_STEPS = {
    "share": ((0.01, "%"),),
    "flops": ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")),
    "bytes": ((1e6, " MB"), (1e3, " kB"), (1.0, " bytes")),
    "seconds": ((1.0, " s"), (1e-3, " ms")),
}


def read_result(path: Path | str) -> dict[str, Any]:
    """Read `result.json`, or the one in a folder, as plain JSON values.

    Raises:
        DataError: there is none, it is not a result, or another version wrote it.
    """
    path = Path(path)
    path = path / "result.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        missing = set(_NEEDED) - set(raw)
    except OSError as error:
        raise DataError(f"no result at {path}: {error.strerror}; pass the --out folder of a finished run") from error
    except (json.JSONDecodeError, TypeError) as error:
        raise DataError(f"{path} is not a result: {error}; pass the --out folder of a finished run") from error
    if missing:
        raise DataError(f"{path} is not a result: it lacks {', '.join(sorted(missing))}")
    assert isinstance(raw, dict)
    if raw["schema"] != SCHEMA_NUMBER:
        raise DataError(
            f"{path} has schema {raw['schema']}, and this version reads {SCHEMA_NUMBER}; install the one that wrote it"
        )
    return raw


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested settings: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {path + name: value})
    return found


def read_table(path: Path | str) -> dict[str, dict[str, Any]]:
    """Read the results of runs.

    Returns:
        The name of each run → its result as far as the table has it, in the form of `read_result`.

    Raises:
        DataError: the file cannot be read, or is not such a table.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        for row in map(_nested, read_rows(path)):
            record = row.pop("rounds")
            run = found.setdefault(row["run"], {"schema": SCHEMA_NUMBER, **row, "rounds": []})
            run["rounds"].append({"evaluation": None, **record})
        if not all({"method", "seed", "config", "final", "cost"} <= run.keys() for run in found.values()) or not found:
            raise ValueError("it has no run, or lacks columns")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a table of results: {error!r}") from error
    return found


def _nested(row: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for column, value in row.items():
        *path, last = column.split(".")
        inner = nested
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return nested


def read_rows(path: Path | str) -> Iterator[dict[str, Any]]:
    """Read a CSV file in which an empty or missing cell repeats the cell above it, row by row, without what is None.

    Raises:
        DataError: the file cannot be read.
        KeyError: the first row has an empty cell.
    """
    above: dict[str, str] = {}
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                above = {column: cell or above[column] for column, cell in row.items()}
                values = {column: _value(cell) for column, cell in above.items()}
                yield {column: value for column, value in values.items() if value is not None}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a table of results: {error}") from error


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return the size and the sign of the step by which numbers up to `largest` are written: `(1e12, "T")` from 1e11 on.

    Args:
        unit: "share", "flops", "bytes" or "seconds"; others have no steps.
        largest: No bytes and no seconds are zero of the first step.
    """
    steps = _STEPS.get(unit, ((1.0, ""),))
    if largest == 0 and unit != "flops":
        return steps[0]
    return next((step for step in steps if largest >= step[0] / 10), steps[-1])


def flops_text(flops: float) -> str:
    """For example `0.53T`: three digits and a prefix; below a tenth of a step the next smaller prefix."""
    size, letter = scale("flops", flops)
    return f"{flops / size:.3g}{letter}" if letter else f"{flops:.0f}"


def seconds_text(seconds: float, *, minutes_from: float = 120) -> str:
    """For example `12.3 s`, `4 min 05 s` from two minutes on, and `4.2 ms` below a tenth of a second."""
    if seconds < minutes_from:
        size, unit = scale("seconds", seconds)
        return f"{seconds / size:.{0 if 0.01 <= seconds < 0.1 else 1}f}{unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def share_text(share: float | None) -> str:
    """For example `98.8%`; a dash for None and for numbers that are not finite."""
    return "–" if share is None or not math.isfinite(share) else f"{share:.1%}"


def score_text(metric: str, value: float) -> str:
    """For example `accuracy 98.4%` or `rmse 0.213`."""
    return f"{metric} {share_text(value) if metric == 'accuracy' else f'{value:.4g}'}"
