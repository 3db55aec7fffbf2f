"""The table of a comparison on a terminal, in Markdown and in LaTeX, and published numbers beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit_fl.results.extra import need
from sparsekit_fl.results.report.comparison import Comparison

WALL_TIME = "wall time includes what else ran on the machine, simulated time does not"
_SIGNS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "−": "$-$", "×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$",
}  # fmt: skip


def show(comparison: Comparison, console: Console) -> None:
    """Print the table, cut into several where the console is too narrow, then footnotes and failures."""
    rows = comparison.rows
    labels = [f"{row.label} {' '.join(map(str, row.notes)).translate(_SIGNS)}".strip() for row in rows]
    columns = [("n", [row.runs for row in rows])]
    columns += [(column.title, [row.text[column.name] for row in rows]) for column in comparison.columns]
    first = max([len("method"), *map(len, labels)]) + 3
    parts: list[list[tuple[str, list[str]]]] = []
    left = 0
    for title, texts in columns:
        needed = max([len(title), *map(len, texts)]) + 3
        if needed > left:
            parts.append([])
            left = console.width - first
        parts[-1].append((title, texts))
        left -= needed
    for part in parts:
        table = Table("method", box=box.SIMPLE_HEAD, pad_edge=False)
        table.columns[0].no_wrap = True
        for title, _ in part:
            table.add_column(title, justify="right", no_wrap=True)
        for label, *cells in zip(labels, *(texts for _, texts in part), strict=True):
            table.add_row(escape(label), *cells)
        console.print(table)
    console.print(f"{comparison.seeds_text()}; {WALL_TIME}")
    for number, note in enumerate(comparison.notes, 1):
        console.print(f"{str(number).translate(_SIGNS)} {escape(note)}", soft_wrap=True)
    for failure in comparison.failures():
        console.print(escape(failure), soft_wrap=True)


def markdown_table(comparison: Comparison, published: Any = None) -> str:
    """Write a title, a table, and below it notes and failures.

    Args:
        comparison: Rows of the table.
        published: From `paper.published`; its numbers are the last columns.
    """
    beside = {} if published is None else published_texts(published)
    lines = [["method", "n", *(column.title for column in comparison.columns)]]
    lines[0] += ["published accuracy, %", "published FLOPs"] if beside else []
    for row in comparison.rows:
        notes = f" ({', '.join(map(str, row.notes))})" if row.notes else ""
        numbers = [row.text[column.name] for column in comparison.columns]
        more = beside.get(row.label, ["–", "–"]) if beside else []
        lines.append([row.label + notes, row.runs, *numbers, *more])
    table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    table.insert(1, f"| --- |{' ---: |' * (len(lines[0]) - 1)}")
    below = [f"- ({number}) {note}" for number, note in enumerate(comparison.notes, 1)]
    below += [f"- {failure}" for failure in comparison.failures()]
    parts = [f"**{comparison.title}; {comparison.seeds_text()}.**", "\n".join(table), *(["\n".join(below)] if below else [])]
    return "\n\n".join(parts) + "\n"


def latex_escape(text: str) -> str:
    """Escape text that LaTeX prints as it stands; letters that no plain LaTeX font has become a question mark."""
    escaped = "".join(_SPECIAL.get(letter, letter) for letter in text)
    return "".join(letter if ord(letter) < 0x250 else "?" for letter in escaped)


def latex_table(comparison: Comparison) -> str:
    r"""Write a floating table to `\input` into a paper.

    It needs `\usepackage{booktabs}`, and `graphicx` to shrink it to the width of the text.

    Args:
        comparison: Rows of the table.
    """
    lines = []
    for row in comparison.rows:
        notes = rf"\textsuperscript{{{','.join(map(str, row.notes))}}}" if row.notes else ""
        numbers = [re.sub(r"(?<=\d),(?=\d{3})", r"\\,", latex_escape(row.text[column.name])) for column in comparison.columns]
        lines.append([latex_escape(row.label) + notes, row.runs, *numbers])
    titles = ["method", "n", *(latex_escape(column.title) for column in comparison.columns)]
    frame = need("pandas").DataFrame(lines, columns=titles, dtype=object)
    need("jinja2")  # by which pandas writes LaTeX
    table = frame.to_latex(index=False, escape=False, column_format="l" + "r" * (len(titles) - 1)).strip()
    below = [rf"\textsuperscript{{{number}}}~{latex_escape(note)}" for number, note in enumerate(comparison.notes, 1)]
    below += [latex_escape(failure) for failure in comparison.failures()]
    caption = latex_escape(f"{comparison.title}; {comparison.seeds_text()}")
    return "\n".join(
        [
            r"% needs \usepackage{booktabs} and \usepackage{graphicx}",
            rf"\begin{{table}}\centering\caption{{{caption}.}}\label{{tab:{comparison.slug}}}",
            r"\resizebox{\linewidth}{!}{%",
            f"{table}}}",
            *(rf"\par\smallskip\footnotesize {note}" for note in below),
            r"\end{table}",
            "",
        ]
    )


def published_texts(published: Any) -> Mapping[str, list[str]]:
    """Map the labels of rows to published accuracy and FLOPs as text.

    Args:
        published: From `paper.published`.
    """
    found: dict[str, list[str]] = {}
    for one in published.itertuples():
        spread = "" if one.published_deviation is None else f" ± {one.published_deviation:.2f}"
        text = f"{one.published:.2f}{spread}" if one.quantity == "accuracy_percent" else f"{one.published:g}T"
        found.setdefault(one.run, []).append(text)
    return {run: texts[:2] for run, texts in found.items()}


def show_published(published: Any, console: Console) -> None:
    """Print published and ours; below, each reason with its methods.

    Args:
        published: From `paper.published`, with at least one row.
        console: Console; 80 columns are enough.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="beside the published tables", title_justify="left")
    table.add_column("method", no_wrap=True)
    for title in ("published, %", "ours, %", "", "e12 FLOPs", "ours, rows"):
        table.add_column(title, justify="right", no_wrap=True)
    for _, pair in published.groupby(["table", "run"], sort=False):
        accuracy, flops = pair.itertuples()
        ours = f"{accuracy.ours:.2f}" + ("" if accuracy.our_deviation is None else f" ± {accuracy.our_deviation:.2f}")
        table.add_row(
            escape(accuracy.run),
            f"{accuracy.published:.2f} ± {accuracy.published_deviation:.2f}",
            ours,
            f"{accuracy.difference:+.2f}{'*' if accuracy.flagged else ' '}",
            f"{flops.published:.1f}",
            f"{flops.ours:.3f}{'*' if flops.flagged else ' '}",
        )
    console.print(table)
    flagged = published[published["flagged"] == 1]
    if len(flagged):
        console.print("* differs by more than two deviations, FLOPs also by more than rounding:")
    for (quantity, reason), own in flagged.groupby(["quantity", "reason"], sort=False):
        what = "accuracy" if quantity == "accuracy_percent" else "FLOPs"
        runs: Sequence[str] = list(dict.fromkeys(own["run"]))
        console.print(f"  {what} of {escape(', '.join(runs))}: {escape(reason)}", soft_wrap=True)
