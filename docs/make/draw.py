"""Draw the pictures of the site: `python docs/make/draw.py`. They are drawn from this file and sparsekit alone, always the same."""

import math
from html import escape
from pathlib import Path

HOME = Path(__file__).parent.parent / "pictures"

INK, SOFT, LINE, KEPT, GONE, ACCENT, SECOND = "#22302f", "#5d6b6a", "#9aa8a6", "#11857c", "#e3e8e7", "#d8622a", "#3a6ea5"
DARK = {INK: "#e4ebea", SOFT: "#a9b6b5", LINE: "#6f7d7b", GONE: "#3b4746", "#ffffff": "#22302f", "#e4f0ee": "#1d3a37"}
"""Color → color of the dark scheme. A page passes its scheme on to a picture by `color-scheme` (docs/assets/site.css)."""
FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, sans-serif'"


class Sheet:
    """An SVG of a size, and what is drawn on it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none", stroke: str = LINE, *, round: float = 3
    ) -> None:
        """A rectangle."""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{round:g}' fill='{fill}' stroke='{stroke}'/>"
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, fill: str = INK, anchor: str = "middle", bold: bool = False
    ) -> None:
        """A line of text around, from or up to a point."""
        weight = " font-weight='600'" if bold else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{fill}' text-anchor='{anchor}'{weight}>{escape(words)}</text>"
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, *, width: float = 1.5, arrow: bool = False
    ) -> None:
        """A straight line, with an arrow at its end where asked."""
        end = " marker-end='url(#arrow)'" if arrow else ""
        self.parts.append(
            f"<path d='M{x1:g} {y1:g}L{x2:g} {y2:g}' stroke='{stroke}' stroke-width='{width:g}' fill='none'{end}/>"
        )

    def curve(self, points: list[tuple[float, float]], stroke: str, *, dashed: bool = False) -> None:
        """A line through points."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        dashes = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(f"<path d='M{path}' stroke='{stroke}' stroke-width='2.5' fill='none'{dashes}/>")

    def matrix(self, x: float, y: float, rows: list[bool], columns: list[bool], cell: float = 14) -> None:
        """A weight matrix whose entries stay where row and column do."""
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                self.box(x + j * cell, y + i * cell, cell - 2, cell - 2, KEPT if row and column else GONE, "none", round=2)

    def save(self, name: str) -> None:
        """Write the file."""
        width, height = self.size
        arrow = (
            "<defs><marker id='arrow' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
            f"<path d='M0 0L10 5L0 10z' fill='{SOFT}'/></marker></defs>"
        )
        head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' aria-label='{escape(self.title)}' {FONT}>"
        (HOME / name).write_text(
            "\n".join([head, f"<title>{escape(self.title)}</title>", _dark(), arrow, *self.parts, "</svg>\n"]), encoding="utf-8"
        )


