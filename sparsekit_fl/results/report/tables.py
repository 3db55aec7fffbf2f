"""The table of a comparison on a terminal, in Markdown, in LaTeX and on one HTML page, and published numbers beside it."""

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sparsekit_fl.errors import need
from sparsekit_fl.results.report.comparison import Comparison
from sparsekit_fl.results.report.plots import Figure

WALL_TIME = "wall time includes what else ran on the machine, simulated time does not"
_SIGNS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "−": "$-$", "×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$",
})  # fmt: skip


class Published(NamedTuple):
    """A published row beside ours, as text; `*` marks a number of ours that differs by more than chance."""

    run: str
    method: str
    accuracy: str
    our_accuracy: str
    difference: str
    flops: str
    our_flops: str
    reason: str


def published_rows(published: Any) -> list[Published]:
    """Write the DataFrame of `paper.published`, accuracies in per cent and 10¹² FLOPs; nothing for None."""
    found = []
    for _, pair in () if published is None else published.groupby(["table", "run"], sort=False):
        accuracy, flops = pair.itertuples()
        found.append(
            Published(
                run=accuracy.run,
                method=accuracy.method,
                accuracy=f"{accuracy.published:.2f}{_spread(accuracy.published_deviation, 2)}",
                our_accuracy=f"{accuracy.ours:.2f}{_spread(accuracy.our_deviation, 2)}",
                difference=f"{accuracy.difference:+.2f}{'*' if accuracy.flagged else ''}",
                flops=f"{flops.published:,.1f}",
                our_flops=f"{flops.ours:,.3f}{'*' if flops.flagged else ''}{_spread(flops.our_deviation, 3)}",
                reason=" ".join(dict.fromkeys(filter(None, (accuracy.reason, flops.reason)))),
            )
        )
    return found


def _spread(deviation: float | None, decimals: int) -> str:
    return "" if deviation is None else f" ± {deviation:,.{decimals}f}"


def _sheet(
    comparison: Comparison, mark: Callable[[Sequence[str]], str], text: Callable[[str], str] = str
) -> tuple[dict[str, list[str]], list[str]]:
    """Return title → cells of each column, and what stands below: notes and failures.

    Args:
        comparison: Rows of the table.
        mark: Writes the numbers of notes behind a method.
        text: Writes a text of others, such as a name.
    """
    rows = comparison.rows
    labels = [text(row.label) + (mark([str(number) for number in row.notes]) if row.notes else "") for row in rows]
    cells = {text(column.title): [text(row.text[column.name]) for row in rows] for column in comparison.columns}
    below = [f"{mark([str(number)]).strip()} {text(note)}" for number, note in enumerate(comparison.notes, 1)]
    return {"method": labels, "n": [row.runs for row in rows], **cells}, [*below, *map(text, comparison.failures())]


def show(comparison: Comparison, console: Console) -> None:
    """Print one table, of the first columns that fit into the console, then footnotes and failures."""
    columns, below = _sheet(comparison, lambda numbers: f" {' '.join(numbers).translate(_SIGNS)}")
    shown: dict[str, list[str]] = {}
    more: list[str] = []
    left = console.width
    for title, texts in columns.items():
        head = textwrap.wrap(title, max(10, *map(len, texts)))
        needed = max(len(text) for text in (*head, *texts)) + 2
        if needed > left and shown:
            more.append(title)
            continue
        shown["\n".join(head)] = texts
        left -= needed
    _print(console, shown)
    if more:
        console.print(f"Too wide for this terminal, but in --json and in compare.csv of --out: {', '.join(more)}.")
    console.print(f"{comparison.seeds_text()}; {WALL_TIME}")
    for line in below:
        console.print(escape(line), soft_wrap=True)


def _print(console: Console, columns: Mapping[str, Sequence[str]], title: str | None = None) -> None:
    """Print title → cells of each column; the first is words, the others are numbers."""
    heads = [Column(name, justify="right" if place else "left", no_wrap=True) for place, name in enumerate(columns)]
    table = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, cells))
    console.print(table)


def show_published(published: Any, console: Console) -> None:
    """Print published and ours in 80 columns; below, each reason with its methods."""
    lines = [
        (row.run, row.accuracy, row.our_accuracy, row.difference, row.flops, row.our_flops.split()[0])
        for row in published_rows(published)
    ]
    titles = ("method", "published, %", "ours, %", "", "e12 FLOPs", "ours, rows")
    _print(console, dict(zip(titles, zip(*lines, strict=True), strict=True)), title="beside the published tables")
    flagged = published[published["flagged"] == 1]
    if len(flagged):
        console.print("* differs by more than two deviations, FLOPs also by more than rounding:")
    for (quantity, reason), own in flagged.groupby(["quantity", "reason"], sort=False):
        what = "accuracy" if quantity == "accuracy_percent" else "FLOPs"
        console.print(f"  {what} of {escape(', '.join(dict.fromkeys(own['run'])))}: {escape(reason)}", soft_wrap=True)


