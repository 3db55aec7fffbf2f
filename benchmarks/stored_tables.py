"""Write the CSV tables of results/, small enough to keep next to the pages that quote them. `stored.py` reads them."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsekit_fl.stored import flat

RUN = ("method", "seed", "note", "config", "final", "cost", "environment")
COSTS = ("flops", "flops_paper", "simulated_seconds")


def write_table(results: Sequence[tuple[str, Mapping[str, Any]]], path: Path | str) -> None:
    """Write the results of runs.

    Args:
        results: The name of each run, which must differ, and the content of its `result.json`.
        path: File, whose name ends in .csv.
    """
    rows = [row for name, result in results for row in _rows(name, result)]
    write_rows([dict(sorted(row.items(), key=lambda item: not item[0].startswith("rounds."))) for row in rows], path)


def _rows(name: str, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kept = {part: result.get(part) for part in RUN}
    kept["final"] = {part: value for part, value in result["final"].items() if part not in ("per_client", "state_sha256")}
    decided = {name: value for name, value in result.get("policies", {}).items() if name == "capability"}
    whole = flat({"run": name, **kept, "policies": decided})
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
        return f"{value:.6g}"
    if isinstance(value, str) and value:
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, separators=(",", ":"))
