"""The published tables beside ours: on the terminal, on the page of a report, in Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit_fl.paper.published import PUBLISHED_LEVELS, UNEXPLAINED, Published, published_source
from sparsekit_fl.report.beside import Beside, Cell, Line, Sheet
from sparsekit_fl.results.extra import need

__all__ = ["page_of", "published_csv", "show_published"]


def page_of(rows: Sequence[Published]) -> Beside | None:
    """Make what stands beside a comparison in a report.

    Args:
        rows: From `published_beside`.

    Returns:
        Sheet of the page, columns of the Markdown table and `published.csv`; None without rows.
    """
    if not rows:
        return None
    flagged = sum(row.accuracy.flagged for row in rows)
    lines = []
    for row in rows:
        accuracy, flops = row.accuracy, row.flops
        cells = (
            Cell(row.run, row.run),
            Cell(f"{accuracy.published:.2f}", accuracy.published, f"± {accuracy.deviation:.2f}"),
            Cell(f"{accuracy.mean:.2f}", accuracy.mean, "" if accuracy.spread is None else f"± {accuracy.spread:.2f}"),
            Cell(f"{accuracy.difference:+.2f}", accuracy.difference, mark="flag" if accuracy.flagged else ""),
            Cell(f"{flops.published:,.1f}", flops.published),
            Cell(
                f"{flops.mean:,.3f}",
                flops.mean,
                f"± {flops.spread:,.3f}" if flops.spread else "",
                "flag" if flops.flagged else "",
            ),
            Cell(row.reason, mark="text"),
        )
        lines.append(Line(method=row.run, name=row.method, value=row.method, cells=cells))
    return Beside(
        title="Beside the published tables",
        caption=f"{published_source()}. {flagged} of {len(rows)} accuracies differ by more than two deviations,"
        " theirs and ours taken together; FLOPs are marked beyond rounding and two deviations. Both count training alone.",
        sheet=Sheet(
            words=("method", "run"),
            numbers=("published, %", "ours, %", "difference", "published, 10¹² FLOPs", "ours, row mask"),
            prose=("why they differ",),
            lines=tuple(lines),
            alarm=UNEXPLAINED,
        ),
        columns=("published accuracy, %", "published FLOPs"),
        texts={
            (row.run, level): (_text(row.accuracy.published, row.accuracy.deviation), f"{row.flops.published:g}T")
            for row in rows
            for level in PUBLISHED_LEVELS
        },
        files={"published.csv": published_csv(rows)},
    )


def _text(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def show_published(rows: Sequence[Published], console: Console) -> None:
    """Print published and ours; below, each reason with its methods.

    Args:
        rows: From `published_beside`.
        console: Console; 80 columns are enough.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="beside the published tables", title_justify="left")
    table.add_column("method", no_wrap=True)
    for title in ("published, %", "ours, %", "", "e12 FLOPs", "ours, rows"):
        table.add_column(title, justify="right", no_wrap=True)
    why: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        accuracy, flops = row.accuracy, row.flops
        table.add_row(
            escape(row.run),
            _text(accuracy.published, accuracy.deviation),
            _text(accuracy.mean, accuracy.spread),
            f"{accuracy.difference:+.2f}{'*' if accuracy.flagged else ' '}",
            f"{flops.published:.1f}",
            f"{flops.mean:.3f}{'*' if flops.flagged else ' '}",
        )
        for quantity, pair in (("accuracy", accuracy), ("FLOPs", flops)):
            if pair.flagged:
                why.setdefault((quantity, pair.reason), []).append(row.run)
    console.print(table)
    if why:
        console.print("* differs by more than two deviations, FLOPs also by more than rounding:")
    for (quantity, reason), runs in sorted(why.items(), key=lambda item: item[0][1] == UNEXPLAINED):
        console.print(f"  {quantity} of {escape(', '.join(dict.fromkeys(runs)))}: {escape(reason)}", soft_wrap=True)


def published_csv(rows: Sequence[Published]) -> str:
    """Return CSV with one line per published number that has a run."""
    columns = ["table", "method", "run", "quantity", "published", "published_deviation", "ours", "our_deviation"]
    lines = []
    for row in rows:
        for quantity, pair in (("accuracy_percent", row.accuracy), ("flops_e12", row.flops)):
            numbers = (pair.published, pair.deviation, pair.mean, pair.spread, pair.difference, int(pair.flagged))
            lines.append((row.table, row.method, row.run, quantity, *numbers, pair.reason))
    frame = need("pandas").DataFrame(lines, columns=[*columns, "difference", "flagged", "reason"], dtype=object)
    return str(frame.to_csv(index=False, lineterminator="\n"))
