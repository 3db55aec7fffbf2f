"""Pruned: the smaller model, what was kept of the dense one, and the report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from sparsekit.criteria.scored import Scored
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.pruning.report import PruneReport
from sparsekit.pruning.timing import with_times
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
    """

    model: nn.Module
    mask: UnitMask
    graph: UnitGraph
    report: PruneReport
    scores: Mapping[str, Scored] = field(default_factory=dict)

    @property
    def indices(self) -> Mapping[str, Mapping[int, Tensor]]:
        """State-dict key → axis → int64 (kept,): the positions of the dense model that are kept, ascending.

        Axes that were not touched are absent.
        """
        return {
            name: {dim: index for dim, index in axes.items() if index.numel() < self.graph.shapes[name][dim]}
            for name, axes in self.graph.kept_indices(self.mask).items()
        }

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
        return replace(self, report=with_times(self.report, dense, self.model, call.args, call.kwargs, runtimes=runtimes))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write model and mask to one safetensors file, for `load_compact` and `load_mask`.

        Raises:
            OSError: the file cannot be written.
        """
        save_compact(self.model, path, graph=self.graph, mask=self.mask)
