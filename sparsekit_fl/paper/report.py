"""write_report: every file of a report, from saved results alone, with the numbers and figures of the paper beside ours."""

import base64
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsekit.errors import InvalidValueError, MissingDependencyError
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.paper.figures import missing_figures, paper_figures
from sparsekit_fl.paper.published import in_published_order, published_beside, published_source
from sparsekit_fl.results.report.comparison import Comparison, check_target, comparisons_of
from sparsekit_fl.results.report.figures import figures_of
from sparsekit_fl.results.report.plots import Figure, draw
from sparsekit_fl.results.report.tables import Part, latex_table, markdown_table, page, published_rows
from sparsekit_fl.results.report.trials import collect

_log = logging.getLogger(__name__)

_SUMMARY = "compare.json"
_KINDS = ("png", "svg")


def read_comparisons(*folders: Path | str, target: float | None = None, order: Sequence[str] = ()) -> list[Comparison]:
    """Read everything in folders, a comparison for each protocol.

    Args:
        folders: Folders of comparisons or runs, or with results in them; the report that is in the first one counts.
        target: Accuracy whose time is a column; None takes that of the report that is there, if one was asked for.
        order: Methods in the order of tables; then come those of the report that is there, and others in published order.

    Raises:
        DataError: nothing there, or a file that is not what it should be.
        InvalidValueError: a target outside (0, 1].
    """
    check_target(target)
    earlier = _earlier(Path(folders[0]))
    trials = collect(*folders)
    rest = in_published_order(dict.fromkeys(trial.method for trial in trials))
    goal = target if target is not None else earlier.get("asked_target")
    return comparisons_of(trials, order=list(dict.fromkeys([*order, *earlier.get("methods", []), *rest])), target=goal)


def _earlier(folder: Path) -> dict[str, Any]:
    """Return the last report of a folder; of several protocols that of any of them."""
    for path in [folder / _SUMMARY, *sorted(folder.glob(f"*-{_SUMMARY}"))]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def write_report(
    *folders: Path | str,
    out: Path | str | None = None,
    target: float | None = None,
    order: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
    command: str = "",
) -> tuple[list[Comparison], list[Path]]:
    """Read folders as `read_comparisons` does, and write tables, figures and the page.

    Args:
        folders: Folders of results.
        out: Folder for the files; None takes the only folder.
        target: Accuracy whose simulated time is a column.
        order: Methods in the order of tables.
        progress: Receives the name of each file before it is written.
        command: What was typed to run them; empty takes that of the report that is there.

    Returns:
        The comparisons, one per protocol, and the files: for each protocol `compare.json`, `compare.csv`, `table.tex`,
        `table.md`, where there are published numbers `published.csv`, and `figures/`; one `report.html` for all.
        Several protocols have their title in the files' names.

    Raises:
        MissingDependencyError: Jinja2 is not installed; all but the page and the figures is written.
    """
    if len(folders) > 1 and out is None:
        raise InvalidValueError("a report of several folders needs one for its files; pass --out FOLDER")
    comparisons = read_comparisons(*folders, target=target, order=order)
    home = Path(folders[0] if out is None else out)
    typed = command or str(_earlier(Path(folders[0])).get("command", ""))
    (home / "figures").mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def put(name: str, text: str) -> None:
        progress(name)
        write_atomically(home / name, text.encode(), durable=False)
        written.append(home / name)

    def pictures(figures: Sequence[Figure], prefix: str) -> list[tuple[Figure, str]]:
        drawn: list[tuple[Figure, str]] = []
        try:
            for figure in figures:
                files = [home / f"figures/{prefix}{figure.name}.{kind}" for kind in _KINDS]
                progress(files[0].name)
                draw(figure, *files)
                written.extend(files)
                drawn.append((figure, base64.b64encode(files[-1].read_bytes()).decode()))
        except MissingDependencyError as error:
            _log.warning("no figures: %s", error)
        return drawn

    parts: list[Part] = []
    numbers: set[str] = set()
    for comparison in comparisons:
        prefix = f"{comparison.slug}-" if len(comparisons) > 1 else ""
        summary = {**comparison.to_dict(), "asked_target": comparison.target, **({"command": typed} if typed else {})}
        put(f"{prefix}{_SUMMARY}", json.dumps(summary, indent=1, allow_nan=False) + "\n")
        put(f"{prefix}compare.csv", comparison.to_csv())
        beside, own = published_beside(comparison), paper_figures(comparison)
        put(f"{prefix}table.md", markdown_table(comparison, beside))
        put(f"{prefix}table.tex", latex_table(comparison))
        if beside is not None:
            put(f"{prefix}published.csv", beside.to_csv(index=False, lineterminator="\n"))
        drawn = pictures([*figures_of(comparison), *own], prefix)
        parts.append(Part(comparison, published_rows(beside), drawn, f"{prefix}compare.csv", typed))
        numbers |= {figure.number for figure in own}
    source = [published_source()] if any(part.published for part in parts) else []
    put("report.html", page(parts, [*source, *missing_figures(comparisons, numbers)]))
    return comparisons, written
