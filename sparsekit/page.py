"""HTML pages of results with tables, bars and SVG charts. They open from a disk, without a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import cycle, pairwise
from string import Template
from typing import Any

# Okabe and Ito's colors, which remain distinct to color-blind readers.
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LETTER = 400, 270, 52, 12, 44, 7


def page(title: str, parts: Sequence[str]) -> str:
    """Return a complete HTML page of `parts`, which the other functions of this module return."""
    text = files("sparsekit").joinpath("page.html").read_text(encoding="utf-8")
    return Template(text).substitute(title=escape(title), body="\n".join(filter(None, parts)))


def heading(text: str, level: int = 2) -> str:
    """Return a heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; `kind` is "soft" for remarks, "failed" for failures, or empty."""
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if text else ""


def row(*parts: str) -> str:
    """Return charts next to each other, if the window is wide enough."""
    return f'<div class="charts">{"".join(parts)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[str] = ()) -> str:
    """Return a table; empty without rows. `texts`: titles of columns of prose, which are aligned to the left and may wrap."""
    return _table(head, [[escape(text) for text in cells] for cells in rows], texts)


def bars(head: Sequence[str], rows: Sequence[tuple[Sequence[str], float, float]]) -> str:
    """Return a table with a bar at the end of each row for a value before and, inside it, a darker bar for the value after.

    `head` includes a title of the bars. `rows`: cells, the value before, and the value after, which is at most as large.
    """
    most = max((before for _, before, _ in rows), default=0.0) or 1.0
    drawn = []
    for cells, before, after in rows:
        bar = f'<span style="width:{before / most:.2%}"><i style="width:{after / (before or 1.0):.2%}"></i></span>'
        drawn.append([*map(escape, cells), f'<div class="bar">{bar}</div>'])
    return _table(head, drawn)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str] = ()) -> str:
    """Return a table of cells that are HTML."""
    if not rows:
        return ""
    kinds = [' class="text"' if title in texts else "" for title in head]
    top = "".join(f"<th{kind}>{escape(title)}</th>" for title, kind in zip(head, kinds, strict=True))
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=True))
        lines.append(f"<tr><th>{first}</th>{cells}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def chart(
    series: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    x: str,
    y: str,
    x_text: Callable[[float], str] = "{:g}".format,
    y_text: Callable[[float], str] = "{:g}".format,
    legend: bool = True,
) -> str:
    """Return a chart with a line for each series.

    `series`: name → points (x, y, deviation of y), in the order of x. `x` and `y`: titles of the horizontal axis and of the
    chart. `x_text` and `y_text` format the numbers on an axis. `legend`: whether to name the series; without it, lines are
    thin.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    left, right = min(p[0] for p in points), max(p[0] for p in points)
    low, high = min(p[1] - p[2] for p in points), max(p[1] + p[2] for p in points)
    across, up = _axis(left, right, _LEFT, _WIDTH - 12), _axis(low, high, _HEIGHT - _BOTTOM, _TOP)
    drawn = _grid(x, across, x_text, up, y_text, _HEIGHT)
    for color, (name, line) in zip(cycle(_COLORS), series.items()):
        path = [(across(at), up(value)) for at, value, _ in line]
        if any(deviation for *_, deviation in line):
            edge = [(across(at), up(value + d)) for at, value, d in line] + [
                (across(at), up(value - d)) for at, value, d in line[::-1]
            ]
            drawn += f'<polygon points="{_points(edge)}" fill="{color}" opacity="0.15"/>'
        kind = 'stroke-width="2"' if legend else 'stroke-width="1" opacity="0.5"'
        drawn += (
            f'<polyline points="{_points(path)}" fill="none" stroke="{color}" {kind}><title>{escape(name)}</title></polyline>'
        )
        if not legend:
            drawn += "".join(f'<circle cx="{at:.1f}" cy="{to:.1f}" r="2" fill="{color}" opacity="0.6"/>' for at, to in path)
    keys = "".join(
        f'<span style="color:{color}">■</span> {escape(name)} &nbsp; '
        for color, name in zip(cycle(_COLORS), series if legend else ())
    )
    return _figure(drawn, f"{escape(y)}<br>{keys}", _HEIGHT)


