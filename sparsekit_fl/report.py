"""Report of finished runs: an HTML page with tables and charts."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsekit.page import chart, code, heading, page, paragraph, row, strips, table
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.comparison import Comparison
from sparsekit_fl.curves import AXES, curves_of, metric_of, scores_of, writer_of
from sparsekit_fl.problem.metrics import lower_is_better
from sparsekit_fl.stored import flat, number_text, texts

PAGE = "report.html"

# 97.5 % quantiles of Student's t, by degrees of freedom; the last one is used for more degrees.
_T = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09,
    1.96,
)  # fmt: skip
_MOST_RATIO_CHARTS, _MOST_NAMED = 3, 6


def write_report(comparisons: Sequence[Comparison], out: Path | str, *, command: str = "", failed: Sequence[str] = ()) -> Path:
    """Write `report.html` into `out`: the command, the failed runs, and one section per comparison. Return its path."""
    parts = [code(command), *(paragraph(line, "failed") for line in failed)]
    for comparison in comparisons:
        parts += [heading(comparison.title)] if len(comparisons) > 1 else []
        parts += _section(comparison)
    title = comparisons[0].title if len(comparisons) == 1 else "Comparison of methods"
    path = Path(out) / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written atomically, since another `compare` may write its page to the same folder at the same time.
    write_atomically(path, page(title, parts).encode())
    return path


def _section(comparison: Comparison) -> list[str]:
    metric, unit = metric_of(comparison.results)
    seeds = comparison.seeds_text()
    return [
        paragraph(verdict(comparison)),
        heading("Scores", 3),
        _table(comparison.table("final")),
        heading("Costs", 3),
        _table(comparison.table("cost")),
        paragraph(
            f"{seeds[0].upper()}{seeds[1:]}. Scores are means over all clients, each on its own test data. Wall time depends on"
            " what else ran on the machine, simulated time does not.",
            "soft",
        ),
        *(paragraph(line, "soft") for line in comparison.remarks()),
        *(paragraph(line, "failed") for line in comparison.troubles()),
        row(*curves_of(comparison.results, comparison.methods), _clients(comparison, metric, unit)),
        *_at_equal_cost(comparison, metric, unit),
        *_differences(comparison, metric, unit),
        *_ratios(comparison),
        heading("Settings", 3),
        table(("setting", "value"), _settings(comparison)),
    ]


def _table(frame: Any) -> str:
    rows = [(name, *cells) for name, cells in zip(frame.index, frame.values.tolist(), strict=True)]
    return table([frame.index.name or "", *frame], rows)


def _settings(comparison: Comparison) -> list[tuple[str, str]]:
    config = {name.rpartition(".")[2].replace("_", " "): value for name, value in flat(comparison.results[0]["config"]).items()}
    found = [(name, str(value)) for name, value in config.items() if value is not None and name != "seed"]
    about = [one.get("environment") or {} for one in comparison.results]
    for name in ("sparsekit", "torch", "platform", "finished"):
        values = [str(one[name])[: 10 if name == "finished" else None] for one in about if name in one]
        found += [(name, ", ".join(sorted(set(values))))] if values else []
    return found


def _clients(comparison: Comparison, metric: str, unit: str) -> str:
    rows: dict[str, list[float]] = {method: [] for method in comparison.methods}
    for result in comparison.results:
        for client in result["final"].get("per_client", ()):
            value = client["personal"].get(metric)
            rows[result["method"]] += [] if value is None else [value]
    return strips(
        {name: own for name, own in rows.items() if own},
        x=metric,
        y=f"Personal {metric} of each client",
        x_text=writer_of(unit),
    )


def _within(comparison: Comparison, metric: str, cost: str) -> tuple[float, dict[str, dict[int, float]]]:
    """Return the largest cost that all runs reached, and method → seed → last score within it.

    Methods are left out if one of their seeds has no score within it.
    """
    budget = min(result["cost"][cost] for result in comparison.results)
    found: dict[str, dict[int, float]] = {}
    for method in comparison.methods:
        own = {one["seed"]: scores_of(one, metric) for one in comparison.results if one["method"] == method}
        within = {seed: [one["y"] for one in scores if one[cost] <= budget * (1 + 1e-9)] for seed, scores in own.items()}
        if all(within.values()):
            found[method] = {seed: scores[-1] for seed, scores in within.items()}
    return budget, found


def _at_equal_cost(comparison: Comparison, metric: str, unit: str) -> list[str]:
    """Return a table of scores. A cost is left out if only one of several methods has a score within it."""
    head, columns = ["method"], []
    for name, _, cost_unit in AXES[1:]:
        budget, scores = _within(comparison, metric, name)
        if len(scores) > 1 or len(comparison.methods) == 1:
            means = [statistics.fmean(scores[method].values()) if method in scores else None for method in comparison.methods]
            head.append(f"at {number_text(cost_unit, budget)}{' FLOPs' if name == 'flops' else ' simulated'}")
            columns.append(texts(unit, means))
    rows = list(zip(comparison.methods, *columns, strict=True))
    about = "The last score within the cost that every run reached; a dash if a method was not scored by then."
    return [heading(f"{metric.capitalize()} at equal cost", 3), paragraph(about, "soft"), table(head, rows)] if columns else []


def verdict(comparison: Comparison) -> str:
    """Return a sentence on which method wins at equal FLOPs, and by how much; empty if fewer than two have a score."""
    metric, unit = metric_of(comparison.results)
    budget, scores = _within(comparison, metric, "flops")
    if len(scores) < 2:
        return ""
    better = -1 if lower_is_better(metric) else 1
    ranked = sorted(scores, key=lambda method: -better * statistics.fmean(scores[method].values()))
    first, second = ranked[:2]
    scale, sign = (100, " points") if unit == "share" else (1, "")
    gaps = [scale * better * (own - scores[second][seed]) for seed, own in scores[first].items() if seed in scores[second]]
    (text,) = texts(unit, [statistics.fmean(scores[first].values())])
    if not gaps:
        return f"At equal FLOPs ({number_text('flops', budget)}), {first} has the best {metric}: {text}."
    unlike = ""
    if comparison.own[first] != comparison.own[second]:
        unlike = f" Of these two, only {first if comparison.own[first] else second} keeps parts of its own on each client."
    mean, half = statistics.fmean(gaps), _half_interval(gaps)
    told = f"{mean:.3g}{sign} better than {second}"
    if half is None:
        return f"At equal FLOPs ({number_text('flops', budget)}), {first} wins: {metric} {text}, {told} (one seed).{unlike}"
    wins = f"{first} wins" if mean > half else f"nobody wins clearly, and {first} leads"
    within = f"95 % interval {mean - half:+.2f} to {mean + half:+.2f}, {len(gaps)} seeds"
    return f"At equal FLOPs ({number_text('flops', budget)}), {wins}: {metric} {text}, {told} ({within}).{unlike}"


def _half_interval(gaps: Sequence[float]) -> float | None:
    """Return half the width of the 95 % confidence interval of a mean; None for a single number."""
    n = len(gaps)
    return None if n < 2 else _T[min(n - 2, len(_T) - 1)] * statistics.stdev(gaps) / math.sqrt(n)


def _differences(comparison: Comparison, metric: str, unit: str) -> list[str]:
    """Return a table of the differences from the first method, paired by seed, with a 95 % interval of their mean."""
    first, *others = comparison.methods
    by_seed = {(one["method"], one["seed"]): one["final"].get("personal", {}).get(metric) for one in comparison.results}
    scale, sign = (100, " points") if unit == "share" else (1, "")
    rows = []
    for other in others:
        pairs = [(mine, by_seed.get((first, seed))) for (name, seed), mine in by_seed.items() if name == other]
        gaps = [scale * (mine - its) for mine, its in pairs if mine is not None and its is not None]
        if (half := _half_interval(gaps)) is not None:
            mean = statistics.fmean(gaps)
            each = ", ".join(f"{gap:+.2f}" for gap in gaps)
            unlike = " (unlike models)" if comparison.own[other] != comparison.own[first] else ""
            rows.append((other + unlike, f"{mean:+.2f}{sign}", f"{mean - half:+.2f} to {mean + half:+.2f}", each))
    title = f"{metric.capitalize()} minus {first}, seed by seed"
    return [heading(title, 3), table(("method", "mean difference", "95 % interval", "each seed"), rows)] if rows else []


def _ratios(comparison: Comparison) -> list[str]:
    """Return charts of each client's ratio over the rounds, for methods whose ratios vary."""
    charts = []
    for method in comparison.methods:
        result = next(one for one in comparison.results if one["method"] == method)
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for record in result["rounds"]:
            for client, ratio in (record.get("ratios") or {}).items():
                lines.setdefault(f"client {client}", []).append((record["round"], ratio, 0.0))
        if len({point[1] for line in lines.values() for point in line}) > 1:
            title = f"{method}, seed {result['seed']}: ratio of each client"
            charts.append(chart(lines, x="round", y=title, y_text=writer_of("share"), legend=len(lines) <= _MOST_NAMED))
    about = "Each line joins the rounds that a client trained in. Point at a line for the name of its client."
    return [heading("Ratios", 3), paragraph(about, "soft"), row(*charts[:_MOST_RATIO_CHARTS])] if charts else []
