r"""The table of a comparison in Markdown and LaTeX, and the templates that every file of a report is made from.

Templates are Jinja's. The tables are too: pandas' `to_latex` rules no line between levels and its `to_markdown` escapes no bar.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from sparsekit_fl.report.beside import Beside
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.results.extra import need

__all__ = ["latex_escape", "latex_table", "markdown_table", "render"]

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "−": "$-$", "×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$",
}  # fmt: skip

# Braces and per cent signs are LaTeX's own.
_LATEX_SYNTAX = {
    "block_start_string": "<%", "block_end_string": "%>",
    "variable_start_string": "<<", "variable_end_string": ">>",
    "comment_start_string": "<#", "comment_end_string": "#>",
}  # fmt: skip


def latex_escape(text: str) -> str:
    """Escape text that LaTeX prints as it stands; letters that no plain LaTeX font has become a question mark."""
    escaped = "".join(_SPECIAL.get(letter, letter) for letter in text)
    return "".join(letter if ord(letter) < 0x250 else "?" for letter in escaped)


def _thousands(text: str) -> str:
    """Set thousands apart by a thin space."""
    return re.sub(r"(?<=\d),(?=\d{3})", r"\\,", text)


def _flag(text: str, alarm: str) -> Any:
    """Make the words `alarm` stand out in HTML."""
    escaped = need("markupsafe").escape(text)
    return escaped.replace(alarm, need("markupsafe").Markup('<span class="flag">{}</span>').format(alarm)) if alarm else escaped


@cache
def _environment(kind: str) -> Any:
    jinja = need("jinja2")
    environment = jinja.Environment(
        loader=jinja.PackageLoader(__package__),
        autoescape=kind == "html",
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **(_LATEX_SYNTAX if kind == "tex" else {}),
    )
    environment.filters |= {"tex": latex_escape, "thousands": _thousands, "flag": _flag}
    return environment


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder.

    Args:
        template: Name without its ending `.j2`; HTML is escaped.
        values: Values of its variables.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
    """
    return str(_environment(template.rpartition(".")[2]).get_template(f"{template}.j2").render(**values))


def latex_table(comparison: Comparison) -> str:
    r"""Write a floating table to `\input` into a paper.

    It needs `\usepackage{booktabs}`, and `graphicx` to shrink it to the width of the text.

    Args:
        comparison: Rows of the table.
    """
    return render(
        "table.tex", columns=comparison.columns, rows=comparison.rows, slug=comparison.section.slug, **_around(comparison)
    )


def markdown_table(comparison: Comparison, beside: Beside | None = None) -> str:
    """Write a title, a table, and below it the notes.

    Args:
        comparison: Rows of the table.
        beside: Numbers for its last columns; rows without them have dashes there.
    """
    more = beside.columns if beside else ()
    texts = beside.texts if beside else {}
    lines = [["method", *(column.title for column in comparison.columns), *more]]
    for row in comparison.rows:
        notes = f" ({', '.join(map(str, row.notes))})" if row.notes else ""
        numbers = [column.spread_text(row.numbers[column.name]) for column in comparison.columns]
        lines.append([row.label + notes, *numbers, *texts.get((row.method, row.level), ["–"] * len(more))])
    return render("table.md", lines=lines, **_around(comparison))


def _around(comparison: Comparison) -> dict[str, Any]:
    return {"title": comparison.section.title, "seeds": comparison.seeds_text(), "notes": comparison.notes}
