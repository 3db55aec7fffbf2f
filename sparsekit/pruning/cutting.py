"""best_cut(): one cut by each of some candidates, of which the best on held-out examples is kept."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsekit.allocation.by_cost import global_ranking
from sparsekit.allocation.limits import Counts
from sparsekit.allocation.masks import mask_from_scores
from sparsekit.allocation.problem import allocate
from sparsekit.criteria.base import ScoringContext, is_comparable, score_units
from sparsekit.criteria.orders import Scored
from sparsekit.errors import InvalidValueError, level_of_user
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.measure.clock import device_of, evaluated, stopwatch
from sparsekit.measure.paired import prepare, time_turns
from sparsekit.progress import working
from sparsekit.pruning.latency import meet_latency
from sparsekit.pruning.plan import Candidate, Plan
from sparsekit.pruning.reconstruction import recalibrate_batchnorm, refit, refits_in_sequence, statistics_prior
from sparsekit.pruning.report import CandidateReport
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.trace import check_runs

_STARVED = 0.15


class StarvedGroupsWarning(UserWarning):
    """A ranking of all units leaves some groups next to none."""


@dataclass(frozen=True, eq=False)
class Cut:
    """What a candidate makes.

    Args:
        candidate: The way to cut.
        mask: Units of the model that was cut.
        model: The narrow model.
        latency_ms: Measured, where the budget limits it; else None.
    """

    candidate: Candidate
    mask: UnitMask
    model: nn.Module
    latency_ms: float | None


class Chosen(NamedTuple):
    """The best cut, and how it was found.

    Args:
        cut: The best cut, reconstructed.
        tried: All candidates.
        scores: Label of a criterion → scores of all units.
        measured: For the report.
        notes: For the report: candidates that could not be made or compared.
    """

    cut: Cut
    tried: Sequence[CandidateReport]
    scores: Mapping[str, Scored]
    measured: Mapping[str, Any]
    notes: Sequence[str]


def best_cut(
    plan: Plan, candidates: Sequence[Candidate], model: nn.Module, graph: UnitGraph, target: Budget | None, *, dry: bool
) -> Chosen:
    """Cut by every candidate and keep the one of least loss on examples that neither scored nor reconstructed it.

    To be judged, each layer of a candidate is refitted by itself. Refitting in sequence takes twice the time and lowers the
    loss of all candidates alike, so only the best one is refitted again in sequence.

    Args:
        plan: What was decided.
        candidates: Of one, nothing is judged. Without examples to judge by, the first is taken.
        model: What is cut.
        graph: Its units.
        target: Budget of this step, in absolute numbers.
        dry: Whether a single candidate is only counted, and `model` itself returned.

    Raises:
        BudgetError, InvalidValueError, MissingImportanceError: what the last candidate raised, where none can be made.
    """
    judge = plan.calibration if len(candidates) > 1 and plan.calibration is not None and plan.calibration.judge else None
    prior = _prior(plan, model) if not dry or judge else {}
    scores: dict[str, Scored] = {}
    tried: list[CandidateReport] = []
    best: tuple[float, Cut, dict[str, Any]] | None = None
    refused = InvalidValueError("no candidate")
    for candidate in candidates if judge else candidates[:1]:
        try:
            if candidate.label not in scores:
                call = plan.call.args, plan.call.kwargs
                context = ScoringContext(weights=model.state_dict(), model=model, generator=plan.generator, call=call)
                found = score_units(candidate.criterion, graph, context)
                scores[candidate.label] = Scored(found, candidate.label, is_comparable(candidate.criterion))
            cut = _make(plan, candidate, model, graph, scores[candidate.label], target, only_count=dry and not judge)
            measured = _refit(plan, cut, model, graph, prior, sequential=not judge)
        except InvalidValueError as error:
            if not judge:
                raise
            refused = error
            tried.append(CandidateReport(candidate.label, candidate.way, None, False, f"could not be made: {error}"))
            continue
        loss = judge.measure(cut.model) if judge else None
        told = "" if loss is None or loss == loss else "its loss on held-out examples is NaN"
        tried.append(CandidateReport(candidate.label, candidate.way, None if told else loss, False, told))
        rank = float("inf") if told else loss or 0.0
        if best is None or rank < best[0]:
            best = rank, cut, measured
    if best is None:
        raise refused
    _, cut, measured = best
    if judge and not dry and plan.reconstruct in (True, "layers") and refits_in_sequence(model, graph, cut.mask):
        cut = replace(cut, model=compact(model, graph, cut.mask, rules=plan.rules))
        measured |= _refit(plan, cut, model, graph, prior, sequential=True)
    chosen = (cut.candidate.label, cut.candidate.way)
    rows = [replace(each, chosen=(each.criterion, each.allocation) == chosen) for each in tried]
    notes = [f"Candidate {each.criterion}, {each.allocation}: {each.note}." for each in tried if each.note]
    return Chosen(cut, rows, scores, measured, notes)


def _make(
    plan: Plan,
    candidate: Candidate,
    model: nn.Module,
    graph: UnitGraph,
    scores: Scored,
    target: Budget | None,
    *,
    only_count: bool,
) -> Cut:
    """Cut to a budget, of milliseconds too. Numbers of units mean the same in a narrow model, so costs are the plan's."""

    def to(budget: Budget | None, *, only_count: bool) -> Cut:
        counts = allocate(
            candidate.allocation, graph, scores.values, plan.costs, budget=budget, limits=plan.limits_of(graph),
            multiple_of=plan.multiple_of,
        )  # fmt: skip
        if getattr(candidate.allocation, "func", candidate.allocation) is global_ranking:
            _warn_of_starved(graph, counts)
        mask = mask_from_scores(graph, scores.values, counts, source=f"{scores.name} scores")
        if only_count:  # who cuts by herself, perhaps in place, has no memory for a second model
            return Cut(candidate, mask, model, None)
        small = compact(model, graph, mask, rules=plan.rules)
        check_runs(small, plan.call)
        return Cut(candidate, mask, small, None)

    if target is None or target.latency_ms is None:
        return to(target, only_count=only_count)
    absolute = target.limits(plan.dense_costs)
    limit_ms, dense_ms = absolute["latency_ms"], plan.dense_costs["latency_ms"]

    def at(share: float) -> tuple[Cut, Callable[[], float]]:
        """Cut to a share of the dense FLOPs."""
        limits: dict[str, Any] = {name: getattr(target, name) for name in target.metrics if name != "latency_ms"}
        if (flops := max(1.0, share * plan.dense_costs["flops"])) < absolute.get("flops", float("inf")):
            limits["flops"] = flops
        cut = to(Budget(**limits), only_count=False)
        args, kwargs = plan.call.args, plan.call.kwargs
        with torch.no_grad(), evaluated(cut.model):
            small_pass = prepare(cut.model, target.runtime, args, kwargs)

        def measure() -> float:
            assert plan.dense_pass is not None
            with torch.no_grad(), evaluated(plan.dense, cut.model):
                pair = time_turns(plan.dense_pass, small_pass, stopwatch(device_of(plan.dense, args, kwargs)))
            # A share is one of what the dense model takes at the same time: machines slow down and speed up again.
            of_dense = plan.budget is not None and isinstance(plan.budget.latency_ms, str)
            return dense_ms / pair.faster if of_dense else pair.after_ms

        return cut, measure

    with working("Searching the widths that meet the latency", show=plan.progress):
        cut, after_ms = meet_latency(limit_ms, dense_ms, at, requested=target.told("latency_ms", limit_ms))
    return replace(cut, latency_ms=after_ms)


