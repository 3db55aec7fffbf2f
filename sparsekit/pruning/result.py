"""Pruned: the smaller model, what was kept of the dense one, and the report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from sparsekit.criteria.orders import Scored
from sparsekit.errors import SparsekitError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.paired import measure_layers, measure_pair, measure_turns
from sparsekit.pruning.report import PruneReport
from sparsekit.pruning.report_page import PAGE, prune_page
from sparsekit.surgery.saving import save_compact
from sparsekit.tracing.inputs import ModelInputs


@dataclass(eq=False)
class Pruned:
    """What `prune` returns.

    Args:
        model: The smaller model, a plain module.
        mask: Which units of the dense model it keeps.
        graph: The units of the dense model.
        report: What was requested and achieved.
        scores: Name → scores of all units, by each criterion that was tried; `criterion=pruned.scores` prunes to another
            budget without scoring again.
        inputs: Example inputs of the dense model.
    """

    model: nn.Module
    mask: UnitMask
    graph: UnitGraph
    report: PruneReport
    scores: Mapping[str, Scored] = field(default_factory=dict)
    inputs: ModelInputs | None = field(default=None, repr=False)

    def measure_times(self, dense: nn.Module, example_inputs: Any, *, runtimes: Sequence[str] = ("eager",)) -> Pruned:
        """Time the dense and the smaller model in turns, in a few seconds: milliseconds, and the layers that take most.

        Args:
            dense: What was pruned.
            example_inputs: Inputs of one call, as `prune` takes them; their number of examples is timed, and one example.
            runtimes: What is timed besides eager passes, on all inputs and threads: "compile" (torch.compile), "export" (a
                program of torch.export), "onnx" (ONNX Runtime). One that cannot run the models leaves a note.

        Returns:
            The same with `times` and `slowest` in its report.
        """
        call = ModelInputs.of(example_inputs)
        args, kwargs = call.args, call.kwargs
        times, notes = measure_pair(dense, self.model, args, kwargs), [*self.report.notes]
        batch, threads = times[-1].batch, times[-1].threads
        for runtime in runtimes:
            try:
                if runtime != "eager":
                    pair = measure_turns(dense, self.model, args, kwargs, batch=batch, threads=threads, runtime=runtime)
                    times = (*times, pair)
            except SparsekitError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a compiler or an exporter raises; the cut is good without
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                notes.append(f"the models could not be timed by {runtime}: {reason}")
        spent = ((name, value) for name, value in measure_layers(self.model, args, kwargs).items() if name)
        slowest = dict(sorted(spent, key=lambda item: -item[1])[:5])
        return replace(self, report=replace(self.report, times=times, slowest=slowest, notes=notes))

    def save(self, path: str | os.PathLike[str], *, page: str | None = PAGE) -> None:
        """Write model, mask and a proof of what the model computes to one safetensors file, and a page that shows the report.

        `load_compact` and `load_mask` read the file.

        Args:
            path: The file.
            page: Name of the page in the same folder; it replaces an earlier one. None writes no page.

        Raises:
            OSError: a file cannot be written.
        """
        known = None if self.inputs is None else (self.inputs.args or self.inputs.kwargs)
        save_compact(self.model, path, graph=self.graph, mask=self.mask, example_inputs=known)
        if page is not None:
            file = Path(path)
            text = prune_page(self.report, file=file.name, sizes={file.name: file.stat().st_size})
            file.with_name(page).write_text(text, encoding="utf-8")
