"""A picture of accuracy against FLOPs and against rounds: `python -m sparsekit_fl.report.figure OUT.png DIR…`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsekit.errors import InvalidValueError, SparsekitError
from sparsekit_fl.report.charts import curve_charts
from sparsekit_fl.report.curves import Curve, curves_of
from sparsekit_fl.report.drawing import draw_side_by_side
from sparsekit_fl.report.table import flops_text, read_result, share_text

__all__ = ["draw", "main"]


def draw(results: Sequence[Mapping[str, Any]], path: Path | str, *, title: str | None = None) -> None:
    """Draw accuracy against FLOPs and against rounds, side by side.

    Args:
        results: As in `result.json`; several seeds of a method become one curve with a band.
        path: File of the picture, whose ending decides the format.
        title: Title; None names model, data set and clients.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        DataError: the results cannot be drawn together.
        InvalidValueError: no result.
    """
    if not results:
        raise InvalidValueError("nothing to draw; pass at least one folder with a result.json")
    curves = curves_of(results)
    by_flops, _, by_round = curve_charts(curves, {curve.method: place for place, curve in enumerate(curves)}, label=_label)
    draw_side_by_side([by_flops, by_round], path, title=title or _title(results))


def _label(curve: Curve) -> str:
    runs = f" ({curve.runs} seeds)" if curve.runs > 1 else ""
    return f"{curve.method}{runs}  {share_text(float(curve.accuracy[-1]))} at {flops_text(float(curve.flops[-1]))} FLOPs"


def _title(results: Sequence[Mapping[str, Any]]) -> str:
    found = [result["config"].get("experiment", {}) for result in results]
    about = found[0]
    if not about or len({(other.get("dataset"), other.get("model")) for other in found}) > 1:
        return "Accuracy against cost"
    many = ", mean ± deviation over seeds" if len({result["seed"] for result in results}) > 1 else ""
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
