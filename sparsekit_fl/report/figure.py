"""Curves of saved results: accuracy against FLOPs and against rounds. `python -m sparsekit_fl.report.figure OUT.png DIR…`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from sparsekit.errors import DataError, InvalidValueError, MissingDependencyError, SparsekitError, install_hint
from sparsekit_fl.report.table import flops_text, read_result, share_text

__all__ = ["Curve", "curves_of", "draw", "main"]

# Okabe and Ito's colours, which remain distinct to colour-blind readers; markers differ too, for print in grey.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INK, _FAINT = "#333333", "#DDDDDD"


@dataclass(frozen=True, eq=False)
class Curve:
    """One method: means over its runs at the rounds in which all of them were scored.

    Args:
        method: Its name.
        rounds: int (points,).
        flops: float (points,), compact, of the run so far.
        seconds: float (points,), simulated, of the run so far; NaN where the results have none.
        accuracy: float (points,), personal, in [0, 1].
        deviation: float (points,), over runs; zeros for a single one.
        runs: How many.
    """

    method: str
    rounds: np.ndarray[Any, Any]
    flops: np.ndarray[Any, Any]
    seconds: np.ndarray[Any, Any]
    accuracy: np.ndarray[Any, Any]
    deviation: np.ndarray[Any, Any]
    runs: int


def _points(result: Mapping[str, Any]) -> dict[int, tuple[float, float, float]]:
    """Round → (FLOPs so far, personal accuracy, simulated seconds so far), where it was scored."""
    found = {}
    for record in result["rounds"]:
        accuracy = ((record["evaluation"] or {}).get("personal") or {}).get("accuracy")
        if accuracy is not None:
            cost = record["cost"]
            found[int(record["round"])] = (
                float(cost["flops_compact"]),
                float(accuracy),
                float(cost.get("simulated_seconds", math.nan)),
            )
    return found


def curves_of(results: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Group results by method, in the order in which methods first appear.

    Args:
        results: As in `result.json`.

    Raises:
        DataError: a method has no round in which all its runs were scored.
    """
    order = list(dict.fromkeys(result["method"] for result in results))
    ranked = sorted(results, key=lambda result: order.index(result["method"]))
    curves = []
    for method, group in groupby(ranked, key=lambda result: str(result["method"])):
        runs = [_points(result) for result in group]
        rounds = sorted(set.intersection(*(set(run) for run in runs)))
        if not rounds:
            raise DataError(f"the runs of {method!r} have no scored round in common; run them with one --eval-every")
        table = np.array([[run[round] for round in rounds] for run in runs])
        curves.append(
            Curve(
                method=method,
                rounds=np.array(rounds),
                flops=table[:, :, 0].mean(0),
                seconds=table[:, :, 2].mean(0),
                accuracy=table[:, :, 1].mean(0),
                deviation=table[:, :, 1].std(0, ddof=1) if len(runs) > 1 else np.zeros(len(rounds)),
                runs=len(runs),
            )
        )
    return curves


def draw(results: Sequence[Mapping[str, Any]], path: Path | str, *, title: str | None = None) -> None:
    """Draw accuracy against FLOPs and against rounds, side by side.

    Args:
        results: As in `result.json`; several seeds of a method become one curve with a band.
        path: Where the picture goes; the ending says which kind.
        title: Above it; None says what was run.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        DataError: the results cannot be drawn together.
        InvalidValueError: no result.
    """
    if not results:
        raise InvalidValueError("nothing to draw; pass at least one folder with a result.json")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise MissingDependencyError(f"a figure needs matplotlib; {install_hint('report')}") from error
    curves = curves_of(results)
    fonts: dict[Any, Any] = {
        "font.size": 11,
        "axes.edgecolor": _INK,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
    }
    with mpl.rc_context({**fonts, "ytick.color": _INK, "font.family": "sans-serif"}):
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        by_flops, by_round = figure.subplots(1, 2, sharey=True)
        for place, curve in enumerate(curves):
            _plot(by_flops, curve, curve.flops, place)
            _plot(by_round, curve, curve.rounds, place)
        by_flops.set_xscale("log")
        by_flops.xaxis.set_major_formatter(FuncFormatter(lambda value, _: flops_text(value)))
        by_flops.set_xlabel("FLOPs of all clients so far (compact submodels, log scale)")
        by_round.set_xlabel("round")
        by_flops.set_ylabel("mean personal accuracy on test data")
        _limit(by_flops, curves)
        for axes in (by_flops, by_round):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 3):g}%" if value <= 1 else ""))
            axes.grid(visible=True, color=_FAINT, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title or _title(results), fontsize=13)
        handles, labels = by_round.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(2, len(curves)), frameon=False)
        figure.savefig(path, dpi=150, facecolor="white")


def _plot(axes: Any, curve: Curve, x: np.ndarray[Any, Any], place: int) -> None:
    colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
    runs = f" ({curve.runs} seeds)" if curve.runs > 1 else ""
    label = f"{curve.method}{runs}  {share_text(float(curve.accuracy[-1]))} at {flops_text(float(curve.flops[-1]))} FLOPs"
    every = max(1, len(x) // 10)
    axes.plot(x, curve.accuracy, color=colour, marker=marker, markevery=every, markersize=5.5, linewidth=2, label=label)
    if curve.runs > 1:
        low, high = curve.accuracy - curve.deviation, curve.accuracy + curve.deviation
        axes.fill_between(x, low, np.minimum(high, 1), color=colour, alpha=0.15, linewidth=0)


def _limit(axes: Any, curves: Sequence[Curve]) -> None:
    """Spend the height on where curves differ, not on the first rounds."""
    lowest = min(float(np.quantile(curve.accuracy, 0.1)) for curve in curves)
    highest = max(float((curve.accuracy + curve.deviation).max()) for curve in curves)
    room = max(0.01, 0.06 * (highest - lowest))
    axes.set_ylim(max(0.0, lowest - room), min(1.0, highest) + room)


def _title(results: Sequence[Mapping[str, Any]]) -> str:
    found = [result["config"].get("experiment", {}) for result in results]
    about = found[0]
    if not about or len({(other.get("dataset"), other.get("model")) for other in found}) > 1:
        return "Accuracy against cost"
    seeds = len({result["seed"] for result in results})
    many = ", mean ± deviation over seeds" if seeds > 1 else ""
    return f"{about.get('model')} on {about.get('dataset')}, {about.get('clients')} clients{many}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what the command line names.

    Args:
        arguments: The picture, then folders of finished runs; None takes those of the process.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) < 2:
        sys.stderr.write("usage: python -m sparsekit_fl.report.figure OUT.png DIR [DIR …]\n")
        return 2
    try:
        draw([read_result(folder) for folder in given[1:]], given[0])
    except SparsekitError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
