"""PrunePlan and Pruned: the units that stay, the report, and the smaller model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from sparsekit.criteria import Scored
from sparsekit.errors import SparsekitError
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.measure.timing import measure_pair, measure_turns
from sparsekit.pruning.report import PAGE, PruneReport, prune_page
from sparsekit.surgery import save_compact
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.inputs import ModelInputs


@dataclass(eq=False, kw_only=True, repr=False)
class PrunePlan:
    """The result of `plan`: the units to keep, and the cost of the narrow model. `print` shows the report.

    Args:
        mask: The units of the dense model to keep.
        graph: Unit graph of the dense model.
        report: The requested and the achieved costs, candidates and notes.
        scores: Label of each criterion that was tried → scores of all units. `criterion=plan.scores` prunes to another budget
            without scoring again.
    """

    mask: UnitMask
    graph: UnitGraph
    report: PruneReport
    scores: Mapping[str, Scored] = field(default_factory=dict)

    @property
    def widths(self) -> dict[str, int]:
        """Group name → number of kept units."""
        return self.mask.counts()

    @property
    def cost(self) -> Mapping[str, float]:
        """Metric → cost of the narrow model."""
        return self.report.after

    @property
    def notes(self) -> Sequence[str]:
        """Remarks for the reader, such as candidates that failed."""
        return self.report.notes

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        kept = f"{sum(self.widths.values())} of {self.graph.units} units"
        return f"{type(self).__name__}({self.report.model}: {kept}; {self.report.criterion}, {self.report.allocation})"


@dataclass(eq=False, kw_only=True, repr=False)
class Pruned(PrunePlan):
    """The result of `prune`: the smaller model, with the fields of a `PrunePlan`.

    Args:
        mask: The units of the dense model that were kept.
        graph: Unit graph of the dense model.
        report: The requested and the achieved costs, candidates and notes.
        scores: Label of each criterion that was tried → scores of all units. `criterion=pruned.scores` prunes to another
            budget without scoring again.
        model: The smaller model, a plain module.
        inputs: Example inputs of the dense model.
    """

    model: nn.Module
    inputs: ModelInputs | None = None

    def measure_times(self, dense: nn.Module, example_inputs: Any, *, runtimes: Sequence[str] = ("eager",)) -> Pruned:
        """Time the dense and the smaller model in turns, in a few seconds.

        Args:
            dense: The dense model.
            example_inputs: Inputs of one call, as in `prune`. Models are timed on all of their examples, and on a single one.
            runtimes: Runtimes to time besides eager passes, on all inputs and threads: "compile" (torch.compile), "export" (a
                program of torch.export), "onnx" (ONNX Runtime). If one cannot run the models, the report gets a note.

        Returns:
            A copy with `times` in its report.

        Raises:
            ForeignMaskError: `dense` is another model.
        """
        self.graph.check_state(named_entries(dense), what=f"the {type(dense).__name__}")
        call = ModelInputs.of(example_inputs)
        args, kwargs = call.args, call.kwargs
        times, notes = measure_pair(dense, self.model, args, kwargs), [*self.report.notes]
        batch, threads = times[-1].batch, times[-1].threads
        for runtime in (each for each in runtimes if each != "eager"):
            try:
                pair = measure_turns(dense, self.model, args, kwargs, batch=batch, threads=threads, runtime=runtime)
                times = (*times, pair)
            except SparsekitError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a compiler or an exporter raises; the model is valid anyway
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                notes.append(f"the models could not be timed by {runtime}: {reason}")
        return replace(self, report=replace(self.report, times=times, notes=notes))

    def save(self, path: str | os.PathLike[str], *, page: str | None = PAGE) -> None:
        """Write model, mask and a proof of the model's outputs to one safetensors file, and a page that shows the report.

        `load_compact` and `load_mask` read the file.

        Args:
            path: Path of the safetensors file.
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
