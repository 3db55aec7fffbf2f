"""The report as HTML: tables, and bars of widths and FLOPs by layer."""

from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from sparsekit.measure.budget import format_cost
from sparsekit.pruning.report import PruneReport

_STYLE = """
.sk-prune { font: 14px/1.45 system-ui, sans-serif; color: #1b1f24; max-width: 960px; }
.sk-prune h1 { font-size: 22px; margin: 0 0 4px; } .sk-prune h2 { font-size: 16px; margin: 28px 0 8px; }
.sk-prune p { margin: 4px 0; color: #4a5260; }
.sk-prune table { border-collapse: collapse; margin: 8px 0; }
.sk-prune th { font-weight: 600; border-bottom: 2px solid #c9d1da; }
.sk-prune th, .sk-prune td { padding: 3px 12px 3px 0; text-align: right; white-space: nowrap; }
.sk-prune td { border-bottom: 1px solid #eceff3; } .sk-prune .t { text-align: left; white-space: normal; }
.sk-prune code { font: 12px ui-monospace, monospace; }
.sk-prune .dense { min-width: 1px; background: #dbe5f0; } .sk-prune .kept { min-width: 1px; height: 13px; background: #2563a8; }
"""
_TEXTS = {"metric", "a pass of", "what", "step", "group", "kind", "module", "reason"}
"""Columns that are not numbers."""


def _bars(rows: Sequence[tuple[str, float, float]], told: Callable[[float], str]) -> str:
    """Return a table of names with a bar for what was before, pale, and what is left of it, dark."""
    most = max((before for _, before, _ in rows), default=0) or 1
    lines = (
        f"<tr><td class=t><code>{escape(name)}</code></td><td><div class=dense style='width: {460 * before / most:.1f}px'>"
        f"<div class=kept style='width: {after / (before or 1):.1%}'></div></div></td>"
        f"<td class=t>{told(after)} / {told(before)}{f' ({after / before:.0%})' if before else ''}</td></tr>"
        for name, before, after in rows
    )
    return f"<table>{''.join(lines)}</table>"


def _widths(report: PruneReport) -> str:
    return _bars([(layer.name, layer.before, layer.after) for layer in report.layers], "{:,}".format)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(values: Sequence[str], tag: str) -> str:
        cells = (f"<{tag}{' class=t' if head[place] in _TEXTS else ''}>{value}</{tag}>" for place, value in enumerate(values))
        return f"<tr>{''.join(cells)}</tr>"

    body = [line([f"<code>{escape(row[0])}</code>", *map(escape, row[1:])], "td") for row in rows]
    return f"<table>{line(head, 'th')}{''.join(body)}</table>"


def _title(report: PruneReport) -> str:
    return (
        f"<style>{_STYLE}</style><h1>{escape(report.model)}, pruned</h1><p>criterion {escape(report.criterion)}, allocation"
        f" {escape(report.allocation)}</p>"
    )


def draw_summary(report: PruneReport) -> str:
    """Return costs and widths, for a notebook."""
    return f'<div class="sk-prune">{_title(report)}{_table(*report.tables()["Costs"])}{_widths(report)}</div>'


def draw_page(report: PruneReport) -> str:
    """Return the whole report as a page of its own."""
    tables = {title: f"<h2>{title}</h2>{_table(*table)}" for title, table in report.tables().items()}
    groups, kept = tables.pop("Groups"), tables.pop("Cannot be pruned", "")
    body = [_title(report), *(f"<p>{escape(note)}</p>" for note in report.notes), *tables.values()]
    flops = [(layer.name, layer.flops_before, layer.flops_after) for layer in report.layers]
    body += ["<h2>Widths by layer</h2>", _widths(report)]
    body += ["<h2>FLOPs by layer, for one example</h2>", _bars(flops, partial(format_cost, "flops"))]
    body += [groups, "<p>Weights between two groups count for both.</p>", kept]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(report.model)}, pruned</title></head>'
        f'<body style="margin: 24px; background: #fff"><div class="sk-prune">{"".join(body)}</div></body></html>'
    )
