"""Figures 3 to 9 of the paper, and the bandits' ratios over time, from saved results."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from sparsekit_fl.errors import need
from sparsekit_fl.paper.published import PUBLISHED_LEVEL, protocol_difference, published_numbers, published_text
from sparsekit_fl.results.report.comparison import TARGET, Comparison
from sparsekit_fl.results.report.figures import bars, curve, level_figures, points_of
from sparsekit_fl.results.report.plots import Figure
from sparsekit_fl.results.report.trials import Level, Trial

_ABLATIONS = ("flst", "rcr-fix", "rcr-dyn", "p-ucbv-fix", "p-ucbv-dyn")
_STRATEGIES: Mapping[str, str] = {
    "flst": "learned", "fedlps": "learned", "fedlps-random": "random", "fedlps-ordered": "ordered",
    "fedlps-magnitude": "magnitude",
}  # fmt: skip
_RATIO = re.compile(r"(?:Constant\((?:ratio=)?)?([\d.]+)")
_WINDOWS = 10


@dataclass(frozen=True, kw_only=True)
class _Paper:
    """One figure of the paper: what makes it, with what it shows in words as its caption, and the runs that it takes."""

    number: str
    make: Callable[[Comparison, _Paper], Figure | None]
    needs: str
    command: str = ""
    column: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)


def is_rival(method: str) -> bool:
    """Whether a method is neither FedLPS nor a variant of it; its name may have options in brackets."""
    return not (method.startswith("fedlps") or method.partition("[")[0] in _ABLATIONS)


def paper_figures(comparison: Comparison) -> list[Figure]:
    """Make every figure that the results can be drawn as."""
    found = []
    for paper in _FIGURES:
        made = paper.make(comparison, paper)
        if made is not None:
            says = published_text(paper.number, comparison.dataset).get("says", "")
            parts = [
                f"The paper: {says}" if says else "",
                "Diamonds are published numbers." if made.marks is not None else "",
                f"{comparison.seeds_text().capitalize()}; {comparison.title}. {protocol_difference(comparison)}".strip(),
            ]
            title = f"{paper.number}: {made.title}"
            found.append(replace(made, title=title, number=paper.number, caption=" ".join(filter(None, parts))))
    return found


def missing_figures(comparisons: Sequence[Comparison], drawn: Collection[str]) -> list[str]:
    """Name the figures that could not be drawn, and commands that make their runs; none for data that are not the paper's.

    Args:
        comparisons: One per protocol.
        drawn: Numbers of the figures of all of them.
    """
    if not any(published_numbers("fedlps", comparison.dataset) for comparison in comparisons):
        return []
    groups: dict[tuple[str, str], list[str]] = {}
    for paper in _FIGURES:
        if paper.command and paper.number not in drawn:
            groups.setdefault((paper.needs, paper.command), []).append(paper.number)
    return [f"{' and '.join(numbers)} of the paper needs {needs}: {command}" for (needs, command), numbers in groups.items()]


def _own(comparison: Comparison) -> str:
    """Return FedLPS, or the first variant of it; empty where there is none."""
    methods = comparison.methods
    return "fedlps" if "fedlps" in methods else next((method for method in methods if not is_rival(method)), "")


def _level(comparison: Comparison) -> Level | None:
    """Return the level that the paper's figures are at, or the only one; None where there are several others."""
    levels = comparison.levels
    return PUBLISHED_LEVEL if PUBLISHED_LEVEL in levels else levels[0] if len(levels) == 1 else None


def _as_in_the_paper(comparison: Comparison, figure: Figure | None, marks: Any = None) -> Figure | None:
    """Keep FedLPS and its rivals alone, the highlighted ones in colours that do not repeat and the others in grey.

    Returns:
        None where FedLPS, or every rival, has no points.
    """
    own = _own(comparison)
    there = [name for name in comparison.methods if name == own or is_rival(name)]
    drawn = set() if figure is None else set(figure.points["series"])
    if figure is None or own not in drawn or not any(map(is_rival, drawn)):
        return None
    first = list(dict.fromkeys([own, *comparison.highlighted(there)]))
    points = figure.points[figure.points["series"].isin(there)]
    marks = None if marks is None else marks[marks["series"].isin(first)]
    return replace(
        figure, points=points, series=tuple(dict.fromkeys([*first, *there])), subject=own,
        faint=frozenset(there) - set(first), marks=None if marks is None or marks.empty else marks,
    )  # fmt: skip


