"""One HTML page of everything: tables that sort, charts whose methods can be hidden, the published numbers beside ours.

It holds all it needs, so that it opens from a disk, without a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from sparsekit_fl.paper.published import UNEXPLAINED, Beside, Figure, published_source
from sparsekit_fl.report.comparison import Comparison, Row
from sparsekit_fl.report.drawing import series_style
from sparsekit_fl.report.table import Column
from sparsekit_fl.report.trials import Level

__all__ = ["PagePart", "page"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PagePart:
    """What the page shows of one protocol.

    Args:
        comparison: Its table.
        beside: Published rows; empty where there are none.
        charts: Title and SVG of each chart.
    """

    comparison: Comparison
    beside: Sequence[Beside]
    charts: Sequence[tuple[str, str]]


def page(parts: Sequence[PagePart]) -> str:
    """The page.

    Args:
        parts: One per protocol.

    Returns:
        HTML; equal parts give equal text.
    """
    title = parts[0].comparison.section.title if len(parts) == 1 else "Comparison of methods"
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1><button id="theme" type="button" hidden></button></header>\n'
    )
    body = "".join(_section(part, alone=len(parts) == 1) for part in parts)
    return f"{head}<main>\n{body}</main>\n<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _section(part: PagePart, *, alone: bool) -> str:
    section = part.comparison.section
    heading = "" if alone else f"<h2>{escape(section.title)}</h2>\n"
    charts = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>\n" for title, svg in part.charts)
    return (
        f'<section id="{section.slug}">\n{heading}<p class="soft">{escape(_protocol(part.comparison))}</p>\n'
        + _failed(part.comparison)
        + (_chips(part.comparison) + _table(part.comparison) if part.comparison.rows else "")
        + (f'<div class="charts">\n{charts}</div>\n' if charts else "")
        + (_published(part) if part.beside else "")
        + (_runs(part.comparison) if part.comparison.rows else "")
        + "</section>\n"
    )


def _protocol(comparison: Comparison) -> str:
    """What all its runs have in common, in one line."""
    config = next((trial.config for trial in comparison.section.trials if trial.config), {})
    about, training = config.get("experiment", {}), config.get("training", {})
    dealt = {**about.get("partition_options", {})}
    dealt.pop("lack_classes", None)
    parts = [
        f"{config['cohort']} clients a round" if "cohort" in config else "",
        f"{training['local_epochs']} local epochs of batches of {training['batch_size']}, learning rate {training['lr']:g}"
        if training
        else "",
        f"{about['partition']} partition" if about.get("partition") else "",
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in dealt.items()),
        f"capability {config['capability']}" if "capability" in config else "",
    ]
    return "; ".join(part for part in parts if part)


def _failed(comparison: Comparison) -> str:
    trials = comparison.section.failed
    if not trials:
        return ""
    lines = "".join(
        f"<li><strong>{escape(comparison.section.name_of(trial))}</strong>: {escape(trial.error or '')}</li>"
        for trial in trials
    )
    return f'<details class="failed" open><summary class="flag">{len(trials)} failed</summary><ul>{lines}</ul></details>\n'


def _chips(comparison: Comparison) -> str:
    chips = []
    for place, method in enumerate(comparison.section.methods):
        if any(row.method == method for row in comparison.rows):
            colour, dashes, _ = series_style(place)
            dash = f' stroke-dasharray="{" ".join(f"{2 * length:g}" for length in dashes)}"' if dashes else ""
            sample = (
                '<svg viewBox="0 0 32 12" aria-hidden="true">'
                f'<path d="M0 6H32" stroke="{colour}" stroke-width="4"{dash} fill="none"/></svg>'
            )
            name = escape(method)
            chips.append(f'<button type="button" data-toggle="{name}" aria-pressed="true">{sample}{name}</button>')
    every = "".join(
        f'<button type="button" data-every="{way}">{text}</button>' for way, text in (("on", "all"), ("off", "none"))
    )
    return f'<div class="chips" role="group" aria-label="methods shown">{"".join(chips)}{every}</div>\n'


def _head(titles: Sequence[tuple[str, bool]]) -> str:
    trials = "".join(
        f'<th scope="col" tabindex="0" aria-sort="none"{" data-words" if words else ""}>{escape(title)}</th>'
        for title, words in titles
    )
    return f"<thead><tr>{trials}</tr></thead>"


def _table(comparison: Comparison) -> str:
    columns = comparison.columns
    head = _head([("method", True), *((column.title, False) for column in columns)])
    rows = "".join(_row(comparison, row, columns) for row in comparison.rows)
    notes = "".join(
        f'<p class="note"><sup>{number}</sup> {escape(note)}</p>' for number, note in enumerate(comparison.notes, 1)
    )
    caption = f"{comparison.seeds_text()}; accuracies are means over all clients, each on its own test data."
    table = f"<table>{head}<tbody>{rows}</tbody></table>"
    return f'<p class="soft">{escape(caption)}</p>\n<div class="scroll">{table}</div>\n{notes}\n'


def _row(comparison: Comparison, row: Row, columns: Sequence[Column]) -> str:
    signs = f"<sup>{escape(','.join(map(str, row.notes)))}</sup>" if row.notes else ""
    trials = []
    for column in columns:
        found = row.numbers[column.name]
        text, _, rest = column.spread_text(found).partition(" ± ")
        value = "" if found.mean is None else repr(found.mean)
        best = ' class="best"' if found.mean is not None and found.mean == _best(comparison, column) else ""
        deviation = f" <small>± {escape(rest)}</small>" if rest else ""
        trials.append(f'<td data-value="{value}"{best}>{escape(text)}{deviation}</td>')
    head = _name(comparison, row.method, row.level, signs)
    return f'<tr data-method="{escape(row.method)}">{head}{"".join(trials)}</tr>'


def _name(comparison: Comparison, method: str, level: Level, signs: str = "") -> str:
    """The head of a row: a name that does not break, and its level below."""
    text = comparison.section.level_text(level)
    value = escape(", ".join(part for part in (method, text) if part))
    below = f"<small>{escape(text)}</small>" if text else ""
    return f'<th scope="row" data-value="{value}"><span>{escape(method)}{signs}</span>{below}</th>'


def _best(comparison: Comparison, column: Column) -> float | None:
    """The largest accuracy; the least of anything that is spent has no honest winner, so it is not marked."""
    if column.unit != "share" or len(comparison.rows) < 2:
        return None
    return max((mean for row in comparison.rows if (mean := row.numbers[column.name].mean) is not None), default=None)


def _published(part: PagePart) -> str:
    head = _head(
        [("method", True), ("run", True), ("published, %", False), ("ours, %", False), ("difference", False),
         ("published, 10¹² FLOPs", False), ("ours, row mask", False)]
    )  # fmt: skip
    head = head.replace("</tr>", '<th scope="col" class="text">why they differ</th></tr>')
    rows = "".join(_published_row(row) for row in part.beside)
    flagged = sum(row.accuracy.flagged for row in part.beside)
    caption = (
        f"{published_source()}. {flagged} of {len(part.beside)} accuracies differ by more than two deviations, theirs and ours"
        " taken together; FLOPs are marked beyond rounding and two deviations."
    )
    return (
        f'<h3>Beside the published tables</h3>\n<p class="soft">{escape(caption)}</p>\n<div class="scroll"><table>'
        f"{head}<tbody>{rows}</tbody></table></div>\n"
    )


def _published_row(row: Beside) -> str:
    method, run = escape(row.method), escape(row.run)
    return (
        f'<tr data-method="{run}"><th scope="row" data-value="{method}"><span>{method}</span></th>'
        f'<td data-value="{run}">{run}</td>{_accuracy(row.accuracy)}{_flops(row.flops)}'
        f'<td class="text">{_why(row.reason)}</td></tr>'
    )


def _why(reason: str) -> str:
    return escape(reason).replace(UNEXPLAINED, f'<span class="flag">{UNEXPLAINED}</span>')


def _accuracy(figure: Figure) -> str:
    mean, deviation = figure.ours.mean or 0.0, figure.ours.deviation
    ours = f"{mean:.2f}" + ("" if deviation is None else f" <small>± {deviation:.2f}</small>")
    mark = ' class="flag"' if figure.flagged else ""
    return (
        f'<td data-value="{figure.published!r}">{figure.published:.2f} <small>± {figure.deviation:.2f}</small></td>'
        f'<td data-value="{mean!r}">{ours}</td><td data-value="{figure.difference!r}"{mark}>{figure.difference:+.2f}</td>'
    )


def _flops(figure: Figure) -> str:
    mean, deviation = figure.ours.mean or 0.0, figure.ours.deviation
    ours = f"{mean:,.3f}" + (f" <small>± {deviation:,.3f}</small>" if deviation else "")
    mark = ' class="flag"' if figure.flagged else ""
    return f'<td data-value="{figure.published!r}">{figure.published:,.1f}</td><td data-value="{mean!r}"{mark}>{ours}</td>'


def _runs(comparison: Comparison) -> str:
    """Every single run, folded away."""
    columns = comparison.columns
    head = _head([("method", True), ("seed", False), *((column.title, False) for column in columns)])
    rows = []
    for method in comparison.section.methods:
        for level in comparison.section.levels:
            for trial, numbers in comparison.runs(method, level):
                trials = "".join(
                    f'<td data-value="{"" if numbers[column.name] is None else repr(numbers[column.name])}">'
                    f"{escape(column.text(numbers[column.name]))}</td>"
                    for column in columns
                )
                rows.append(
                    f'<tr data-method="{escape(method)}">{_name(comparison, method, level)}'
                    f'<td data-value="{trial.seed}">{trial.seed}</td>{trials}</tr>'
                )
    table = f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"
    return f'<details><summary>Every run</summary><div class="scroll">{table}</div></details>\n'
