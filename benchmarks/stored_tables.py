"""Writes and reads the CSV tables of results/, which are small enough to store next to the pages that quote them.

    python benchmarks/stored_tables.py results/mnist.csv PAGES      writes PAGES/report.html

A row is an evaluated round of a run. Columns are paths in `result.json`, such as `config.training.lr`; columns of a round begin
with `rounds.`. A table has the costs and accuracies of a round, to four digits, but not its clients, cohort or ratios.
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsekit_fl.comparison import Comparison, comparisons_of
from sparsekit_fl.stored import SCHEMA_NUMBER, flat

RUN = ("method", "seed", "note", "config", "final", "cost", "environment")
COSTS = ("flops", "flops_paper", "simulated_seconds")


def write_table(results: Sequence[tuple[str, Mapping[str, Any]]], path: Path | str) -> None:
    """Write the results of runs, (name, result) with distinct names, to a .csv file."""
    rows = [row for name, result in results for row in _rows(name, result)]
    write_rows([dict(sorted(row.items(), key=lambda item: not item[0].startswith("rounds."))) for row in rows], path)


def _rows(name: str, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kept = {part: result.get(part) for part in RUN}
    kept["final"] = {part: value for part, value in result["final"].items() if part not in ("per_client", "state_sha256")}
    decided = {name: value for name, value in result.get("method_options", {}).items() if name == "redraw_capability"}
    whole = flat({"run": name, **kept, "method_options": decided})
    for record in result["rounds"]:
        if record["evaluation"]:
            scores = {
                part: {"accuracy": _short(values.get("accuracy"))}
                for part, values in record["evaluation"].items()
                if isinstance(values, Mapping) and part in ("personal", "global", "validation")
            }
            costs = {name: _short(record["cost"].get(name)) for name in COSTS}
            yield flat({"rounds": {"round": record["round"], "cost": costs, "evaluation": scores}}) | whole


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path | str) -> None:
    """Write rows as CSV; an empty or missing cell repeats the cell above it, so that repeated values are written once."""
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
        return f"{value:.6g}"
    if isinstance(value, str) and value:
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, separators=(",", ":"))


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """Read rows that `write_rows` wrote, without values of None."""
    import pandas

    frame = pandas.read_csv(path, dtype=str, keep_default_na=False).replace("", None).ffill()
    rows = [{column: _value(cell) for column, cell in row.items()} for row in frame.to_dict("records")]
    return [{str(column): value for column, value in row.items() if value is not None} for row in rows]


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def read_results(path: Path | str) -> dict[str, dict[str, Any]]:
    """Return name of the run → its result in the form of `result.json`, with the parts that the table has."""
    found: dict[str, dict[str, Any]] = {}
    for row in read_rows(path):
        nested: dict[str, Any] = {}
        for column, value in row.items():
            inner, (*steps, last) = nested, column.split(".")
            for step in steps:
                inner = inner.setdefault(step, {})
            inner[last] = value
        record = nested.pop("rounds")
        nested["final"].setdefault("count", 0)  # a table has neither clients nor cohorts
        run = found.setdefault(
            nested["run"], {"schema": SCHEMA_NUMBER, "clients": 0, "failed_clients": {}, **nested, "rounds": []}
        )
        run["rounds"].append({"evaluation": None, "cohort": [], "dropped": [], **record})
    return found


def read_comparisons(path: Path | str) -> list[Comparison]:
    """Return the comparisons of a table."""
    return comparisons_of(read_results(path).values())


if __name__ == "__main__":
    from sparsekit_fl.report import write_report

    print(write_report(read_comparisons(sys.argv[1]), sys.argv[2]))