def _marks(comparison: Comparison, x: str | None = None) -> Any:
    """Return published accuracies, at their published FLOPs or at the level `x`; none for another protocol."""
    rows = []
    for method in () if protocol_difference(comparison) else comparison.methods:
        for _, _, accuracy, deviation, flops in published_numbers(method, comparison.dataset)[:1]:
            rows.append((method, flops * 1e12 if x is None else x, accuracy / 100, deviation / 100))
    return points_of(rows)


def _against_cost(comparison: Comparison, paper: _Paper) -> Figure | None:
    """Make Figure 3 or 4: accuracy against what was spent."""
    level = _level(comparison)
    if level is None:
        return None
    published = paper.column == "flops_paper" and level == PUBLISHED_LEVEL
    made = curve(comparison, level, paper.column, "personal_accuracy", **paper.words)
    return _as_in_the_paper(comparison, made, _marks(comparison) if published else None)


def _time_to_accuracy(comparison: Comparison, paper: _Paper) -> Figure | None:
    """Make Figure 5, at the paper's target or where it has none at that of the comparison."""
    level = _level(comparison)
    target = comparison.target or published_text(paper.number, comparison.dataset).get("target") or comparison.goal
    if level is None:
        return None
    at = replace(comparison, target=target)
    made = bars(
        at, level, TARGET, title=f"simulated time to {100 * target:.3g}% accuracy", x_unit="seconds",
        x="simulated seconds; no bar: never reached", **paper.words,
    )  # fmt: skip
    if made is None:
        return None
    # A bar is the mean of a method whose every seed has reached the target.
    all_reached = {row.method for row in at.rows if row.level == level and row.count[TARGET] == row.n}
    points = made.points.assign(y=made.points["y"].where(made.points["series"].isin(all_reached)))
    figure = _as_in_the_paper(comparison, replace(made, points=points.sort_values("y", kind="stable")))
    return None if figure is None or figure.points["y"].isna().all() else figure


def _against_levels(comparison: Comparison, paper: _Paper) -> Figure | None:
    """Make Figure 6, 7 or 8."""
    # Of several the last is that of the largest other axis: the paper's.
    made = next((one for one in reversed(level_figures(comparison)) if one.name.startswith(paper.column)), None)
    marks = _marks(comparison, PUBLISHED_LEVEL[0]) if paper.number == "Figure 7" else None
    figure = _as_in_the_paper(comparison, made, marks)
    if figure is None or (figure.points["series"] == figure.subject).sum() < 2:
        return None
    return replace(figure, **paper.words)


def _ratios(trial: Trial) -> str:
    """Return what chooses the ratios of a FedLPS: the option `ratios`, or the policy that older results name."""
    return str(trial.policies.get("ratios", trial.policies.get("ratio", "")))


def _against_ratios(comparison: Comparison, paper: _Paper) -> Figure | None:
    """Make a part of Figure 9: one ratio for all clients, by how units are chosen."""
    level, points = _level(comparison), []
    ratios = {trial.method: _RATIO.match(_ratios(trial)) for trial, _ in comparison.results}
    for row in comparison.rows:
        strategy, ratio = _STRATEGIES.get(re.split(r"[\[ ]", row.method)[0]), ratios[row.method]
        if row.level == level and strategy and ratio:
            points.append((strategy, float(ratio[1]), row.mean[paper.column], row.deviation[paper.column]))
    frame = points_of(points).dropna().drop_duplicates(["series", "x"], keep="last").sort_values(["series", "x"])
    frame = frame[frame.groupby("series")["x"].transform("size") > 1]
    time = paper.column == "simulated_seconds"
    frame = frame[frame["series"] == "learned"] if time else frame
    if frame["series"].nunique() < (1 if time else 2):
        return None
    return Figure(
        plot="lines", points=frame, series=tuple(dict.fromkeys(_STRATEGIES.values())), subject="learned", x_unit="share",
        x="sparse ratio of all clients", **paper.words,
    )  # fmt: skip


