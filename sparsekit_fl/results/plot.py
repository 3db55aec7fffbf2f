"""plot_rounds(): the curves of one run, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsekit.errors import InvalidValueError, nearest
from sparsekit_fl.results.extra import need
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.results.scores import headline

_LINES = (
    ("personal", "mean", "personal models, mean", "#0072B2", "-"),
    ("personal", "weighted", "personal models, by examples", "#56B4E9", "-"),
    ("personal", "worst", "personal models, worst tenth", "#0072B2", ":"),
    ("global", "mean", "global model, mean", "#D55E00", "--"),
    ("global", "worst", "global model, worst tenth", "#D55E00", ":"),
)


def plot_rounds(records: Sequence[RoundRecord], metric: str | None = None, *, axes: Any = None, title: str = "") -> Any:
    """Draw a metric over the rounds: personal models and, where it was scored, the global one. See `RunResult.plot`."""
    scored = [(record.round, record.evaluation) for record in records if record.evaluation is not None]
    names = list(dict.fromkeys(name for _, scores in scored for name in scores.personal))
    if not names:
        raise InvalidValueError("no round of this run was scored, so there is no curve; run it with a smaller eval_every")
    metric = headline(names) if metric is None else metric
    if metric not in names:
        raise InvalidValueError(f"no round was scored by {metric!r}; {nearest(metric, names)}")
    if axes is None:
        axes = need("matplotlib.figure").Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
    for part, kind, legend, colour, dash in _LINES:
        points = {round: means[metric] for round, scores in scored if metric in (means := scores.over(part, kind))}
        if points:
            axes.plot(list(points), list(points.values()), dash, color=colour, marker="o", markersize=3, label=legend)
    axes.set_xlabel("round")
    axes.set_ylabel(metric)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    return axes.figure