def _dark() -> str:
    rules = (f"[{what}='{light}']{{{what}:{dark}}}" for light, dark in DARK.items() for what in ("fill", "stroke"))
    return f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} text[fill='#ffffff']{{fill:#ffffff}} }}</style>"


def home() -> None:
    """The whole idea: a model, its units, and the narrow model that is built from some of them."""
    sheet = Sheet(600, 300, "sparsekit traces a model into units, keeps some of them, and returns a small plain model")
    keep = [True, False, True, True, False, False]
    sheet.text(95, 30, "your model", bold=True)
    sheet.matrix(52, 50, [True] * 6, [True] * 6)
    sheet.matrix(52, 160, [True] * 4, [True] * 6)
    sheet.text(95, 250, "any nn.Module", fill=SOFT)
    sheet.line(160, 125, 222, 125, SOFT, arrow=True)
    sheet.text(191, 113, "trace", size=12, fill=SOFT)
    sheet.text(300, 30, "its units", bold=True)
    for place, kept in enumerate(keep):
        y = 58 + 26 * place
        sheet.box(240, y, 120, 20, KEPT if kept else GONE, "none")
        sheet.text(300, y + 14.5, f"channel {place}", size=12, fill="#ffffff" if kept else SOFT)
    sheet.text(300, 250, "a channel with all its weights", fill=SOFT)
    sheet.line(378, 125, 440, 125, SOFT, arrow=True)
    sheet.text(409, 113, "mask", size=12, fill=SOFT)
    sheet.text(490, 30, "the result", bold=True)
    sheet.matrix(469, 62, [True] * 3, [True] * 3)
    sheet.matrix(469, 125, [True] * 4, [True] * 3)
    sheet.text(490, 250, "a small, plain model", fill=SOFT)
    sheet.text(
        300,
        285,
        "Every removal is verified: the small model gives the same outputs as the masked model.",
        size=12,
        fill=SOFT,
    )
    sheet.save("home.svg")


def units() -> None:
    """One unit through a convolution, its norm and its reader; and a residual sum that ties two layers."""
    sheet = Sheet(
        760,
        280,
        "A unit is a row of one layer, its entries of the norm, and a column of the next layer; a residual sum ties layers",
    )
    rows = [True, True, False, True, True]
    sheet.text(90, 30, "conv1.weight", bold=True)
    sheet.matrix(62, 48, rows, [True] * 4)
    sheet.text(90, 140, "removes a row,", size=12, fill=SOFT)
    sheet.text(215, 30, "bn", bold=True)
    sheet.matrix(208, 48, rows, [True])
    sheet.text(215, 140, "its entry,", size=12, fill=SOFT)
    sheet.text(340, 30, "conv2.weight", bold=True)
    sheet.matrix(305, 48, [True] * 4, rows)
    sheet.text(340, 140, "and a column", size=12, fill=SOFT)
    sheet.line(130, 82, 196, 82, SOFT, arrow=True)
    sheet.line(234, 82, 296, 82, SOFT, arrow=True)
    sheet.text(215, 175, "unit 2 of the group conv1", fill=ACCENT)
    sheet.line(420, 30, 420, 190)
    sheet.text(590, 30, "a residual sum ties its layers", bold=True)
    for x, y, words in ((450, 60, "conv a"), (450, 130, "conv b"), (660, 95, "conv c")):
        sheet.box(x, y, 80, 34, "#ffffff", KEPT, round=6)
        sheet.text(x + 40, y + 22, words)
    sheet.parts.append(f"<circle cx='595' cy='112' r='14' fill='#ffffff' stroke='{ACCENT}' stroke-width='2'/>")
    sheet.text(595, 117, "+", size=16, fill=ACCENT, bold=True)
    sheet.line(530, 77, 583, 104, SOFT, arrow=True)
    sheet.line(530, 147, 583, 120, SOFT, arrow=True)
    sheet.line(610, 112, 656, 112, SOFT, arrow=True)
    sheet.text(590, 190, "channel 2 of a and of b are one unit", size=12, fill=SOFT)
    sheet.text(
        380,
        235,
        "sparsekit follows each channel through the model's operators, cuts every group on a copy,",
        fill=SOFT,
    )
    sheet.text(380, 255, "and compares the outputs. It reports what cannot be pruned, with the reason.", fill=SOFT)
    sheet.save("units.svg")


def masks() -> None:
    """Masked against compact."""
    sheet = Sheet(760, 240, "A mask sets entries to zero and saves no time; a compact model omits them")
    keep = [True, False, True, False, True, False]
    for x, title in ((110, "dense"), (380, "masked"), (650, "compact")):
        sheet.text(x, 30, title, bold=True)
    sheet.matrix(68, 50, [True] * 6, [True] * 6)
    sheet.matrix(338, 50, keep, keep)
    sheet.matrix(629, 71, [True] * 3, [True] * 3)
    sheet.text(110, 165, "36 entries", fill=SOFT)
    sheet.text(380, 165, "9 kept, 36 multiplied", fill=SOFT)
    sheet.text(650, 165, "9 entries", fill=SOFT)
    sheet.line(180, 90, 320, 90, SOFT, arrow=True)
    sheet.text(250, 80, "mask", fill=SOFT)
    sheet.line(440, 90, 610, 90, SOFT, arrow=True)
    sheet.text(525, 80, "compact", fill=SOFT)
    sheet.line(610, 104, 440, 104, SOFT, arrow=True)
    sheet.text(525, 122, "expand", fill=SOFT)
    sheet.text(
        380, 205, "Half of the units of both sides stay, so a quarter of the entries do: ratio 0.5, density 0.25.", fill=ACCENT
    )
    sheet.save("masks.svg")


def square() -> None:
    """Density over ratio: the square."""
    sheet = Sheet(760, 320, "Parameters and FLOPs kept over the ratio: about its square")
    left, bottom, width, height = 90, 260, 420, 210
    sheet.line(left, bottom, left + width, bottom, INK)
    sheet.line(left, bottom, left, bottom - height, INK)
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = left + width * share, bottom - height * share
        sheet.line(x, bottom, x, bottom - height, GONE, width=1)
        sheet.line(left, y, left + width, y, GONE, width=1)
        sheet.text(x, bottom + 18, f"{share:g}", size=12, fill=SOFT)
        sheet.text(left - 8, y + 4, f"{share:.0%}", size=12, fill=SOFT, anchor="end")
    steps = [step / 40 for step in range(41)]
    sheet.curve([(left + width * s, bottom - height * s) for s in steps], LINE, dashed=True)
    sheet.curve([(left + width * s, bottom - height * s * s) for s in steps], KEPT)
    for s in (0.25, 0.5):
        x, y = left + width * s, bottom - height * s * s
        sheet.parts.append(f"<circle cx='{x:g}' cy='{y:g}' r='5' fill='{ACCENT}'/>")
        sheet.text(x + 10, y + 5, f"ratio {s:g}: {s * s:.0%}", anchor="start", fill=ACCENT)
    sheet.text(left + width / 2, 300, "ratio: share of units kept in each group", fill=SOFT)
    sheet.text(left, 36, "parameters and FLOPs kept", anchor="start", fill=SOFT)
    for y, words in (
        (108, "A layer loses rows for its own"),
        (126, "units, and columns for the units"),
        (144, "of the previous layer. The first"),
        (162, "layer loses only rows, the last"),
        (180, "only columns: a little more stays."),
    ):
        sheet.text(535, y, words, anchor="start", size=13, fill=INK)
    sheet.save("square.svg")


def bandit() -> None:
    """An interval that is split where it was pulled."""
    sheet = Sheet(760, 220, "A bandit splits the interval at each tried value, and splits good parts more finely")
    rows = (
        (50, [(0, 1)], 0.62, "first trial"),
        (100, [(0, 0.62), (0.62, 1)], 0.4, "second"),
        (150, [(0, 0.4), (0.4, 0.62), (0.62, 1)], 0.5, "third"),
    )
    left, width = 150, 540
    for y, arms, pulled, words in rows:
        sheet.text(left - 14, y + 5, words, anchor="end", fill=SOFT)
        for low, high in arms:
            sheet.box(left + width * low + 1, y - 12, width * (high - low) - 2, 24, "#e4f0ee", KEPT)
        sheet.parts.append(f"<circle cx='{left + width * pulled:g}' cy='{y}' r='6' fill='{ACCENT}'/>")
    sheet.text(left, 190, "low", fill=SOFT)
    sheet.text(left + width, 190, "high", fill=SOFT)
    sheet.text(left + width / 2, 190, "The interval is split at the tried value (dot).", size=12, fill=SOFT)
    sheet.text(left + width / 2, 210, "Next, the part with the largest upper bound of its reward is tried.", size=12, fill=SOFT)
    sheet.save("bandit.svg")


def pucbv() -> None:
    """P-UCBV at work: rewards, and the upper bound of each arm, after some pulls of a real search."""
    import numpy as np

    from sparsekit.bandit import PUCBV, Interval

    def mean(value: float) -> float:
        return math.exp(-(((value - 0.65) / 0.16) ** 2)) - 0.5

    sheet = Sheet(760, 300, "P-UCBV splits the interval where it pulled; the arm with the largest upper bound is pulled next")
    bandit, noise = PUCBV(Interval(0.0, 1.0), horizon=40, decay=0.93, rng=np.random.default_rng(3)), np.random.default_rng(0)
    told: list[tuple[float, float]] = []
    for panel, pulls in enumerate((6, 14, 30)):
        while len(told) < pulls:
            pull = bandit.ask()
            told.append((pull.value, mean(pull.value) + 0.08 * float(noise.normal())))
            bandit.tell(pull, reward=told[-1][1])
        left, width = 20 + 248 * panel, 224

        def at(value: float, left: int = left, width: int = width) -> float:
            return left + width * value

        def up(reward: float) -> float:
            return 150 - 70 * reward

        bounds = bandit.indices()
        for arm, bound in zip(bandit.arms, bounds, strict=True):
            chosen = bound == max(bounds)
            sheet.box(at(arm.low) + 0.5, up(bound), at(arm.high) - at(arm.low) - 1, 210 - up(bound), "#e4f0ee", KEPT, round=0)
            if chosen:
                sheet.line(at(arm.low), up(bound), at(arm.high), up(bound), ACCENT, width=4)
        sheet.curve([(at(i / 50), up(mean(i / 50))) for i in range(51)], LINE, dashed=True)
        for value, reward in told:
            sheet.parts.append(f"<circle cx='{at(value):.1f}' cy='{up(reward):.1f}' r='3.5' fill='{ACCENT}'/>")
        sheet.text(at(0.5), 234, f"after {pulls} trials", bold=True)
    sheet.text(
        380,
        264,
        "Dots: rewards. Dashed: their true mean. Boxes: arms, up to their upper bound; the orange one is tried next.",
        size=12,
        fill=SOFT,
    )
    sheet.text(
        380,
        284,
        "Arms with good rewards are split often and become narrow; bounds fall as trials accumulate.",
        size=12,
        fill=SOFT,
    )
    sheet.save("pucbv.svg")


def fedlps() -> None:
    """One round of one client in FedLPS."""
    sheet = Sheet(
        760, 320, "FedLPS: the server sends the units that come first, the client trains them and a narrower level inside"
    )
    sheet.text(110, 28, "server", bold=True)
    sheet.box(40, 44, 140, 52, "#ffffff", INK, round=8)
    sheet.text(110, 66, "global model")
    sheet.text(110, 84, "means over the holders", size=12, fill=SOFT)
    sheet.box(40, 196, 140, 52, "#ffffff", ACCENT, round=8)
    sheet.text(110, 218, "one order of units")
    sheet.text(110, 236, "for all clients", size=12, fill=SOFT)
    sheet.text(390, 28, "units, in the order", bold=True)
    for place, importance in enumerate((0.95, 0.8, 0.55, 0.4, 0.3, 0.2)):
        y = 60 + 26 * place
        sheet.text(318, y + 14, f"unit {place}", size=12, fill=SOFT, anchor="end")
        sheet.box(326, y, 150 * importance, 19, KEPT if place < 3 else GONE, "none")
    sheet.line(306, 137, 490, 137, ACCENT)
    sheet.text(390, 240, "the line: what the device can run", size=12, fill=ACCENT)
    sheet.text(640, 28, "what trains", bold=True)
    sheet.matrix(619, 52, [True] * 3, [True] * 3)
    sheet.matrix(619, 114, [True] * 4, [True] * 3)
    sheet.text(640, 196, "a narrow network and,", size=12, fill=SOFT)
    sheet.text(640, 212, "in each step, a narrower", size=12, fill=SOFT)
    sheet.text(640, 228, "level inside it", size=12, fill=SOFT)
    sheet.line(186, 70, 262, 104, SOFT, arrow=True)
    sheet.text(226, 64, "its part", size=12, fill=SOFT)
    sheet.line(186, 216, 262, 182, SOFT, arrow=True)
    sheet.text(226, 228, "order", size=12, fill=SOFT)
    sheet.line(500, 110, 596, 110, SOFT, arrow=True)
    sheet.line(640, 268, 640, 246, SOFT, width=1.5)
    sheet.line(640, 268, 110, 268, SOFT)
    sheet.line(110, 268, 110, 254, SOFT, arrow=True)
    sheet.text(390, 286, "sent up: the changes of this part, and once the counts of labels", size=12, fill=SOFT)
    sheet.save("fedlps.svg")


def layers() -> None:
    """The packages in five boxes, from the top down."""
    sheet = Sheet(760, 370, "Five layers of code: each imports only from itself and from the layers below")
    rows = (
        ("command line", "sparsekit.cli, sparsekit_fl.cli", SECOND),
        ("federated learning", "sparsekit_fl: rounds, server, engines, methods, client, problem", SECOND),
        ("prune and train", "training, pruning, allocation, criteria, measure", KEPT),
        ("find and cut units", "tracing, surgery, layers", KEPT),
        ("units as data", "graph (and bandit, which stands alone)", KEPT),
    )
    for place, (title, words, stroke) in enumerate(rows):
        y = 20 + 70 * place
        sheet.box(130, y, 500, 50, "#ffffff", stroke, round=8)
        sheet.text(380, y + 21, title, bold=True)
        sheet.text(380, y + 39, words, size=12, fill=SOFT)
        if place:
            sheet.line(380, y - 20, 380, y - 2, SOFT, arrow=True)
    sheet.save("layers.svg")


def favicon() -> None:
    """Rows and columns that stay."""
    sheet = Sheet(32, 32, "sparsekit")
    sheet.matrix(2, 2, [True, False, True], [True, False, True], cell=10)
    sheet.save("favicon.svg")


def draw() -> None:
    """Draw all of them."""
    for picture in (home, units, masks, square, bandit, pucbv, fedlps, layers, favicon):
        picture()


if __name__ == "__main__":
    draw()
