"""Cutter: one cut of a model to a budget by each of some candidates, of which the best on unseen batches is kept."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsekit.allocation.by_cost import global_ranking
from sparsekit.allocation.limits import Counts, Limits, Multiples
from sparsekit.allocation.masks import mask_from_scores
from sparsekit.allocation.problem import Allocation, allocate, name_of
from sparsekit.criteria.base import Criterion, ScoringContext, is_comparable, score_units
from sparsekit.criteria.orders import Scored
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule
from sparsekit.measure.budget import Budget
from sparsekit.measure.clock import device_of, evaluated, stopwatch
from sparsekit.measure.cost import CostModel
from sparsekit.measure.paired import prepare, time_turns
from sparsekit.pruning.calibration import Calibration
from sparsekit.pruning.latency import meet_latency
from sparsekit.pruning.reconstruction import (
    Reconstruct,
    recalibrate_batchnorm,
    refit,
    refits_in_sequence,
    statistics_prior,
)
from sparsekit.pruning.report import CandidateReport
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.trace import check_runs

_STARVED = 0.15


class StarvedGroupsWarning(UserWarning):
    """A ranking of all units leaves some groups next to none."""


class Candidate(NamedTuple):
    """A way to cut: which units are important, and how many stay where."""

    criterion: Criterion
    allocation: Allocation

    @property
    def names(self) -> tuple[str, str]:
        """Names of both, for messages and reports."""
        own = self.criterion
        return own.name if isinstance(own, Scored) else type(own).__name__, name_of(self.allocation)


@dataclass(frozen=True, eq=False)
class Cut:
    """What a candidate makes.

    Args:
        candidate: The way to cut.
        mask: Units of the model that was cut.
        model: The narrow model.
        latency_ms: Measured, where the budget limits it; else None.
        measured: What was measured on the way, for the report.
    """

    candidate: Candidate
    mask: UnitMask
    model: nn.Module
    latency_ms: float | None
    measured: Mapping[str, Any]


@dataclass(kw_only=True)
class Cutter:
    """What all cuts of one call of `prune` have in common."""

    dense: nn.Module
    costs: CostModel
    call: ModelInputs
    budget: Budget | None
    multiple_of: Multiples
    calibration: Calibration | None
    reconstruct: Reconstruct
    rules: Mapping[type[nn.Module], LayerRule] | None
    generator: torch.Generator
    progress: bool
    tried: Sequence[CandidateReport] = ()
    scores: Mapping[str, Scored] = field(default_factory=dict)
    dense_pass: Callable[[], object] | None = None
    """A pass of the dense model in the runtime of the budget, where it limits milliseconds."""
    dense_ms: float = 0.0
    _prior: tuple[nn.Module | None, Mapping[str, Tensor]] = (None, {})

    def best(
        self,
        candidates: Sequence[Candidate],
        model: nn.Module,
        graph: UnitGraph,
        limits: Limits,
        target: Budget | None,
        *,
        dry: bool,
    ) -> Cut:
        """Cut by every candidate and keep the one of least loss on batches that neither scored nor reconstructed it.

        To be judged, each layer of a candidate is refitted by itself. Refitting in sequence takes twice the time and lowers the
        loss of all candidates alike, so only the best one is refitted again in sequence.

        Args:
            candidates: Of one, nothing is judged.
            model: What is cut.
            graph: Its units.
            limits: Group name → (least, largest) share of its units that stays.
            target: Budget of this step, in absolute numbers.
            dry: Whether a single candidate is only counted, and `model` itself returned.

        Raises:
            BudgetError, InvalidValueError, MissingImportanceError: what the last candidate raised, where none can be made.
        """
        scores: dict[int, Scored] = {}
        reports: list[CandidateReport] = []
        chosen: Cut | None = None
        least, refused = float("inf"), InvalidValueError("no candidate")
        judge = self.calibration if len(candidates) > 1 and self.calibration is not None and self.calibration.judge else None
        for candidate in candidates if judge else candidates[:1]:
            try:
                key = id(candidate.criterion)
                if key not in scores:
                    context = ScoringContext(weights=model.state_dict(), model=model, generator=self.generator)
                    found = score_units(candidate.criterion, graph, context)
                    scores[key] = Scored(found, candidate.names[0], is_comparable(candidate.criterion))
                cut = self._cut(candidate, model, graph, scores[key], limits, target, dry=dry, judged=judge is not None)
            except InvalidValueError as error:
                if not judge:
                    raise
                refused = error
                reports.append(CandidateReport(*candidate.names, None, False, str(error)))
                continue
            loss = judge.measure(cut.model) if judge else 0.0
            loss = loss if loss == loss else float("inf")  # not a number: never the best
            reports.append(CandidateReport(*candidate.names, loss if judge else None, False))
            if chosen is None or loss < least:
                chosen, least = cut, loss
        if chosen is None:
            raise refused
        if judge and not dry and self.reconstruct in (True, "layers") and refits_in_sequence(model, graph, chosen.mask):
            small = compact(model, graph, chosen.mask, rules=self.rules)
            measured = {**chosen.measured, **self._reconstruct(model, small, graph, chosen.mask)}
            chosen = replace(chosen, model=small, measured=measured)
        self.scores = {each.name: each for each in scores.values()}
        self.tried = [replace(each, chosen=(each.criterion, each.allocation) == chosen.candidate.names) for each in reports]
        return chosen

    def _cut(
        self,
        candidate: Candidate,
        model: nn.Module,
        graph: UnitGraph,
        scores: Scored,
        limits: Limits,
        target: Budget | None,
        *,
        dry: bool,
        judged: bool,
    ) -> Cut:
        allocation, costs = candidate.allocation, self.costs  # numbers of units mean the same in a narrow model
        limit_ms = None if target is None or target.latency_ms is None else float(target.latency_ms)

        def to(budget: Budget | None) -> tuple[UnitMask, nn.Module]:
            counts = allocate(
                allocation, graph, scores.values, costs, budget=budget, limits=limits, multiple_of=self.multiple_of
            )
            if getattr(allocation, "func", allocation) is global_ranking:
                _warn_of_starved(graph, counts)
            mask = mask_from_scores(graph, scores.values, counts, source=f"{scores.name} scores")
            if (
                dry and not judged and limit_ms is None
            ):  # who cuts by herself, perhaps in place, has no memory for a second model
                return mask, model
            small = compact(model, graph, mask, rules=self.rules)
            check_runs(small, self.call)
            return mask, small

        def at(share: float) -> tuple[tuple[UnitMask, nn.Module], Callable[[], float]]:
            """Cut to a share of the dense FLOPs."""
            assert target is not None
            limits: dict[str, Any] = {name: getattr(target, name) for name in target.metrics if name != "latency_ms"}
            limits["flops"] = min(limits.get("flops", float("inf")), max(1.0, share * costs.dense_costs()["flops"]))
            mask, small = to(Budget(**limits))
            args, kwargs = self.call.args, self.call.kwargs
            with torch.no_grad(), evaluated(small):
                small_pass = prepare(small, target.runtime, args, kwargs)

            def measure() -> float:
                assert self.dense_pass is not None
                with torch.no_grad(), evaluated(self.dense, small):
                    pair = time_turns(self.dense_pass, small_pass, stopwatch(device_of(self.dense, args, kwargs)))
                # A share is one of what the dense model takes at the same time: machines slow down and speed up again.
                of_dense = self.budget is not None and isinstance(self.budget.latency_ms, str)
                return self.dense_ms / pair.faster if of_dense else pair.after_ms

            return (mask, small), measure

        after: float | None = None
        if limit_ms is None:
            mask, small = to(target)
        else:
            (mask, small), after = meet_latency(limit_ms, self.dense_ms, at)
        measured = {} if small is model else self._reconstruct(model, small, graph, mask, sequential=not judged)
        return Cut(candidate, mask, small, after, measured)

    def _reconstruct(
        self, before: nn.Module, small: nn.Module, graph: UnitGraph, mask: UnitMask, *, sequential: bool = True
    ) -> dict[str, Any]:
        """Refit the layers that read dropped units, then renew the statistics of batch norms."""
        if self.calibration is None or all(bool(keep.all()) for keep in mask.values()):
            return {}
        batches, measured = self.calibration.fit, dict[str, Any]()
        if self.reconstruct in (True, "layers"):
            left = refit(before, small, graph, mask, batches, sequential=sequential, progress=self.progress)
            if left:
                measured["reconstruction_error"] = sum(left.values()) / len(left)
        if self.reconstruct in (True, "batchnorm"):
            indices = graph.kept_indices(mask)
            if self._prior[0] is not before:
                self._prior = before, statistics_prior(before, batches)
            prior = {name: value[indices[name][0]] if name in indices else value for name, value in self._prior[1].items()}
            recalibrate_batchnorm(small, batches, prior=prior, progress=self.progress)
        return measured


def _warn_of_starved(graph: UnitGraph, counts: Counts) -> None:
    shares = {name: counts[name] / group.size for name, group in graph.groups.items()}
    usual = sum(counts.values()) / max(1, graph.units)
    starved = [name for name, share in shares.items() if share < _STARVED and share < usual / 4]
    if starved:
        told = ", ".join(f"{name} ({counts[name]} of {graph.groups[name].size})" for name in starved[:5])
        warnings.warn(
            f"the global ranking leaves next to nothing of {told}{' and others' if len(starved) > 5 else ''}; such a model is"
            " usually at chance. Take allocation='by_cost', or give these groups a least share with limits=",
            StarvedGroupsWarning,
            stacklevel=6,
        )


def inside(outer: UnitMask, inner: Mapping[str, Tensor]) -> UnitMask:
    """Return the mask of the dense model: `inner` says which of the units that `outer` keeps stay."""
    found = {}
    for name, keep in outer.items():
        both = keep.clone()
        both[keep] = inner[name]
        found[name] = both
    return UnitMask(found)
