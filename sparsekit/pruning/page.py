"""The report as HTML: tables, and pictures of widths and FLOPs by layer."""

from collections.abc import Sequence
from html import escape

from sparsekit.measure.budget import format_cost
from sparsekit.pruning.report import LayerReport, PruneReport

_STYLE = """
.sk-prune { font: 14px/1.45 system-ui, sans-serif; color: #1b1f24; max-width: 960px; }
.sk-prune h1 { font-size: 22px; margin: 0 0 4px; } .sk-prune h2 { font-size: 16px; margin: 28px 0 8px; }
.sk-prune p { margin: 4px 0; color: #4a5260; }
.sk-prune table { border-collapse: collapse; margin: 8px 0; }
.sk-prune th { font-weight: 600; border-bottom: 2px solid #c9d1da; }
.sk-prune th, .sk-prune td { padding: 3px 12px 3px 0; text-align: right; white-space: nowrap; }
.sk-prune td { border-bottom: 1px solid #eceff3; } .sk-prune .t { text-align: left; white-space: normal; }
.sk-prune code { font: 12px ui-monospace, monospace; } .sk-prune svg text { font: 11px ui-monospace, monospace; fill: #1b1f24; }
.sk-prune .dim { fill: #6a7380 !important; }
"""
_BAR, _DENSE = "#2563a8", "#dbe5f0"
_TEXTS = {"metric", "a pass of", "what", "step", "group", "kind", "module", "reason"}
"""Columns that are not numbers."""


def draw_widths(layers: Sequence[LayerReport], *, what: str = "width") -> str:
    """An SVG element: a bar for the output "width" or the "flops" of each layer, pale where dense and dark for what is kept."""
    names = [_short(layer.name) for layer in layers]
    left = 12 + 7 * max((len(name) for name in names), default=0)
    row, wide, right = 18, 460, 270
    pairs = [(layer.before, layer.after) if what == "width" else (layer.flops_before, layer.flops_after) for layer in layers]
    most = max((before for before, _ in pairs), default=1) or 1
    height = row * len(layers) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + right}" height="{height}"'
        f' viewBox="0 0 {left + wide + right} {height}" role="img" aria-label="{what} of each layer before and after">'
    ]
    for place, (layer, name, (before, after)) in enumerate(zip(layers, names, pairs, strict=True)):
        y = row * place + 2
        numbers = (
            f"{after:,} / {before:,}" if what == "width" else f"{format_cost('flops', after)} / {format_cost('flops', before)}"
        )
        share = f" ({after / before:.0%})" if before else ""
        parts.append(
            f"<g><title>{escape(layer.name)}: {escape(numbers)}{share}</title>"
            f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left}" y="{y + 1}" width="{max(1.0, wide * before / most):.1f}" height="13" fill="{_DENSE}"/>'
            f'<rect x="{left}" y="{y + 1}" width="{max(1.0, wide * after / most):.1f}" height="13" fill="{_BAR}"/>'
            f'<text class="dim" x="{left + wide * before / most + 6:.1f}" y="{y + 12}">{escape(numbers)}{share}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _short(name: str, most: int = 34) -> str:
    return name if len(name) <= most else f"…{name[-most + 1 :]}"


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
    """Costs and widths, for a notebook."""
    return f'<div class="sk-prune">{_title(report)}{_table(*report.tables()["Costs"])}{draw_widths(report.layers)}</div>'


def draw_page(report: PruneReport) -> str:
    """The whole report as a page of its own."""
    tables = {title: f"<h2>{title}</h2>{_table(*table)}" for title, table in report.tables().items()}
    groups, kept = tables.pop("Groups"), tables.pop("Kept whole", "")
    body = [_title(report), *(f"<p>{escape(note)}</p>" for note in report.notes), *tables.values()]
    body += ["<h2>Widths by layer</h2>", draw_widths(report.layers)]
    body += ["<h2>FLOPs by layer, for one example</h2>", draw_widths(report.layers, what="flops")]
    body += [groups, "<p>What lies between two groups counts for both.</p>", kept]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(report.model)}, pruned</title></head>'
        f'<body style="margin: 24px; background: #fff"><div class="sk-prune">{"".join(body)}</div></body></html>'
    )
