"""Results as a table: one CSV file holds the runs of a comparison, small enough to keep beside the pages that quote it.

A row is an evaluated round of a run; an empty or missing cell repeats the cell above it, so that what all runs share is written
once. Columns are paths in `result.json`, such as `config.training.lr`; those of a round begin with `rounds.`. Of a round the
costs and the accuracy are kept, to four digits; clients, cohorts, ratios and fingerprints are left out.
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
_ROUND_DIGITS = 4


def write_table(results: Sequence[tuple[str, Mapping[str, Any]]], path: Path | str) -> None:
    """Write a table.

    Args:
        results: The name of each run, which must differ, and the content of its `result.json`.
        path: File, whose name ends in .csv.
    """
    rows = [row for name, result in results for row in _rows(name, result)]
    columns = sorted(dict.fromkeys(column for row in rows for column in row), key=lambda name: not name.startswith("rounds."))
    above: dict[str, str] = {}
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            cells = {column: _cell(row.get(column), column) for column in columns}
            new = ["" if above.get(column) == cell else cell for column, cell in cells.items()]
            writer.writerow(new[: max(place for place, cell in enumerate(new, 1) if cell)])
            above = cells


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
            costs = {name: record["cost"].get(name) for name in _COSTS}
            yield flat({"rounds": {"round": record["round"], "cost": costs, "evaluation": scores}}) | whole


def _cell(value: Any, column: str) -> str:
    if column.startswith("rounds.") and isinstance(value, int | float):
        value = float(f"{value:.{_ROUND_DIGITS}g}") if isinstance(value, float) or value > 10**_ROUND_DIGITS else value
    elif isinstance(value, float):
        value = float(f"{value:.{_DIGITS}g}")
    if isinstance(value, str) and value:
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value)


def read_table(path: Path | str) -> dict[str, dict[str, Any]]:
    """Read a table.

    Returns:
        The name of each run → its result as far as the table has it, in the form of `read_result`.

    Raises:
        DataError: the file cannot be read, or is not such a table.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(_filled(csv.DictReader(file)))
        found: dict[str, dict[str, Any]] = {}
        for row in rows:
            record = row.pop("rounds")
            run = found.setdefault(row["run"], {"schema": SCHEMA_NUMBER, **row, "rounds": []})
            run["rounds"].append({"evaluation": None, **record})
        if not all({"method", "seed", "config", "final", "cost"} <= run.keys() for run in found.values()) or not found:
            raise ValueError("it has no run, or lacks columns")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a table of results: {error!r}") from error
    return found


def _filled(rows: Iterable[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    above: dict[str, str] = {}
    for row in rows:
        above = {column: cell or above[column] for column, cell in row.items()}
        nested: dict[str, Any] = {}
        for column, cell in above.items():
            *path, last = column.split(".")
            place = nested
            for step in path:
                place = place.setdefault(step, {})
            value = _value(cell)
            if value is not None:
                place[last] = value
        yield nested


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell
