"""Compares runs with the published tables: which numbers differ by more than chance, and why.

The published numbers are in `published.json`, and the reasons for differences in `reasons.json`. A reason is based on our
measurements, on the authors' code or on arithmetic with their numbers; otherwise, it is marked as a guess. Published numbers
are compared only with runs of the same protocol: data, model, partition, capability levels and training.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from sparsekit.errors import require
from sparsekit_fl.comparison import Comparison
from sparsekit_fl.paper.presets import PRESETS

_ROUNDING_E12 = 0.05
_ERRORS = 2.0
UNEXPLAINED = "no reason is known"
RULE = (
    "* differs by more than two standard errors, FLOPs also by more than rounding. The paper does not state its number of runs,"
    " so its deviation counts as the error of its mean; a single run of ours has no error."
)
_GUESS = " That is a guess, which was not measured."
# Options that do not affect the numbers of a table.
_FREE = ("seed", "device", "deterministic", "eval_every", "eval_global_every", "eval_clients", "final_clients")


@cache
def _data(name: str) -> Any:
    return json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def in_published_order(names: Iterable[str]) -> list[str]:
    """Sort names in the order of the published tables; other names follow in their own order."""
    order = [_key(row["method"]) for rows in _data("published.json")["tables"].values() for row in rows]
    return sorted(names, key=lambda name: order.index(_key(name)) if _key(name) in order else len(order))


def published_source() -> str:
    """Return the source of published numbers."""
    return f"Published numbers: {_data('published.json')['source']}."


def published_numbers(run: str, dataset: str) -> list[tuple[str, str, float, float, float]]:
    """Return the published rows of a method: table, name, accuracy and deviation in per cent, and FLOPs in 10¹²."""
    data = _data("published.json")
    keys = {_key(run), *(_key(theirs) for ours, theirs in data["also"].items() if _key(ours) == _key(run))}
    return [
        (table, line["method"], *map(float, line[dataset]))
        for table, lines in data["tables"].items()
        for line in lines
        if dataset in line and _key(line["method"]) in keys
    ]


def protocol_difference(comparison: Comparison) -> str:
    """Return a sentence on how the runs differ from the paper's protocol; empty if they do not."""
    dataset = comparison.dataset
    if dataset not in _data("published.json")["datasets"]:
        return f"The paper has no {dataset or 'such'} data."
    preset, config = PRESETS[dataset], comparison.results[0]["config"]
    about = config.get("experiment", {})
    wanted = {
        "model": preset.model, "clients": preset.clients, "partition": preset.partition, **preset.options,
        "lack_classes": None, **_flat(json.loads(json.dumps(preset.config({}, preset.clients).to_dict()))),
    }  # fmt: skip
    ours = {**about, **about.get("partition_options", {}), **_flat(config)}
    # A method may set `redraw_capability` itself; it is then part of the method, not a difference.
    free = {*_FREE, *({"redraw_capability"} & {name for one in comparison.results for name in one.get("method_options", {})})}
    changed = [
        f"{name.replace('_', ' ')} {ours[name]} instead of {value}"
        for name, value in wanted.items()
        if name not in free and name in ours and ours[name] != value
    ]
    # An option that the partition does not have counts as a difference, too.
    changed += [f"no {name.replace('_', ' ')}" for name in preset.options if name not in ours]
    return f"Another protocol than the paper's: {', '.join(changed)}." if changed else ""


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in config.items() if name not in ("training", "experiment")}
    return {**rest, **config.get("training", {})}


def published_beside(comparison: Comparison) -> Any:
    """Return a DataFrame that pairs every published row of the comparison's data set with the runs of its method.

    Each pair has two rows, its accuracy and its FLOPs, in published order. `our_error` is the standard error of our mean over
    `n` runs, None for a single run. `flagged` is 1 where the difference is flagged by `RULE`; then `reason` says why. The
    result is None if the protocol is not the paper's, or if no method has a row.
    """
    if protocol_difference(comparison):
        return None
    dataset, reasons = comparison.dataset, _data("reasons.json")
    lines: list[tuple[Any, ...]] = []
    counts = comparison.frame.groupby("method").count()
    for run, row in comparison.summary.iterrows():
        if math.isnan(row["final.personal.accuracy", "mean"] + row["cost.flops_paper", "mean"]):
            continue
        for table, method, accuracy, deviation, flops in published_numbers(run, dataset):
            pairs = (("accuracy", "accuracy_percent", accuracy, deviation, "final.personal.accuracy", 100.0, 0.0),
                     ("flops", "flops_e12", flops, None, "cost.flops_paper", 1e-12, _ROUNDING_E12))  # fmt: skip
            for quantity, name, published, theirs, path, factor, room in pairs:
                mean, n = factor * float(row[path, "mean"]), int(counts.loc[run, path])
                error = factor * float(row[path, "std"]) / math.sqrt(n) if n > 1 else None
                flagged = abs(mean - published) > max(_ERRORS * math.hypot(theirs or 0.0, error or 0.0), room)
                facts = {"quantity": quantity, "sign": "higher" if mean > published else "lower", "datasets": dataset}
                reason = _reason(reasons, facts, {method, run}) if flagged else ""
                numbers = (published, theirs, mean, error, n, mean - published, int(flagged))
                lines.append((table, method, run, name, *numbers, reason))
    if not lines:
        return None
    order = [(table, line["method"]) for table, rows in _data("published.json")["tables"].items() for line in rows]
    lines.sort(key=lambda line: order.index(line[:2]))
    columns = ["table", "method", "run", "quantity", "published", "published_deviation", "ours", "our_error", "n"]
    return require("pandas").DataFrame(lines, columns=[*columns, "difference", "flagged", "reason"], dtype=object)


def _reason(reasons: Sequence[Mapping[str, Any]], facts: Mapping[str, str], methods: set[str]) -> str:
    """Return the first stored reason that applies to all of these facts and methods; `UNEXPLAINED` if there is none."""
    wanted = {name: {fact} for name, fact in facts.items()} | {"methods": methods}
    for entry in reasons:
        if all(_allows(entry.get(name, "any"), values) for name, values in wanted.items()):
            return f"{entry['reason']}{_GUESS if entry.get('basis') == 'guess' else ''}"
    return UNEXPLAINED


def _allows(allowed: str | Sequence[str], values: set[str]) -> bool:
    listed = [allowed] if isinstance(allowed, str) else allowed
    return not {"any", "*", *values}.isdisjoint(listed)
