"""The published tables beside ours: where they differ by more than chance, and why.

The numbers are in `published.json`, the reasons in `reasons.json`; a file `reasons.json` in a report's folder comes first.
A reason rests on a measurement of ours, on the authors' code, on arithmetic with their numbers, or it is a guess and says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError
from sparsekit_fl.report.comparison import Comparison, Row
from sparsekit_fl.report.table import Spread
from sparsekit_fl.report.trials import Level

__all__ = [
    "PUBLISHED_LEVELS",
    "UNEXPLAINED",
    "Pair",
    "Published",
    "in_published_order",
    "protocol_difference",
    "published_beside",
    "published_numbers",
    "published_source",
    "published_text",
]

_ROUNDING_E12 = 0.05
_DEVIATIONS = 2.0
UNEXPLAINED = "no reason is known"
_GUESS = " That is a guess, which was not measured."
# Rows at other levels of heterogeneity have no published numbers.
PUBLISHED_LEVELS = (Level("high"), Level())


@cache
def _data(name: str) -> Any:
    return json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def published_source() -> str:
    """Return the paper that the numbers are from."""
    return str(_data("published.json")["source"])


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def in_published_order(names: Iterable[str]) -> list[str]:
    """Sort names by the published tables; others stay behind them, as they come."""
    order = [_key(row["method"]) for rows in _data("published.json")["tables"].values() for row in rows]
    return sorted(names, key=lambda name: order.index(_key(name)) if _key(name) in order else len(order))


def published_text(figure: str, dataset: str) -> Mapping[str, Any]:
    """Return what the paper's text says of a figure, which it gives no table for; empty where that is nothing.

    Args:
        figure: For example "Figure 5".
        dataset: Name of the data set.
    """
    found = _data("published.json")["text"].get(figure, {})
    return {**found.get("any", {}), **found.get(dataset, {})}


def published_numbers(run: str, dataset: str) -> tuple[float, float, float] | None:
    """Return accuracy and deviation in per cent and FLOPs in 10¹² that were published for one of our methods.

    Args:
        run: Name of our method.
        dataset: Name of the data set.

    Returns:
        The numbers; None where there are none.
    """
    key = {_key(ours): _key(theirs) for ours, theirs in _data("published.json")["also"].items()}.get(_key(run), _key(run))
    rows = [row for rows in _data("published.json")["tables"].values() for row in rows if _key(row["method"]) == key]
    found = next((row[dataset] for row in rows if dataset in row), None)
    return None if found is None else (float(found[0]), float(found[1]), float(found[2]))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One published number and ours.

    Args:
        published: As printed.
        deviation: As printed; None for numbers without one.
        mean: Our mean over seeds.
        spread: Our deviation over seeds; None for a single one.
        flagged: Whether they differ by more than two deviations, or for FLOPs also by more than rounding.
        reason: Cause of the difference, where flagged.
    """

    published: float
    deviation: float | None
    mean: float
    spread: float | None
    flagged: bool
    reason: str

    @property
    def difference(self) -> float:
        """Ours minus published."""
        return self.mean - self.published


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published row and ours.

    Args:
        table: Title of the published table.
        method: Published name of the method.
        run: Name of our method.
        accuracy: In per cent.
        flops: In 10¹², by the row-mask convention, which is that of the paper.
    """

    table: str
    method: str
    run: str
    accuracy: Pair
    flops: Pair

    @property
    def reason(self) -> str:
        """Cause of the difference of either number; empty where none differs."""
        found = {name: pair.reason for name, pair in (("Accuracy", self.accuracy), ("FLOPs", self.flops)) if pair.reason}
        if len(found) == 2 and self.accuracy.reason == self.flops.reason:
            return self.accuracy.reason
        return " ".join(f"{name}: {reason}" for name, reason in found.items())


def published_beside(comparison: Comparison, *, folder: Path | None = None) -> list[Published]:
    """Pair every published row of the comparison's data set with the runs of its method.

    Args:
        comparison: Ours.
        folder: Folder in which a `reasons.json` of the reader may be.

    Returns:
        Rows in published order; empty for a data set that was not published.

    Raises:
        DataError: the reader's file cannot be read.
    """
    data, dataset = _data("published.json"), comparison.section.dataset
    rows = [row for row in comparison.rows if row.level in PUBLISHED_LEVELS and _complete(row)]
    also = {_key(ours): _key(theirs) for ours, theirs in data["also"].items()}
    reasons = [*_own_reasons(folder), *_data("reasons.json")]
    short = protocol_difference(comparison)

    def pair(line: Mapping[str, Any], row: Row, quantity: str) -> Pair:
        accuracy, deviation, flops = line[dataset]
        if quantity == "accuracy":
            published, factor, found, room = accuracy, 100.0, row.numbers["personal_accuracy"], 0.0
        else:
            published, factor, found, room = flops, 1e-12, row.numbers["flops_rowmask"], _ROUNDING_E12
            deviation = None
        mean, spread = _scaled(found, factor)
        flagged = abs(mean - published) > max(_DEVIATIONS * math.hypot(deviation or 0.0, spread or 0.0), room)
        facts = {"quantity": quantity, "sign": "higher" if mean > published else "lower", "datasets": dataset}
        reason = (short or _reason(reasons, facts, {line["method"], row.method})) if flagged else ""
        return Pair(published=published, deviation=deviation, mean=mean, spread=spread, flagged=flagged, reason=reason)

    return [
        Published(
            table=table,
            method=line["method"],
            run=row.method,
            accuracy=pair(line, row, "accuracy"),
            flops=pair(line, row, "flops"),
        )
        for table, lines in data["tables"].items()
        for line in lines
        if dataset in line
        for row in rows
        if _key(line["method"]) in (_key(row.method), also.get(_key(row.method)))
    ]


def _complete(row: Row) -> bool:
    return row.numbers["personal_accuracy"].mean is not None and row.numbers["flops_rowmask"].mean is not None


def _scaled(found: Spread, factor: float) -> tuple[float, float | None]:
    assert found.mean is not None
    return found.mean * factor, None if found.deviation is None else found.deviation * factor


def protocol_difference(comparison: Comparison) -> str:
    """Say why a whole table cannot be compared; empty where it can.

    Args:
        comparison: Ours.
    """
    protocol = _data("published.json")["protocol"].get(comparison.section.dataset, {})
    config = next((trial.config for trial in comparison.section.finished), {})
    ours = {"clients": config.get("experiment", {}).get("clients"), "rounds": config.get("rounds")}
    changed = [f"{ours[name]} {name} instead of {wanted}" for name, wanted in protocol.items() if ours[name] != wanted]
    return f"Another protocol: {' and '.join(changed)}." if changed else ""


def _own_reasons(folder: Path | None) -> list[Mapping[str, Any]]:
    path = None if folder is None else folder / "reasons.json"
    if path is None or not path.exists():
        return []
    try:
        own: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        assert all(isinstance(entry["reason"], str) for entry in own)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise DataError(
            f'{path} must be a list of objects such as {{"methods": ["FedAvg"], "quantity": "accuracy",'
            f' "reason": "…"}}: {error}'
        ) from error
    return own


def _reason(reasons: Sequence[Mapping[str, Any]], facts: Mapping[str, str], methods: set[str]) -> str:
    """Return the first reason whose every field fits."""
    wanted = {name: {fact} for name, fact in facts.items()} | {"methods": methods}
    for entry in reasons:
        if all(_allows(entry.get(name, "any"), values) for name, values in wanted.items()):
            return f"{entry['reason']}{_GUESS if entry.get('basis') == 'guess' else ''}"
    return UNEXPLAINED


def _allows(allowed: str | Sequence[str], values: set[str]) -> bool:
    listed = [allowed] if isinstance(allowed, str) else allowed
    return not {"any", "*", *values}.isdisjoint(listed)
