"""What a cut saves in milliseconds, and why that is less than it saves in FLOPs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sparsekit.errors import SparsekitError
from sparsekit.measure.paired import measure_copies, measure_layers, measure_pair, measure_turns
from sparsekit.pruning.report import PruneReport

_SLOW = 0.8
"""Time ÷ over FLOPs ÷ below which a reason is given."""
_VECTOR = 8
"""Channels that kernels of convolutions and products work on at a time, with AVX2; with AVX-512 it is 16."""


def with_times(
    report: PruneReport,
    before: nn.Module,
    after: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    runtimes: Sequence[str] = ("eager",),
) -> PruneReport:
    """The report with times before and after, the five layers where most time is left, and the likely reason if it is slow.

    `runtimes` are what else runs both models, on all example inputs and threads; one that cannot leaves a note.
    """
    times = measure_pair(before, after, args, kwargs)
    notes = [*report.notes]
    batch, threads = times[-1].batch, times[-1].threads
    for runtime in runtimes:
        try:
            if runtime != "eager":
                times = (*times, measure_turns(before, after, args, kwargs, batch=batch, threads=threads, runtime=runtime))
        except SparsekitError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler or an exporter raises; the cut is good without
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            notes.append(f"the models could not be timed by {runtime}: {reason}")
    old, new = measure_layers(before, args, kwargs), measure_layers(after, args, kwargs)
    left = sorted(((name, value) for name, value in new.items() if name), key=lambda item: -item[1])[:5]
    fewer = report.before["flops"] / report.after["flops"] if report.after.get("flops") else 1.0
    slow = min((pair for pair in times if pair.runtime == "eager"), key=lambda pair: pair.faster)
    found: list[tuple[str, float]] = []
    if slow.faster / fewer < _SLOW:
        found = _reasons(report, old, new, measure_copies(before, args, kwargs), measure_copies(after, args, kwargs))
    if found:
        told = "; ".join(f"{reason} ({milliseconds:.3g} ms)" for reason, milliseconds in found[:3])
        notes.append(
            f"time falls {slow.faster:.3g} times where FLOPs fall {fewer:.3g} times; of the {new['']:.3g} ms that are left,"
            f" these are above their share of FLOPs: {told}"
        )
    return replace(report, times=times, slowest=dict(left), notes=notes)


def _reasons(
    report: PruneReport, old: Mapping[str, float], new: Mapping[str, float], copied_old: float, copied_new: float
) -> list[tuple[str, float]]:
    """Why passes take longer than their share of FLOPs, and by how many milliseconds, the largest first."""
    cut = {layer.name: layer for layer in report.layers}
    fewer = report.after["flops"] / report.before["flops"]
    found = {"copies: tensors that are joined or laid out again": copied_new - fewer * copied_old}
    for name, milliseconds in new.items():
        layer, dense = cut.get(name), old.get(name, 0.0)
        if not name:  # the whole pass: what no layer with weights explains
            rest_old = 2 * old[""] - sum(old.values()) - copied_old
            rest_new = 2 * new[""] - sum(new.values()) - copied_new
            reason, excess = "operators without weights, and calls between layers", rest_new - fewer * rest_old
        elif layer is None:
            reason, excess = "norms and other layers without products", milliseconds - fewer * dense
        elif layer.flops_after >= layer.flops_before:
            reason, excess = "layers that cannot be pruned", milliseconds - fewer * dense
        else:
            own = layer.flops_after / layer.flops_before
            reason = (
                f"widths that are not a multiple of {_VECTOR}: leave multiple_of at its default"
                if layer.after % _VECTOR
                else "calls that are too small for their overhead to pay: try a larger batch"
            )
            excess = milliseconds - own * dense
            where = "FLOPs that went where they cost least time: try a budget of latency_ms"
            found[where] = found.get(where, 0.0) + (own - fewer) * dense
        found[reason] = found.get(reason, 0.0) + excess
    return sorted(((reason, value) for reason, value in found.items() if value > 0.05 * new[""]), key=lambda item: -item[1])
