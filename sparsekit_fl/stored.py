"""Reads results and formats their numbers with units. Needs no torch."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from sparsekit.errors import DataError, InvalidValueError

SCHEMA_NUMBER: Final = 6
"""Version of the format of `result.json`. It increases if a reader of the previous version would misread a file."""

_STEPS = {
    "share": ((0.01, "%"),),
    "flops": ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")),
    "bytes": ((1e6, " MB"), (1e3, " kB"), (1.0, " bytes")),
    "seconds": ((1.0, " s"), (1e-3, " ms")),
}


def read_result(path: Path | str) -> dict[str, Any]:
    """Return a `result.json`, given its path or its folder, as plain JSON values; raise DataError unless it has this schema."""
    path = Path(path)
    path = path / "result.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        schema, *_ = [raw[name] for name in ("schema", "method", "seed", "final", "cost", "rounds")]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a result: {error!r}; pass the --out folder of a finished run") from error
    if schema != SCHEMA_NUMBER:
        raise DataError(
            f"{path} has schema {schema}, and this version reads {SCHEMA_NUMBER}; install the version that wrote it"
        )
    return dict(raw)


def client_ids(text: str) -> list[int]:
    """Return ids from "3", "0-3" or "0-3,7,9"; raises InvalidValueError if `text` is malformed, empty or repeats an id."""
    ids: list[int] = []
    try:
        for part in str(text).split(","):
            low, dash, high = part.strip().partition("-")
            ids += range(int(low), int(high) + 1) if dash else [int(low)]
    except ValueError:
        raise InvalidValueError(f"clients must be ids such as 3, 0-3 or 0-3,7, got {text!r}") from None
    if not ids or len(set(ids)) != len(ids):
        raise InvalidValueError(f"clients must name at least one id, and none twice, got {text!r}")
    return ids


def ids_text(ids: Iterable[int]) -> str:
    """Format ids for `client_ids`, in ascending order and with ranges, as in "0-3,7"; empty without ids."""
    ranges: list[list[int]] = []
    for id in sorted(ids):
        if ranges and id == ranges[-1][1] + 1:
            ranges[-1][1] = id
        else:
            ranges.append([id, id])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested settings: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {path + name: value})
    return found


def texts(unit: str, means: Sequence[float | None], deviations: Sequence[float | None] = ()) -> list[str]:
    """Format the numbers of a table column with the unit prefix of the largest; None, NaN and infinity become a dash.

    Shares have one decimal. Other numbers have decimals for three digits of the smallest number (unit "number": four), but a
    column of several numbers has at most three decimals. A prefix starts at a tenth of its size: T at 1e11. Columns of zeros
    are in MB and in seconds.
    """
    known = [abs(mean) for mean in means if mean is not None and math.isfinite(mean)]
    steps, largest = _STEPS.get(unit, ((1.0, ""),)), max(known, default=0.0)
    size, ending = next(
        (step for step in steps if largest >= step[0] / 10), steps[0 if unit != "flops" and not largest else -1]
    )
    least = min((number / size for number in known if number), default=1.0)
    digits = 1 if unit == "share" else max(0, (3 if unit == "number" else 2) - math.floor(math.log10(least)))
    digits = digits if len(known) == 1 else min(3, digits)
    found = []
    for mean, deviation in zip(means, deviations or [None] * len(means), strict=True):
        spread = deviation if deviation is not None and math.isfinite(deviation) else None
        if mean is None or not math.isfinite(mean):
            found.append("–")
        else:
            found.append(f"{mean / size:,.{digits}f}" + ("" if spread is None else f" ± {spread / size:,.{digits}f}") + ending)
    return found


def number_text(unit: str, value: float | None) -> str:
    """Format one number: `0.530T` for FLOPs, `245 s`, `98.8%` for a share, and a dash for None."""
    return texts(unit, [value])[0]


def score_text(metric: str, value: float | None) -> str:
    """Format a score with its metric: `accuracy 98.4%` or `rmse 0.2130`."""
    return f"{metric} {number_text('share' if metric == 'accuracy' else 'number', value)}"


def primary_metric(names: Iterable[str]) -> str:
    """Return accuracy if it is in `names`, else the first metric other than the loss, else the loss."""
    others = [name for name in names if name != "loss"]
    return "accuracy" if "accuracy" in others else (others or ["loss"])[0]


class Column(NamedTuple):
    """One number of a result: its path of keys, joined by dots, its title in tables, and its unit, as in `stored.texts`."""

    path: str
    title: str
    unit: str


_SCORES = (
    Column("final.personal.accuracy", "personal accuracy", "share"),
    Column("final.validation.accuracy", "validation accuracy", "share"),
    Column("final.global.accuracy", "global accuracy", "share"),
    Column("final.global_validation.accuracy", "global validation accuracy", "share"),
    Column("final.worst_decile.personal.accuracy", "worst decile", "share"),
)
_COSTS = (
    Column("cost.flops", "FLOPs", "flops"),
    Column("cost.simulated_seconds", "simulated time", "seconds"),
    Column("cost.uplink_bytes", "uplink", "bytes"),
    Column("cost.downlink_bytes", "downlink", "bytes"),
    Column("cost.flops_paper", "FLOPs, paper", "flops"),
    Column("cost.wall_seconds", "wall time", "seconds"),
)
_FIRST = ("personal accuracy", "global accuracy", "FLOPs", "simulated time", "uplink", "downlink")


def unlike(result: Mapping[str, Any]) -> list[str]:
    """Return how a run deviates from its settings: it stopped early, or clients were dropped, never trained or not scored."""
    done, planned = len(result["rounds"]), result["config"]["rounds"]
    reason = f": {result['stopped']}" if result.get("stopped") else ""
    found = [f"ended after {done} of {planned} rounds{reason}"] if done < planned else []
    sampled = sum(len(one["cohort"]) for one in result["rounds"])
    if dropped := sum(len(one["dropped"]) for one in result["rounds"]):
        found.append(f"{dropped} of {sampled} updates of clients did not count")
    if failed := len(result["failed_clients"]):
        asked = len({id for one in result["rounds"] for id in one["cohort"]})
        found.append(f"{failed} of {asked} clients that were asked could never train")
    if (scored := result["final"]["count"]) < result["clients"]:
        found.append(f"final scores are means over {scored} of {result['clients']} clients")
    return found


def columns_of(results: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns of tables: accuracies, costs and other metrics. A narrow terminal shows only the first ones."""
    names = dict.fromkeys(name for one in results for name in one["final"].get("personal", {}) if name != "accuracy")
    found = (*_SCORES, *_COSTS, *(Column(f"final.personal.{name}", name, "number") for name in names))
    return tuple(sorted(found, key=lambda column: column.title not in _FIRST))