def _refit(
    plan: Plan, cut: Cut, dense: nn.Module, graph: UnitGraph, prior: Mapping[str, Tensor], *, sequential: bool
) -> dict[str, Any]:
    """Refit the layers that read dropped units, then renew the statistics of batch norms; what is measured on the way."""
    measured: dict[str, Any] = {}
    if plan.calibration is None or cut.model is dense or all(bool(keep.all()) for keep in cut.mask.values()):
        return measured
    batches = plan.calibration.fit
    if plan.reconstruct in (True, "layers"):
        left = refit(dense, cut.model, graph, cut.mask, batches, sequential=sequential, progress=plan.progress)
        if left:
            measured["reconstruction_error"] = sum(left.values()) / len(left)
    if plan.reconstruct in (True, "batchnorm"):
        indices = graph.kept_indices(cut.mask)
        own = {name: value[indices[name][0]] if name in indices else value for name, value in prior.items()}
        recalibrate_batchnorm(cut.model, batches, prior=own, progress=plan.progress)
    return measured


def _prior(plan: Plan, model: nn.Module) -> Mapping[str, Tensor]:
    """Return what the statistics of a model know beyond the batches."""
    needed = plan.calibration is not None and plan.reconstruct in (True, "batchnorm")
    return statistics_prior(model, plan.calibration.fit) if needed and plan.calibration is not None else {}


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
            stacklevel=level_of_user(),
        )
