"""write_report: every file of a comparison, from saved results alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsekit.errors import MissingDependencyError
from sparsekit_fl.paper.published import beside_published, in_published_order, published_csv
from sparsekit_fl.report.charts import charts_of
from sparsekit_fl.report.comparison import Comparison, check_target
from sparsekit_fl.report.drawing import draw_chart, inline_svg
from sparsekit_fl.report.latex import latex_table
from sparsekit_fl.report.markdown import markdown_table
from sparsekit_fl.report.page import PagePart, page
from sparsekit_fl.report.trials import collect, sections_of
from sparsekit_fl.state.storage import write_atomically

__all__ = ["read_comparisons", "write_report"]

_log = logging.getLogger(__name__)

_SUMMARY = "compare.json"
_KINDS = ("png", "svg")


def read_comparisons(folder: Path | str, *, target: float | None = None, order: Sequence[str] = ()) -> list[Comparison]:
    """Everything in a folder, a comparison for each protocol.

    Args:
        folder: Of a comparison or a run, or with results in it.
        target: Accuracy whose time is a column; None takes that of the report that is there, if one was asked for.
        order: Methods in the order of tables; without it that of the report that is there, or of the published tables.

    Raises:
        DataError: nothing there, or a file that is not what it should be.
        InvalidValueError: a target outside (0, 1].
    """
    check_target(target)
    earlier = _earlier(Path(folder) / _SUMMARY)
    trials = collect(folder)
    wanted = [*order, *earlier.get("methods", []), *in_published_order(dict.fromkeys(trial.method for trial in trials))]
    goal = target if target is not None else earlier.get("asked_target")
    return [Comparison(section, goal) for section in sections_of(trials, order=list(dict.fromkeys(wanted)))]


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_report(
    folder: Path | str,
    *,
    out: Path | str | None = None,
    target: float | None = None,
    order: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Write tables, figures and the page of everything in a folder.

    Args:
        folder: Of a comparison or a run, or with results in it.
        out: Where the files go; None takes the folder itself.
        target: Accuracy whose time is a column; None takes that of the report that is there, or nine tenths of the best.
        order: Methods in the order of tables.
        progress: Told which file is being written.

    Returns:
        The files: for each protocol `compare.json`, `compare.csv`, `table.tex`, `table.md`, `published.csv` where the paper has
        numbers, and `figures/`; one `report.html` for all. Several protocols have their title in the files' names.

    Raises:
        DataError: nothing there, or a file that is not what it should be.
        InvalidValueError: a target outside (0, 1].
    """
    folder = Path(folder)
    home = folder if out is None else Path(out)
    comparisons = read_comparisons(folder, target=target, order=order)
    (home / "figures").mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def put(name: str, text: str) -> None:
        progress(name)
        write_atomically(home / name, text.encode(), durable=False)
        written.append(home / name)

    parts: list[PagePart] = []
    for comparison in comparisons:
        prefix = f"{comparison.section.slug}-" if len(comparisons) > 1 else ""
        summary = {**comparison.to_dict(), "asked_target": comparison.target}
        put(f"{prefix}{_SUMMARY}", json.dumps(summary, indent=1, allow_nan=False) + "\n")
        put(f"{prefix}compare.csv", comparison.to_csv())
        beside = beside_published(comparison, folder=folder)
        put(f"{prefix}table.tex", latex_table(comparison))
        put(f"{prefix}table.md", markdown_table(comparison, beside))
        if beside:
            put(f"{prefix}published.csv", published_csv(beside))
        charts = charts_of(comparison) if comparison.rows else []
        drawn: list[tuple[str, str]] = []
        try:
            for chart in charts:
                files = [home / f"figures/{prefix}{chart.name}.{kind}" for kind in _KINDS]
                progress(files[0].name)
                draw_chart(chart, *files)
                written += files
                drawn.append((chart.title, inline_svg(chart, prefix=f"s{len(parts)}c{len(drawn)}-")))
        except MissingDependencyError as error:
            _log.warning("no figures: %s", error)
        parts.append(PagePart(comparison=comparison, beside=beside, charts=drawn))
    put("report.html", page(parts))
    return written
