"""The published tables beside ours: where they differ by more than chance, and why.

The numbers are in `published.json`, the reasons in `reasons.json`; a file `reasons.json` in a report's folder comes first.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit.errors import DataError
from sparsekit_fl.report.comparison import Comparison, Row
from sparsekit_fl.report.table import Spread
from sparsekit_fl.report.trials import Level

__all__ = [
    "PUBLISHED_LEVELS",
    "UNEXPLAINED",
    "Beside",
    "Figure",
    "beside_published",
    "in_published_order",
    "published_csv",
    "published_source",
    "show_published",
]

_ROUNDING_E12 = 0.05
DEVIATIONS = 2.0
UNEXPLAINED = "no reason is known"
# Of heterogeneity: rows at other levels have no published numbers.
PUBLISHED_LEVELS = (Level("high"), Level())


@cache
def _published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("published.json").read_text(encoding="utf-8"))
    return found


def published_source() -> str:
    """Where the numbers are from."""
    return str(_published()["source"])


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def in_published_order(names: Iterable[str]) -> list[str]:
    """Names in the order of the published tables; others behind them, as they come."""
    order = [_key(row["method"]) for rows in _published()["tables"].values() for row in rows]
    return sorted(names, key=lambda name: order.index(_key(name)) if _key(name) in order else len(order))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published number and ours.

    Args:
        published: As printed.
        deviation: As printed; None for numbers without one.
        ours: Over seeds.
        flagged: Whether they differ by more than two deviations, or for FLOPs also by more than rounding.
        reason: Why, where flagged.
    """

    published: float
    deviation: float | None
    ours: Spread
    flagged: bool
    reason: str

    @property
    def difference(self) -> float:
        """Ours minus published."""
        assert self.ours.mean is not None
        return self.ours.mean - self.published


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One published row and ours.

    Args:
        table: Where it was published.
        method: Its published name.
        run: Our method.
        accuracy: In per cent.
        flops: In 10¹², by the row-mask convention, which is that of the paper.
    """

    table: str
    method: str
    run: str
    accuracy: Figure
    flops: Figure

    @property
    def reason(self) -> str:
        """Why either number differs; empty where none does."""
        found = [(name, one.reason) for name, one in (("Accuracy", self.accuracy), ("FLOPs", self.flops)) if one.reason]
        if len({reason for _, reason in found}) == 1 and len(found) > 1:
            return found[0][1]
        return " ".join(f"{name}: {reason}" for name, reason in found)


def beside_published(comparison: Comparison, *, folder: Path | None = None) -> list[Beside]:
    """Every published row of the comparison's data set that has a run.

    Args:
        comparison: Ours.
        folder: Where a `reasons.json` of the reader may be.

    Returns:
        In published order; empty for a data set that was not published.

    Raises:
        DataError: the reader's file cannot be read.
    """
    dataset = comparison.section.dataset
    rows = {_key(row.method): row for row in comparison.rows if row.level in PUBLISHED_LEVELS}
    also = {_key(ours): _key(theirs) for ours, theirs in _published()["also"].items()}
    reasons = _reasons(folder)
    short = _shortfall(comparison)
    found = []
    for table, lines in _published()["tables"].items():
        for line in lines:
            if dataset not in line:
                continue
            key = _key(line["method"])
            for row in (rows[name] for name in rows if key in (name, also.get(name))):
                if row.numbers["personal_accuracy"].mean is not None and row.numbers["flops_rowmask"].mean is not None:
                    found.append(_beside(table, line, row, dataset, reasons, short))
    return found


def _beside(
    table: str, line: Mapping[str, Any], row: Row, dataset: str, reasons: Sequence[Mapping[str, Any]], short: str
) -> Beside:
    accuracy, deviation, flops = line[dataset]
    name = line["method"]

    def figure(
        quantity: Literal["accuracy", "flops"], published: float, spread: float | None, ours: Spread, room: float
    ) -> Figure:
        assert ours.mean is not None
        chance = DEVIATIONS * math.hypot(spread or 0.0, ours.deviation or 0.0)
        flagged = abs(ours.mean - published) > max(chance, room)
        sign = "higher" if ours.mean > published else "lower"
        reason = (short or _reason(reasons, quantity, sign, dataset, {name, row.method})) if flagged else ""
        return Figure(published=published, deviation=spread, ours=ours, flagged=flagged, reason=reason)

    return Beside(
        table=table,
        method=name,
        run=row.method,
        accuracy=figure("accuracy", accuracy, deviation, _scaled(row.numbers["personal_accuracy"], 100), 0.0),
        flops=figure("flops", flops, None, _scaled(row.numbers["flops_rowmask"], 1e-12), _ROUNDING_E12),
    )


def _scaled(found: Spread, factor: float) -> Spread:
    assert found.mean is not None
    deviation = None if found.deviation is None else found.deviation * factor
    return Spread(found.mean * factor, deviation, found.count, found.of)


def _shortfall(comparison: Comparison) -> str:
    """Why a whole table cannot be compared; empty where it can."""
    protocol = _published()["protocol"].get(comparison.section.dataset, {})
    config = next((trial.config for trial in comparison.section.finished), {})
    ours = {"clients": config.get("experiment", {}).get("clients"), "rounds": config.get("rounds")}
    changed = [f"{ours[name]} {name} instead of {wanted}" for name, wanted in protocol.items() if ours[name] != wanted]
    return f"Another protocol: {' and '.join(changed)}." if changed else ""


def _reasons(folder: Path | None) -> list[Mapping[str, Any]]:
    own: list[Mapping[str, Any]] = []
    path = None if folder is None else folder / "reasons.json"
    if path is not None and path.exists():
        try:
            own = json.loads(path.read_text(encoding="utf-8"))
            assert all(isinstance(entry["reason"], str) for entry in own)
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise DataError(
                f'{path} must be a list of objects such as {{"methods": ["FedAvg"], "quantity": "accuracy",'
                f' "reason": "…"}}: {error}'
            ) from error
    return [*own, *json.loads(files(__package__).joinpath("reasons.json").read_text(encoding="utf-8"))]


def _reason(reasons: Sequence[Mapping[str, Any]], quantity: str, sign: str, dataset: str, methods: set[str]) -> str:
    def fits(entry: Mapping[str, Any], name: str, values: set[str]) -> bool:
        allowed = entry.get(name, ["*"])
        return "*" in allowed or not values.isdisjoint(allowed)

    for entry in reasons:
        if (
            entry.get("quantity", quantity) == quantity
            and entry.get("sign", "any") in ("any", sign)
            and fits(entry, "datasets", {dataset})
            and fits(entry, "methods", methods)
        ):
            return str(entry["reason"])
    return UNEXPLAINED


def show_published(rows: Sequence[Beside], console: Console) -> None:
    """Print published and ours; below, each reason with the methods that it is for.

    Args:
        rows: As of `beside_published`.
        console: Where to; 80 columns are enough.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="beside the published tables", title_justify="left")
    table.add_column("method", no_wrap=True)
    for title in ("published, %", "ours, %", "", "e12 FLOPs", "ours, rows"):
        table.add_column(title, justify="right", no_wrap=True)
    mark = {True: "*", False: " "}
    why: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        accuracy, flops = row.accuracy, row.flops
        table.add_row(
            escape(row.run),
            _both(accuracy.published, accuracy.deviation, 2),
            _both(accuracy.ours.mean or 0.0, accuracy.ours.deviation, 2),
            f"{accuracy.difference:+.2f}{mark[accuracy.flagged]}",
            f"{flops.published:.1f}",
            f"{flops.ours.mean or 0.0:.3f}{mark[flops.flagged]}",
        )
        for quantity, figure in (("accuracy", accuracy), ("FLOPs", flops)):
            if figure.flagged:
                why.setdefault((quantity, figure.reason), []).append(row.run)
    console.print(table)
    if why:
        console.print("* differs by more than two deviations, FLOPs also by more than rounding:")
    for (quantity, reason), runs in sorted(why.items(), key=lambda item: item[0][1] == UNEXPLAINED):
        console.print(f"  {quantity} of {escape(', '.join(dict.fromkeys(runs)))}: {escape(reason)}", soft_wrap=True)


def _both(mean: float, deviation: float | None, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def published_csv(rows: Sequence[Beside]) -> str:
    """One line per published number that has a run."""
    text = io.StringIO()
    names = ["table", "method", "run", "quantity", "published", "published_deviation", "ours", "our_deviation"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "difference", "flagged", "reason"])
    for row in rows:
        for quantity, figure in (("accuracy_percent", row.accuracy), ("flops_e12", row.flops)):
            ours = (figure.ours.mean, figure.ours.deviation)
            found = (figure.difference, int(figure.flagged), figure.reason)
            writer.writerow([row.table, row.method, row.run, quantity, figure.published, figure.deviation, *ours, *found])
    return text.getvalue()
