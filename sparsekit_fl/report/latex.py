r"""The table of a comparison in LaTeX, with the rules of booktabs; `\input` it into a paper."""

from __future__ import annotations

import re

from sparsekit_fl.report.comparison import Comparison, Row
from sparsekit_fl.report.table import Column

__all__ = ["latex_escape", "latex_table"]

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "−": "$-$", "×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$",
}  # fmt: skip


def latex_escape(text: str) -> str:
    """Text that LaTeX prints as it stands; letters that no plain LaTeX font has become a question mark."""
    escaped = "".join(_SPECIAL.get(letter, letter) for letter in text)
    return "".join(letter if ord(letter) < 0x250 else "?" for letter in escaped)


def latex_table(comparison: Comparison) -> str:
    r"""A floating table; it needs `\usepackage{booktabs}`, and `graphicx` to shrink it to the width of the text.

    Args:
        comparison: What stands in it.
    """
    columns = comparison.columns
    head = " & ".join(_title(column) for column in columns)
    body = []
    level = None
    for row in comparison.rows:
        if level is not None and row.level != level:
            body.append(r"    \midrule")
        level = row.level
        body.append("    " + " & ".join([_label(row), *(_trial(column, row) for column in columns)]) + r" \\")
    caption = latex_escape(f"{comparison.section.title}; {comparison.seeds_text()}.")
    notes = [
        rf"  \par\smallskip\footnotesize \textsuperscript{{{number}}}~{latex_escape(note)}"
        for number, note in enumerate(comparison.notes, 1)
    ]
    lines = [
        r"% needs \usepackage{booktabs} and \usepackage{graphicx}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        rf"  \label{{tab:{comparison.section.slug}}}",
        r"  \resizebox{\linewidth}{!}{%",
        rf"  \begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"    \toprule",
        rf"    method & {head} \\",
        r"    \midrule",
        *body,
        r"    \bottomrule",
        r"  \end{tabular}}",
        *notes,
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _title(column: Column) -> str:
    return latex_escape(column.title)


def _label(row: Row) -> str:
    notes = rf"\textsuperscript{{{','.join(map(str, row.notes))}}}" if row.notes else ""
    return latex_escape(row.label) + notes


def _trial(column: Column, row: Row) -> str:
    # Numbers keep their sign and unit; a thousand is set apart by a thin space.
    text = latex_escape(column.spread_text(row.numbers[column.name]))
    return re.sub(r"(?<=\d),(?=\d{3})", r"\\,", text)
