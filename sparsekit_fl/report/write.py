"""write_report: every file of a comparison, from saved results alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sparsekit.errors import MissingDependencyError
from sparsekit_fl.report.beside import Beside
from sparsekit_fl.report.charts import charts_of
from sparsekit_fl.report.comparison import Comparison, check_target
from sparsekit_fl.report.drawing import draw_chart, inline_svg
from sparsekit_fl.report.page import PageFigure, PagePart, page
from sparsekit_fl.report.plate import Plates, plates_csv, plates_latex
from sparsekit_fl.report.text import latex_table, markdown_table
from sparsekit_fl.report.trials import collect_all, sections_of
from sparsekit_fl.state.storage import write_atomically

__all__ = ["read_comparisons", "write_report"]

_log = logging.getLogger(__name__)

_SUMMARY = "compare.json"
_KINDS = ("png", "svg")


def read_comparisons(
    *folders: Path | str,
    target: float | None = None,
    order: Sequence[str] = (),
    sort: Callable[[Iterable[str]], Iterable[str]] = tuple,
) -> list[Comparison]:
    """Read everything in folders, a comparison for each protocol.

    Args:
        folders: Folders of comparisons or runs, or with results in them; the report that is in the first one counts.
        target: Accuracy whose time is a column; None takes that of the report that is there, if one was asked for.
        order: Methods in the order of tables; without it that of the report that is there.
        sort: Order of the methods that neither names.

    Raises:
        DataError: nothing there, or a file that is not what it should be.
        InvalidValueError: a target outside (0, 1].
    """
    check_target(target)
    earlier = _earlier(Path(folders[0]) / _SUMMARY) if folders else {}
    trials = collect_all(folders)
    wanted = dict.fromkeys([*order, *earlier.get("methods", []), *sort(dict.fromkeys(trial.method for trial in trials))])
    goal = target if target is not None else earlier.get("asked_target")
    return [Comparison(section, goal) for section in sections_of(trials, order=list(wanted))]


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_report(
    folder: Path | str,
    comparisons: Sequence[Comparison],
    *,
    out: Path | str | None = None,
    beside: Callable[[Comparison], Beside | None] = lambda _: None,
    plates: Callable[[Sequence[Comparison]], Plates] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    command: str = "",
) -> list[Path]:
    """Write tables, figures and the page of comparisons.

    Args:
        folder: Folder that they were read from.
        comparisons: One per protocol, from `read_comparisons`.
        out: Folder for the files; None takes `folder`.
        beside: Returns the numbers of others that stand beside a comparison, or None.
        plates: Returns figures of somebody else's paper, drawn from the comparisons; None for none.
        progress: Receives the name of each file before it is written.
        command: What was typed to run them; empty takes that of the report that is there.

    Returns:
        The files: for each protocol `compare.json`, `compare.csv`, `table.tex`, `table.md`, the files of what stands beside,
        `figures/`, and of plates `figures.csv` and `figures.tex`; one `report.html` for all. Several protocols have their
        title in the files' names.

    Raises:
        DataError: `beside` reads a file that is not what it should be.
        MissingDependencyError: Jinja2 or pandas is not installed; `compare.json` is written.
    """
    home = Path(folder if out is None else out)
    typed = command or str(_earlier(Path(folder) / _SUMMARY).get("command", ""))
    (home / "figures").mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def put(name: str, text: str) -> None:
        progress(name)
        write_atomically(home / name, text.encode(), durable=False)
        written.append(home / name)

    parts: list[PagePart] = []
    others = plates(comparisons) if plates else Plates(title="", drawn=[()] * len(comparisons))
    prefixes = [f"{comparison.section.slug}-" if len(comparisons) > 1 else "" for comparison in comparisons]
    for prefix, comparison in zip(prefixes, comparisons, strict=True):
        summary = {**comparison.to_dict(), "asked_target": comparison.target, **({"command": typed} if typed else {})}
        put(f"{prefix}{_SUMMARY}", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    for prefix, comparison, own in zip(prefixes, comparisons, others.drawn, strict=True):
        found = beside(comparison)
        put(f"{prefix}compare.csv", comparison.to_csv())
        put(f"{prefix}table.tex", latex_table(comparison))
        put(f"{prefix}table.md", markdown_table(comparison, found))
        for name, text in (found.files if found else {}).items():
            put(prefix + name, text)
        if own:
            put(f"{prefix}figures.csv", plates_csv(own))
            put(f"{prefix}figures.tex", plates_latex(own, folder="figures", prefix=prefix))
        drawn: list[PageFigure] = []
        shown = [*((chart, "") for chart in charts_of(comparison)), *((plate.chart, plate.caption) for plate in own)]
        try:
            for chart, caption in shown:
                files = [home / f"figures/{prefix}{chart.name}.{kind}" for kind in _KINDS]
                progress(files[0].name)
                draw_chart(chart, *files)
                written += files
                svg = inline_svg(chart, prefix=f"s{len(parts)}c{len(drawn)}-")
                drawn.append(PageFigure(title=chart.title, kind=chart.kind, svg=svg, caption=caption))
        except MissingDependencyError as error:
            _log.warning("no figures: %s", error)
        parts.append(PagePart(comparison=comparison, beside=found, figures=drawn, csv=f"{prefix}compare.csv", command=typed))
    put("report.html", page(parts, plates=others))
    return written