def _bandit_ratios(comparison: Comparison, paper: _Paper) -> Figure | None:
    """Make the figure of FedLPS, or of the first method with bandits; a point is the mean over a tenth of the run."""
    level, own = _level(comparison), _own(comparison)
    with_bandit = {trial.method for trial, _ in comparison.results if "bandit" in _ratios(trial).lower()}
    method = own if own in with_bandit else next((name for name in comparison.methods if name in with_bandit), "")
    executed = [
        (record["capabilities"][client], record["round"], trial.seed, ratio)
        for trial, result in comparison.results
        if trial.method == method and trial.level == level
        for record in result["rounds"]
        for client, ratio in record.get("ratios", {}).items()
        if client in record.get("capabilities", {})
    ]
    if not executed:
        return None
    frame = need("pandas").DataFrame(executed, columns=["able", "round", "seed", "ratio"])
    last = int(frame["round"].max())
    size = max(1, last // _WINDOWS)
    rounds = frame.groupby(["able", "round", "seed"], as_index=False)["ratio"].mean()
    windows = rounds.assign(x=(-(-rounds["round"] // size) * size).clip(upper=last))
    seeds = windows.groupby(["able", "x", "seed"])["ratio"].mean()
    means = seeds.groupby(level=["able", "x"]).agg(["mean", "std"]).sort_index(level=["able", "x"], ascending=[False, True])
    points = points_of(
        (f"devices of {Fraction(able).limit_denominator(1000)}", x, mean, spread)
        for (able, x), mean, spread in means.itertuples()
    )
    if points.groupby("series").size().max() < 2:
        return None
    return Figure(plot="lines", points=points, series=tuple(dict.fromkeys(points["series"])), x="round",
                  title=f"what bandits of {method} chose, by capability", **paper.words)  # fmt: skip


_TWO = "fedlps and a rival, scored in several rounds"
_LEVELS = "fedlps and a rival at two or more levels of heterogeneity"
_CURVES = "sparsekit compare fedlps fedavg heterofl fedper --preset mnist --data-dir DIR --out FOLDER"
_DEVICES = "sparsekit compare fedlps fedavg fedper --preset cifar10 --heterogeneity low,median,high --data-dir DIR --out FOLDER"
_FIGURES = (
    _Paper(number="Figure 3", make=_against_cost, column="flops_paper", needs=_TWO, command=_CURVES,
           words={"name": "paper-3-accuracy-flops", "title": "test accuracy against FLOPs", "x_unit": "flops",
                  "x": "FLOPs of all clients so far, counted as in the paper"}),
    _Paper(number="Figure 4", make=_against_cost, column="simulated_seconds", needs=_TWO, command=_CURVES,
           words={"name": "paper-4-accuracy-time", "title": "test accuracy against running time", "x_unit": "seconds",
                  "x": "simulated seconds so far"}),
    _Paper(number="Figure 5", make=_time_to_accuracy, words={"name": "paper-5-time-to-accuracy"},
           needs="fedlps and a rival, one of which reaches the target", command=f"{_CURVES} --target 0.9"),
    _Paper(number="Figure 6", make=_against_levels, column="accuracy-classes",
           words={"name": "paper-6-accuracy-classes", "title": "test accuracy against non-IID levels"},
           needs="fedlps and a rival at two or more numbers of classes that clients lack",
           command="sparsekit compare fedlps fedper --preset mnist --lack-classes 2,4,6,8 --data-dir DIR --out FOLDER"),
    _Paper(number="Figure 7", make=_against_levels, column="accuracy-heterogeneity", needs=_LEVELS, command=_DEVICES,
           words={"name": "paper-7-accuracy-heterogeneity", "title": "test accuracy against system heterogeneity"}),
    _Paper(number="Figure 8", make=_against_levels, column="time-heterogeneity", needs=_LEVELS, command=_DEVICES,
           words={"name": "paper-8-time-heterogeneity", "title": "running time against system heterogeneity"}),
    _Paper(number="Figure 9", make=_against_ratios, column="personal_accuracy",
           words={"name": "paper-9a-accuracy-ratios", "title": "test accuracy against sparse ratios",
                  "y": "mean personal accuracy on test data"},
           needs="flst and another choice of units, each at two or more ratios",
           command="sparsekit compare 'flst ratio=0.2' 'flst ratio=0.8' 'fedlps-random ratio=0.2' 'fedlps-random ratio=0.8'"
                   " --preset mnist --data-dir DIR --out FOLDER"),
    _Paper(number="Figure 9", make=_against_ratios, column="simulated_seconds", needs="",
           words={"name": "paper-9b-time-ratios", "title": "running time against sparse ratios, learned patterns",
                  "y": "simulated seconds of the run", "y_unit": "seconds"}),
    _Paper(number="Ratios over time", make=_bandit_ratios, needs="a method whose ratio is a bandit's", command=_CURVES,
           words={"name": "bandit-ratios", "y": "mean ratio that clients executed"}),
)  # fmt: skip
