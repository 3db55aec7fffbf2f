"""Stored results: one CSV file holds the runs of a comparison, small enough to keep beside the pages that quote it.

A row is an evaluated round of a run. Columns are paths in `result.json`, such as `config.training.lr`; those of a round begin
with `rounds.`. Of a round the costs and the accuracy are kept, to four digits; clients, cohorts, ratios and fingerprints are
left out.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError
from sparsekit_fl.results.read import SCHEMA_NUMBER, flat

_RUN = ("method", "seed", "note", "config", "final", "cost", "environment")
_COSTS = ("flops", "flops_paper", "simulated_seconds")
_DIGITS = 6


def write_table(results: Sequence[tuple[str, Mapping[str, Any]]], path: Path | str) -> None:
    """Write the results of runs.

    Args:
        results: The name of each run, which must differ, and the content of its `result.json`.
        path: File, whose name ends in .csv.
    """
    rows = [row for name, result in results for row in _rows(name, result)]
    write_rows([dict(sorted(row.items(), key=lambda item: not item[0].startswith("rounds."))) for row in rows], path)


def _rows(name: str, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kept = {part: result.get(part) for part in _RUN}
    kept["final"] = {part: value for part, value in result["final"].items() if part not in ("per_client", "state_sha256")}
    decided = {name: value for name, value in result.get("policies", {}).items() if name == "capability"}
    whole = flat({"run": name, **kept, "policies": decided})
    for record in result["rounds"]:
        if record["evaluation"]:
            scores = {
                part: {"accuracy": values.get("accuracy")}
                for part, values in record["evaluation"].items()
                if isinstance(values, Mapping) and part in ("personal", "global", "validation")
            }
            costs = {name: _short(record["cost"].get(name), 4) for name in _COSTS}
            scores = {part: {"accuracy": _short(values["accuracy"], 4)} for part, values in scores.items()}
            yield flat({"rounds": {"round": record["round"], "cost": costs, "evaluation": scores}}) | whole


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


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
        place = nested
        for step in path:
            place = place.setdefault(step, {})
        place[last] = value
    return nested


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path | str) -> None:
    """Write rows as CSV; an empty or missing cell repeats the cell above it, so that what rows share is written once.

    Args:
        rows: Plain JSON values by column; a missing one is as None. Numbers are written with six digits, integers in full.
        path: File to write.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    above: dict[str, str] = {}
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            cells = {column: _cell(row.get(column)) for column in columns}
            new = ["" if above.get(column) == cell else cell for column, cell in cells.items()]
            writer.writerow(new[: max((place for place, cell in enumerate(new, 1) if cell), default=1)])
            above = cells


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, str) and value:
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, separators=(",", ":"))


def read_rows(path: Path | str) -> Iterable[dict[str, Any]]:
    """Read what `write_rows` wrote, row by row, without what is None.

    Raises:
        DataError: the file cannot be read.
        KeyError: a cell repeats none.
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