def markdown_table(comparison: Comparison, published: Any = None) -> str:
    """Write a title, a table, whose last columns are the published numbers, and below it notes and failures."""
    columns, below = _sheet(comparison, lambda numbers: f" ({', '.join(numbers)})")
    # A method of both tables has the numbers of the first.
    beside = {row.run: row for row in reversed(published_rows(published))}
    if beside:
        rows = [beside.get(row.label) for row in comparison.rows]
        columns["published accuracy, %"] = [row.accuracy if row else "–" for row in rows]
        columns["published FLOPs"] = [f"{row.flops}T" if row else "–" for row in rows]
    lines = [tuple(columns), *zip(*columns.values(), strict=True)]
    table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    table.insert(1, f"| --- |{' ---: |' * (len(columns) - 1)}")
    title = f"**{comparison.title}; {comparison.seeds_text()}.**"
    return "\n\n".join(filter(None, [title, "\n".join(table), "\n".join(f"- {line}" for line in below)])) + "\n"


def latex_escape(text: str) -> str:
    """Escape text that LaTeX prints as it stands; letters that no plain LaTeX font has become a question mark."""
    return "".join(letter if ord(letter) < 0x250 else "?" for letter in text.translate(_LATEX))


def latex_table(comparison: Comparison) -> str:
    r"""Write a floating table to `\input` into a paper.

    It needs `\usepackage{booktabs}`, and `graphicx` to shrink it to the width of the text.
    """
    columns, below = _sheet(
        comparison, lambda numbers: rf"\textsuperscript{{{','.join(numbers)}}}",
        lambda text: re.sub(r"(?<=\d),(?=\d{3})", r"\\,", latex_escape(text)),
    )  # fmt: skip
    need("jinja2")  # by which pandas writes LaTeX
    frame = need("pandas").DataFrame(columns, dtype=object)
    table = frame.to_latex(index=False, escape=False, column_format="l" + "r" * (len(columns) - 1)).strip()
    caption = latex_escape(f"{comparison.title}; {comparison.seeds_text()}")
    return "\n".join(
        [
            r"% needs \usepackage{booktabs} and \usepackage{graphicx}",
            rf"\begin{{table}}\centering\caption{{{caption}.}}\label{{tab:{comparison.slug}}}",
            r"\resizebox{\linewidth}{!}{%",
            f"{table}}}",
            *(rf"\par\smallskip\footnotesize {line}" for line in below),
            r"\end{table}",
            "",
        ]
    )


_OPTIONS = {
    "classes_per_client": "{} classes a client",
    "images_per_class": "{} images a shard",
    "alpha": "Dirichlet α = {:g}",
}
_DISTINCT = {False: "shards of a client may share a class", True: "shards of a client have different classes"}


@dataclass(frozen=True, eq=False)
class Part:
    """What the page shows of one protocol.

    Args:
        comparison: The table.
        published: Published numbers beside ours.
        drawn: Figures and their pictures, SVG in base64.
        csv: File name of the numbers, beside the page.
        command: What was typed; empty where it is not known.
    """

    comparison: Comparison
    published: Sequence[Published]
    drawn: Sequence[tuple[Figure, str]]
    csv: str = ""
    command: str = ""

    @property
    def protocol(self) -> str:
        """Settings that all its runs have in common, in one line."""
        config = self.comparison.config
        about, training = config.get("experiment", {}), config.get("training", {})
        parts = [f"{config['cohort']} clients a round"] if "cohort" in config else []
        if training:
            parts.append(f"{training['local_epochs']} local epochs of batches of {training['batch_size']}")
            parts.append(f"learning rate {training['lr']:g}")
        parts += [f"{about['partition']} partition"] if about.get("partition") else []
        for name, value in about.get("partition_options", {}).items():
            if name == "distinct":
                parts.append(_DISTINCT[bool(value)])
            elif name != "lack_classes":
                parts.append(_OPTIONS[name].format(value) if name in _OPTIONS else f"{name.replace('_', ' ')}: {value}")
        parts += [f"capability {config['capability']}"] if "capability" in config else []
        return "; ".join(parts)

    @property
    def origin(self) -> str:
        """Version and date of the runs, as far as their results have them."""
        known = [result.get("environment", {}) for _, result in self.comparison.results]
        versions = sorted({str(one["sparsekit"]) for one in known if "sparsekit" in one})
        dates = sorted({str(one["finished"])[:10] for one in known if "finished" in one})
        when = " to ".join([dates[0], dates[-1]] if len(dates) > 1 else dates)
        return ", ".join(filter(None, [f"sparsekit {' and '.join(versions)}" if versions else "", when]))

    @property
    def best(self) -> Mapping[str, float | None]:
        """Column → the largest accuracy, or the least that is spent; wall time depends on the machine and is not marked."""
        found: dict[str, float | None] = {}
        for column in self.comparison.columns:
            means = [mean for row in self.comparison.rows if not math.isnan(mean := row.mean[column.name])]
            marked = column.name != "wall_seconds" and len(self.comparison.rows) > 1
            found[column.name] = (max if column.larger else min)(means, default=None) if marked else None
        return found


def page(parts: Sequence[Part], about_paper: Sequence[str] = ()) -> str:
    """Return the page as HTML, with sentences about the paper at its end; equal parts give equal text.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
    """
    jinja = need("jinja2")
    environment = jinja.Environment(
        loader=jinja.PackageLoader(__package__), autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    title = parts[0].comparison.title if len(parts) == 1 else "Comparison of methods"
    return str(environment.get_template("page.html.j2").render(title=title, parts=parts, about_paper=about_paper))
