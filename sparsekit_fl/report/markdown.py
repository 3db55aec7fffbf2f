"""The table of a comparison in Markdown, as repositories and issues show it, with the published numbers in its last columns."""

from __future__ import annotations

from collections.abc import Sequence

from sparsekit_fl.paper.published import PUBLISHED_LEVELS, Beside
from sparsekit_fl.report.comparison import Comparison

__all__ = ["markdown_table"]


def markdown_table(comparison: Comparison, beside: Sequence[Beside] = ()) -> str:
    """A title, a table, and below it what the numbers behind labels mean.

    Args:
        comparison: What stands in it.
        beside: Published rows; methods without one have dashes there.
    """
    published = {(row.run, level): row for row in beside for level in PUBLISHED_LEVELS}
    head = ["method", *(column.title for column in comparison.columns)]
    if published:
        head += ["published accuracy, %", "published FLOPs"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in comparison.rows:
        notes = f" ({', '.join(map(str, row.notes))})" if row.notes else ""
        trials = [f"{row.label}{notes}", *(column.spread_text(row.numbers[column.name]) for column in comparison.columns)]
        if published:
            trials += _published(published.get((row.method, row.level)))
        lines.append(trials)
    table = "\n".join(f"| {' | '.join(_escape(trial) for trial in line)} |" for line in lines)
    notes_below = "".join(f"\n- ({number}) {note}" for number, note in enumerate(comparison.notes, 1))
    title = f"**{comparison.section.title}; {comparison.seeds_text()}.**"
    return f"{title}\n\n{table}\n" + (f"{notes_below}\n" if notes_below else "")


def _published(row: Beside | None) -> list[str]:
    if row is None:
        return ["–", "–"]
    accuracy = row.accuracy
    spread = "" if accuracy.deviation is None else f" ± {accuracy.deviation:.2f}"
    return [f"{accuracy.published:.2f}{spread}", f"{row.flops.published:g}T"]


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