def svg_file(series: Mapping[str, Sequence[tuple[float, float, float]]], *, y: str, **given: Any) -> str:
    """Return a `chart` as the text of a standalone SVG file, with the names of the series below it; empty without values."""
    figure = chart(series, y=y, **given)
    if not figure:
        return ""
    drawn = figure[figure.index(">", figure.index("<svg")) + 1 : figure.index("</svg>")]
    for place, (color, name) in enumerate(zip(cycle(_COLORS), series)):
        at = _HEIGHT + 16 * place + 12
        drawn += f'<text x="{_LEFT}" y="{at}"><tspan style="fill:{color}">■</tspan> {escape(name)}</text>'
    size = f"{_WIDTH} {_HEIGHT + 16 * len(series) + 4}"
    width, height = size.split()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width}" height="{height}">'
        f"<title>{escape(y)}</title><style>text {{ font: 12px sans-serif; fill: #22262b }} .grid {{ stroke: #dfe3e8 }}</style>"
        f"{drawn}</svg>\n"
    )


def strips(rows: Mapping[str, Sequence[float]], *, x: str, y: str, x_text: Callable[[float], str] = "{:g}".format) -> str:
    """Return a row of dots for each name, one for each value, with a mark at the median; other arguments as in `chart`."""
    values = [value for own in rows.values() for value in own]
    if not values:
        return ""
    height, start = 30 * len(rows) + _TOP + _BOTTOM, 12 + _LETTER * max(map(len, rows))
    across = _axis(min(values), max(values), min(start, _WIDTH // 2), _WIDTH - 12)
    drawn = _grid(x, across, x_text, None, x_text, height)
    for place, (color, (name, own)) in enumerate(zip(cycle(_COLORS), rows.items())):
        middle = _TOP + 30 * place + 15
        drawn += f'<text x="0" y="{middle + 4}">{escape(name)}</text>'
        # Dots have different heights, since equal values would hide each other.
        drawn += "".join(
            f'<circle cx="{across(value):.1f}" cy="{middle + (number * 7) % 17 - 8}" r="3" fill="{color}" opacity="0.45"/>'
            for number, value in enumerate(own)
        )
        at = across(sorted(own)[len(own) // 2]) if own else 0.0
        drawn += f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{middle - 12}" y2="{middle + 12}"/>' if own else ""
    return _figure(drawn, escape(y), height)


class _axis:
    """A linear map from numbers to positions in a picture, with a margin at both ends."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        room = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
        self.low, self.high, self.start, self.end = low - room, high + room, start, end

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return at most `most` round numbers of the axis."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= rough)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _grid(
    title: str, across: _axis, x_text: Callable[[float], str], up: _axis | None, y_text: Callable[[float], str], height: int
) -> str:
    bottom = height - _BOTTOM
    most = next(n for n in (6, 5, 4, 3, 2, 1) if n == 1 or _fits(across, n, x_text))
    drawn = ""
    for value in across.ticks(most):
        at = across(value)
        drawn += f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        drawn += f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(x_text(value))}</text>'
    for value in up.ticks(6) if up else ():
        at = up(value) if up else 0.0
        drawn += f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{at:.1f}" y2="{at:.1f}"/>'
        drawn += f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(y_text(value))}</text>'
    return (
        drawn + f'<text x="{(across.start + across.end) / 2:.0f}" y="{height - 8}" text-anchor="middle">{escape(title)}</text>'
    )


def _fits(axis: _axis, most: int, text: Callable[[float], str]) -> bool:
    """Return whether the labels of at most `most` ticks do not touch each other and are distinct."""
    labels = [(axis(value), text(value)) for value in axis.ticks(most)]
    gaps = [b - a - _LETTER * (len(before) + len(after)) / 2 for (a, before), (b, after) in pairwise(labels)]
    return min(gaps, default=9.0) >= 8.0 and len({label for _, label in labels}) == len(labels)


def _points(path: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in path)


def _figure(drawn: str, caption: str, height: int) -> str:
    svg = f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">{drawn}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"
