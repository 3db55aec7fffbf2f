"""The report of finished runs: one HTML page with tables and pictures, and published numbers where runs have their protocol."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.comparison import Comparison, comparisons_of, read_results
from sparsekit_fl.errors import need
from sparsekit_fl.paper.published import in_published_order, published_beside, published_source
from sparsekit_fl.pictures import curves_of, to_svg
from sparsekit_fl.stored import flat

PAGE = "report.html"


def read_comparisons(*folders: Path | str) -> list[Comparison]:
    """Read everything in folders of comparisons or runs: a comparison for each protocol, with methods in published order.

    Raises:
        DataError: nothing there, or a file that is not what it should be.
    """
    results = read_results(*folders)
    return comparisons_of(results, order=in_published_order(dict.fromkeys(one["method"] for one in results)))


def write_report(comparisons: Sequence[Comparison], out: Path | str) -> Path:
    """Write `report.html` into a folder, a section for each comparison; return the file.

    Raises:
        MissingDependencyError: Jinja2 or matplotlib is not installed.
    """
    sections = []
    for comparison in comparisons:
        figure, published = curves_of(comparison), published_beside(comparison)
        sections.append(
            {
                "comparison": comparison,
                "about": _about(comparison),
                "tables": [_html(comparison.table(part)) for part in ("final", "cost")],
                "picture": "" if figure is None else base64.b64encode(to_svg(figure)).decode(),
                "published": None if published is None else _html(published_table(published)),
            }
        )
    source = published_source() if any(one["published"] for one in sections) else ""
    title = comparisons[0].title if len(comparisons) == 1 else "Comparison of methods"
    environment = need("jinja2").Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    path = Path(out) / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another `compare` may write the page of its own trials at the same time.
    write_atomically(path, template.render(title=title, sections=sections, source=source).encode())
    return path


def published_table(published: Any) -> Any:
    """Return the DataFrame of `paper.published_beside` as text: a row per run, `*` where it differs by more than chance."""
    rows = []
    for run, own in published.groupby(["table", "run"], sort=False):
        row = {"run": run[1], "published as": own["method"].iloc[0]}
        for one in own.itertuples():
            title, digits = ("%", 2) if one.quantity == "accuracy_percent" else ("10¹² FLOPs", 3)
            for whose, value, deviation in (("published", one.published, one.published_deviation), ("ours", one.ours, None)):
                text = f"{value:,.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")
                row[f"{whose}, {title}"] = text + ("*" if whose == "ours" and one.flagged else "")
        row["why they differ"] = " ".join(dict.fromkeys(filter(None, own["reason"])))
        rows.append(row)
    return need("pandas").DataFrame(rows).set_index("run")


def _html(frame: Any) -> str:
    """Return a DataFrame of text as a table."""
    return str(frame.rename_axis(None).to_html(border=0))


def _about(comparison: Comparison) -> str:
    """Return the settings of the runs, and version and date, in one line."""
    settings = {name.rpartition(".")[2]: value for name, value in flat(comparison.config).items() if value is not None}
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if name != "seed"]
    known = [result.get("environment") or {} for result in comparison.results]
    versions = {f"sparsekit {one['sparsekit']}" for one in known if "sparsekit" in one}
    dates = sorted({str(one["finished"])[:10] for one in known if "finished" in one})
    return "; ".join([*parts, *sorted(versions), *([" to ".join(dict.fromkeys([dates[0], dates[-1]]))] if dates else [])])
