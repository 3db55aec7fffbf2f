"""Steps: from the dense model to the budget, once or in several cuts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from sparsekit.allocation.base import Allocation
from sparsekit.allocation.choose import choose
from sparsekit.allocation.limits import Counts, Liked
from sparsekit.allocation.schedule import Schedule
from sparsekit.criteria.base import Criterion, View, score_units
from sparsekit.criteria.batches import Batch
from sparsekit.graph.edit import narrow
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule
from sparsekit.measure.budget import Budget, BudgetError, format_cost
from sparsekit.measure.cost import CostModel
from sparsekit.measure.paired import measure_turns
from sparsekit.pruning.compensation import compensate, recalibrate
from sparsekit.pruning.plans import for_rest, has_field, with_fields
from sparsekit.surgery.compaction import compact
from sparsekit.surgery.rebuild import copy_with
from sparsekit.tracing.inputs import ModelInputs

AfterCut: TypeAlias = Callable[[nn.Module, int], object]
"""Called with the narrow model and the number of the step, from 1; trains it in place, or returns the model that goes on."""

Repair: TypeAlias = bool | Literal["compensate", "recalibrate"]
"""Whether a cut model is refitted and recalibrated; or which of the two is done."""


T = TypeVar("T")

_TRIES = 6
_CLOSE = 0.95


def meet_latency(budget: Budget, limit_ms: float, cut: Callable[[Budget], tuple[T, float]]) -> tuple[T, float]:
    """Ask the table for other milliseconds until the narrow model, measured, is within the limit and near it.

    `cut` makes of a budget, in absolute numbers, what comes of it and its measured milliseconds.

    Returns:
        What came nearest to the limit without exceeding it, and its milliseconds.

    Raises:
        BudgetError: nothing that the table offers was measured within the limit.
    """
    asked = limit_ms
    best: tuple[T, float] | None = None
    fastest = float("inf")
    for _ in range(_TRIES):
        changed: dict[str, Any] = {"latency_ms": asked}
        try:
            found, measured = cut(replace(budget, **changed))
            if measured <= limit_ms:  # not by luck
                measured = max(measured, cut(replace(budget, **changed))[1])
        except BudgetError:
            if best is None and fastest == float("inf"):
                raise
            break
        fastest = min(fastest, measured)
        if measured <= limit_ms and (best is None or measured > best[1]):
            best = found, measured
        if best is not None and best[1] >= _CLOSE * limit_ms:
            break
        # A little less than the rule of three, since times vary from run to run.
        asked *= min(2.0, 0.98 * limit_ms / measured)
    if best is None:
        raise BudgetError(
            f"the budget cannot be met: latency_ms ≤ {limit_ms:.3g} was asked, and the fastest narrow model measured took"
            f" {fastest:.3g} ms; other programs on this machine or its number of threads may be the reason, or ask for more",
            {"latency_ms": fastest},
        )
    return best


@dataclass(frozen=True, eq=False)
class Start:
    """What widths are cut from.

    Args:
        model: The dense model, or what is left of it.
        graph: Its units.
        costs: Its costs.
        allocation: How many units stay in each group.
        budget: What the small model may cost, in absolute numbers where branches are gone.
        kind: What `branches` are.
        branches: Name → the modules of which it consists.
        gone: Names of those that are no part of the model.
        notes: Notes of the report.
    """

    model: nn.Module
    graph: UnitGraph
    costs: CostModel
    allocation: Allocation
    budget: Budget | None
    kind: str = "block"
    branches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Steps:
    """From the dense model to the budget: score, allocate, cut, repair and train, once per step."""

    dense: nn.Module
    costs: CostModel  # of the dense model
    asked: Budget | None
    start: Start
    call: ModelInputs
    criterion: Criterion
    schedule: Schedule
    generator: torch.Generator
    rules: Mapping[type[nn.Module], LayerRule] | None
    cut: bool
    batches: Iterable[Batch] | None
    repair: Repair
    metric: Callable[[nn.Module], float] | None
    progress: bool
    measured: dict[str, Any] = field(default_factory=dict)
    latency_ms: float | None = None
    unrounded: Counts = field(default_factory=dict)

    def run(self, finetune: AfterCut | None) -> tuple[nn.Module, UnitMask, list[Mapping[str, float]]]:
        """The small model, its mask of the dense model, and the costs after each step."""
        small, units, mask = self.start.model, self.start.graph, UnitMask.full(self.start.graph)
        dense = self.start.costs.dense_costs()
        history: list[Mapping[str, float]] = []
        if self.cut:
            self._score("of the dense model", self.dense)
            if small is not self.dense:
                self._score("without the branches that went", small)
                if self.batches is not None and self.repair in (True, "recalibrate"):
                    small = copy_with(small, {})
                    recalibrate(small, self.batches, limit=50, progress=self.progress)
        for step in range(1, self.schedule.steps + 1):
            view = View(weights=small.state_dict(), model=small, generator=self.generator)
            scores = score_units(self.criterion, units, view)
            budget: Budget | None = getattr(self.start.allocation, "budget", None)
            if budget is not None:  # in absolute numbers
                budget = Budget(**budget.part(self.schedule.progress(step), dense).limits(dense))
            part = for_rest(self.start.allocation, budget, self.start.graph, units)
            whole = small
            chosen, small = self._cut(whole, units, scores, part, last=step == self.schedule.steps)
            if step == self.schedule.steps and isinstance(getattr(part, "multiple_of", None), Liked):
                self.unrounded = with_fields(part, multiple_of=1).counts(units, scores, self.start.costs)
            when = "" if self.schedule.steps == 1 else f" of step {step}"
            if small is not whole:
                self._score(f"after the cut{when}", small)
                self._mend(whole, small, units, chosen, when)
            mask = _inside(mask, chosen)
            history.append(self.start.costs.costs(mask.counts()))
            units = narrow(self.start.graph, mask)
            if finetune is not None:
                trained = finetune(small, step)
                small = trained if isinstance(trained, nn.Module) else small
                self._score(f"after fine-tuning{when}", small)
        return small, mask, history

    def _score(self, when: str, model: nn.Module) -> None:
        if self.metric is not None:
            self.measured[f"{getattr(self.metric, '__name__', 'score')} {when}"] = self.metric(model)

    def _mend(self, before: nn.Module, small: nn.Module, graph: UnitGraph, mask: UnitMask, when: str) -> None:
        """Refit the layers that read dropped units, then estimate the statistics of batch norms anew."""
        if self.batches is None or all(bool(keep.all()) for keep in mask.values()):
            return
        if self.repair in (True, "compensate"):
            left = compensate(before, small, graph, mask, self.batches, limit=20, progress=self.progress)
            if left:
                self.measured["error of refitted layers that is left"] = sum(left.values()) / len(left)
                self._score(f"after compensation{when}", small)
        if self.repair in (True, "recalibrate") and recalibrate(small, self.batches, limit=50, progress=self.progress):
            self._score(f"after recalibration{when}", small)

    def _cut(
        self,
        model: nn.Module,
        units: UnitGraph,
        scores: Mapping[str, Tensor],
        allocation: Allocation,
        *,
        last: bool,
    ) -> tuple[UnitMask, nn.Module]:
        costs = self.start.costs  # numbers of units mean the same in a narrow model
        limits = self.start.budget.limits(costs.dense_costs()) if last and self.start.budget is not None else {}
        limit_ms = limits.pop("latency_ms", None)

        def to(allocation: Allocation) -> tuple[UnitMask, nn.Module]:
            counts = allocation.counts(units, scores, costs)
            mask = choose(units, scores, counts, source=f"{type(self.criterion).__name__} scores")
            _check_within(limits, costs.costs(counts), allocation)
            # Who cuts by herself, perhaps in place, has no memory for a second model.
            bare = last and not self.cut and limit_ms is None
            return mask, model if bare else compact(model, units, mask, rules=self.rules)

        def timed(allocation: Allocation) -> tuple[tuple[UnitMask, nn.Module], float]:
            found = to(allocation)
            pair = measure_turns(self.dense, found[1], self.call.args, self.call.kwargs)
            # A share is one of what the dense model takes at the same time: machines slow down and speed up again.
            share = self.asked is not None and isinstance(self.asked.latency_ms, str)
            return found, self.costs.dense_costs()["latency_ms"] / pair.faster if share else pair.after_ms

        if limit_ms is None:
            return to(allocation)
        if has_field(allocation, "budget"):
            budget: Budget = cast(Any, allocation).budget
            found, after = meet_latency(budget, limit_ms, lambda other: timed(with_fields(allocation, budget=other)))
        else:
            found, after = timed(allocation)
            _check_within({"latency_ms": limit_ms}, {"latency_ms": after}, allocation)
        meter, counts = costs.meters["latency_ms"], found[0].counts()
        self.latency_ms = after
        self.measured |= {
            "latency_ms before": self.costs.dense_costs()["latency_ms"],
            "latency_ms after": after,
            "latency_ms after, by the table": meter.at(counts),
            "error of the table, layers against the whole dense model": getattr(meter, "table_error", 0.0),
            "error of the table, small model": meter.at(counts) / after - 1,
        }
        return found


def _check_within(limits: Mapping[str, float], costs: Mapping[str, float], allocation: Allocation) -> None:
    """Raise BudgetError where an allocation that does not look at the budget exceeds it."""
    above = [name for name, limit in limits.items() if costs[name] > limit * (1 + 1e-9)]
    if above:
        told = "; ".join(f"{name} ≤ {format_cost(name, limits[name])}, not {format_cost(name, costs[name])}" for name in above)
        raise BudgetError(
            f"{type(allocation).__name__} exceeds the budget: {told}; take an allocation within a budget, such as 'by_cost',"
            " let this one keep fewer units, or leave `budget` out"
        )


def _inside(outer: UnitMask, inner: UnitMask) -> UnitMask:
    """The mask of the dense model: `inner` says which of the units that `outer` keeps stay."""
    found = {}
    for name, keep in outer.items():
        both = keep.clone()
        both[keep] = inner[name]
        found[name] = both
    return UnitMask(found)
