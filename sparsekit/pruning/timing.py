"""What a cut saves in milliseconds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sparsekit.errors import SparsekitError
from sparsekit.measure.paired import measure_layers, measure_pair, measure_turns
from sparsekit.pruning.report import PruneReport


def with_times(
    report: PruneReport,
    before: nn.Module,
    after: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    runtimes: Sequence[str] = ("eager",),
) -> PruneReport:
    """Return the report with times before and after, and the five layers where most time is left.

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
    spent = ((name, value) for name, value in measure_layers(after, args, kwargs).items() if name)
    left = sorted(spent, key=lambda item: -item[1])[:5]
    return replace(report, times=times, slowest=dict(left), notes=notes)
