"""prune(): a model and a budget in, a smaller model and a report out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.allocation import registry as allocations
from sparsekit.allocation.base import Allocation
from sparsekit.allocation.choose import choose
from sparsekit.allocation.limits import Limits
from sparsekit.allocation.rounding import Multiples, check_multiples, free_counts
from sparsekit.allocation.schedule import Schedule
from sparsekit.criteria.base import Criterion, View, is_comparable, score_units
from sparsekit.criteria.batches import Batch, Loss
from sparsekit.criteria.by_name import as_criterion
from sparsekit.errors import InvalidValueError
from sparsekit.graph.edit import narrow
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel
from sparsekit.measure.latency import measure_latency
from sparsekit.measure.model import cost_model
from sparsekit.pruning.calibration import meet_latency
from sparsekit.pruning.examples import Examples
from sparsekit.pruning.report import PruneReport, describe
from sparsekit.pruning.result import Pruned
from sparsekit.pruning.selection import Selector, read_limits
from sparsekit.rng import torch_generator
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.inputs import find_tensors
from sparsekit.tracing.trace import trace_units

__all__ = ["AfterCut", "as_criterion", "prune"]

AfterCut: TypeAlias = Callable[[nn.Module, int], object]
"""Called with the narrow model and the number of the step, from 1; trains it in place, or returns the model that goes on."""


def prune(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor,
    *,
    budget: Budget | Mapping[str, str | float] | str | None = None,
    batches: Iterable[Batch] | None = None,
    loss: Loss | None = None,
    repair: bool = True,
    criterion: Criterion | str | None = None,
    allocation: Allocation | str = "by_cost",
    keep: Iterable[Selector] = (),
    limits: Mapping[Selector, tuple[float, float]] | None = None,
    multiple_of: Multiples = 1,
    schedule: Schedule | str | None = None,
    finetune: AfterCut | None = None,
    graph: UnitGraph | None = None,
    norm: Literal["fixed", "kept"] = "fixed",
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    generator: torch.Generator | None = None,
    cut: bool = True,
) -> Pruned:
    """Cut a model down to a budget.

    ```python
    pruned = sk.prune(model, (images[:1],), budget=sk.Budget(flops="50%"))
    pruned.model, pruned.report.after["flops"]
    pruned.save("small.safetensors")
    ```

    Args:
        model: The dense model; not changed.
        example_inputs: One call's worth of inputs: a tuple of positional ones, a mapping of keyword inputs, or one tensor. The
            peak of the memory and the latency of a budget are those of this batch.
        budget: What the small model may cost, also as a mapping or as text such as `"flops=50%,latency_ms=4"`. Never exceeded.
            None where the allocation says all by itself.
        batches: Training data that can be read again, such as a loader or a list, of which some dozen batches are used. With
            them units are scored by `Fisher` unless `criterion` says otherwise, and the cut model is repaired.
        loss: `loss(outputs, target)` of the batches; None takes `outputs.loss`.
        repair: Whether layers that read dropped units are refitted (`compensate`) and batch norms recalibrated, after every
            cut, where there are batches.
        criterion: What a unit is worth, or its name; by default the magnitude of its weights, and `Fisher` with batches. A
            name that needs data gets the batches and the loss.
        allocation: How many units stay in each group, or its name: "by_cost", "global", "isomorphic", "uniform", "knapsack".
            A ready one brings its own budget; it takes `keep`, `limits` and `multiple_of` where it has none.
        keep: Layers that keep all their units, by name, regular expression, type or module.
        limits: The same → (least, largest) share of the units that stays, each in [0, 1].
        multiple_of: What the width of each layer is a multiple of, or kind of unit → number; a group that keeps all its units
            keeps their number.
        schedule: In how many steps the budget is reached; between them `finetune` is called and units are scored anew.
        finetune: Called with the narrow model and the number of the step after every cut.
        graph: The units, if they were traced before; else they are traced.
        norm: What becomes of units that a layer norm averages over, as in `trace_units`.
        rules: Rules for layers of your own, as given to `trace_units`.
        generator: The source of randomness of criteria that draw; by default always the same.
        cut: False decides and reports only: `model` of the result is then the dense model, and nothing is called on it.
            `compact(model, result.graph, result.mask, inplace=True)` then cuts a model that fits into memory only once.

    Returns:
        The small model, the mask, the units and the report.

    Raises:
        BudgetError: the budget cannot be met; the message has the least cost and the groups that hold it up.
        UnknownNameError: a metric, criterion, allocation or schedule that does not exist, or a selection that means nothing.
        InvalidValueError: options that do not go together, inputs on another device, scores that hold NaN.
        DataError: an empty loader, or a batch on another device than the model.
        MissingImportanceError: the criterion needs what a model alone does not have.
        TraceError: the model fails on the inputs.
        NoUnitsError: nothing in the model can be removed exactly.
    """
    args, kwargs = _as_call(example_inputs)
    _check_devices(model, args, kwargs)
    steps = Schedule(schedule) if isinstance(schedule, str) else schedule or Schedule()
    wanted = None if budget is None else Budget.of(budget)
    check_multiples(multiple_of)
    graph = graph if graph is not None else trace_units(model, *args, rules=rules, norm=norm, example_kwargs=kwargs)
    if loss is not None and batches is None:
        raise InvalidValueError("a loss needs batches; pass batches=, training data such as a loader")
    examples = None if batches is None else Examples(batches, loss, repair=repair)
    chosen = as_criterion(criterion if examples is None else examples.criterion(criterion))
    group_limits = read_limits(model, graph, keep, limits or {})
    plan = _as_allocation(allocation, wanted, group_limits, multiple_of, chosen)
    wanted = wanted if wanted is not None else getattr(plan, "budget", None)
    if steps.steps > 1 and (wanted is None or not _has(plan, "budget")):
        raise InvalidValueError(
            f"a schedule of {steps.steps} steps needs a budget to go to, and an allocation within a budget;"
            f" {type(plan).__name__} has none"
        )
    costs = cost_model(model, *args, graph=graph, metrics=wanted.metrics if wanted else (), rules=rules, **kwargs)
    generator = generator if generator is not None else torch_generator(np.random.default_rng(0))
    way = _Way(model, args, kwargs, graph, chosen, plan, costs, steps, generator, rules, cut, examples)
    small, mask, history = way.go(finetune if cut else None)
    report = _report(model, graph, costs, mask, wanted, chosen, plan, history, limits=group_limits, multiple_of=multiple_of)
    if way.measured:
        report = replace(report, measured=way.measured)
    if "latency_ms after" in way.measured:
        report = replace(report, after={**report.after, "latency_ms": way.measured["latency_ms after"]})
    return Pruned(small if cut else model, mask, graph, report)


@dataclass
class _Way:
    """The way from the dense model to the budget: score, allocate, cut and train, once per step."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graph: UnitGraph
    criterion: Criterion
    plan: Allocation
    costs: CostModel
    steps: Schedule
    generator: torch.Generator
    rules: Mapping[type[nn.Module], LayerRule] | None
    cut: bool = True
    examples: Examples | None = None
    measured: dict[str, float] = field(default_factory=dict)

    def go(self, finetune: AfterCut | None) -> tuple[nn.Module, UnitMask, list[Mapping[str, float]]]:
        """The small model, its mask of the dense model, and the costs after each step."""
        small, units, mask = self.model, self.graph, UnitMask.full(self.graph)
        dense, present = self.costs.dense_costs(), self.costs
        history: list[Mapping[str, float]] = []
        for step in range(1, self.steps.steps + 1):
            view = View(weights=small.state_dict(), model=small, generator=self.generator)
            scores = score_units(self.criterion, units, view)
            part = _for_step(self.plan, self.steps.progress(step), dense, self.graph, units)
            whole = small
            chosen, small = self._cut(whole, units, scores, part, present, last=step == self.steps.steps)
            if self.examples is not None and small is not whole:
                left = self.examples.after_cut(whole, small, units, chosen)
                if left:
                    self.measured["error of refitted layers that is left"] = sum(left.values()) / len(left)
            mask = _inside(mask, chosen)
            history.append(self.costs.costs(mask.counts()))
            units = narrow(self.graph, mask)
            present = self.costs.narrowed(units)
            if finetune is not None:
                trained = finetune(small, step)
                small = trained if isinstance(trained, nn.Module) else small
        return small, mask, history

    def _cut(
        self,
        model: nn.Module,
        units: UnitGraph,
        scores: Mapping[str, Tensor],
        plan: Allocation,
        costs: CostModel,
        *,
        last: bool,
    ) -> tuple[UnitMask, nn.Module]:
        def to(allocation: Allocation) -> tuple[UnitMask, nn.Module]:
            counts = allocation.counts(units, scores, costs)
            mask = choose(units, scores, counts, source=f"{type(self.criterion).__name__} scores")
            # Who cuts by herself, perhaps in place, has no memory for a second model.
            return mask, model if last and not self.cut and not timing else compact(model, units, mask, rules=self.rules)

        budget = getattr(plan, "budget", None)
        timing = last and isinstance(budget, Budget) and "latency_ms" in budget.metrics
        if not timing or not isinstance(budget, Budget):
            return to(plan)

        def timed(other: Budget) -> tuple[tuple[UnitMask, nn.Module], float]:
            found = to(replace(cast(Any, plan), budget=other))
            training = found[1].training
            milliseconds = measure_latency(found[1].eval(), self.args, self.kwargs)
            found[1].train(training)
            return found, milliseconds

        found, after = meet_latency(budget, budget.limits(costs.dense_costs())["latency_ms"], timed)
        meter = self.costs.meters["latency_ms"]
        counts = found[0].counts()
        self.measured |= {
            "latency_ms before": self.costs.dense_costs()["latency_ms"],
            "latency_ms after": after,
            "latency_ms after, by the table": meter.at(counts),
            "error of the table, layers against the whole dense model": getattr(meter, "table_error", 0.0),
            "error of the table, small model": meter.at(counts) / after - 1,
        }
        return found


def _inside(outer: UnitMask, inner: UnitMask) -> UnitMask:
    """The mask of the dense model: `inner` says which of the units that `outer` keeps stay."""
    found = {}
    for name, keep in outer.items():
        both = keep.clone()
        both[keep] = inner[name]
        found[name] = both
    return UnitMask(found)


def _for_step(plan: Allocation, progress: float, dense: Mapping[str, float], graph: UnitGraph, units: UnitGraph) -> Allocation:
    """The allocation for a step: a part of the budget in absolute numbers, and limits as shares of what is left."""
    if not is_dataclass(plan) or isinstance(plan, type) or not _has(plan, "budget"):
        return plan
    budget: Budget = getattr(plan, "budget")  # noqa: B009 - not part of the protocol
    absolute = Budget(**budget.limits(dense)) if progress >= 1.0 else budget.part(progress, dense)
    changed: dict[str, Any] = {"budget": absolute}
    if _has(plan, "limits"):
        changed["limits"] = {
            name: _of_rest(pair, graph.groups[name].size, units.groups[name].size)
            for name, pair in getattr(plan, "limits").items()  # noqa: B009
            if name in graph.groups
        } | {name: pair for name, pair in getattr(plan, "limits").items() if name not in graph.groups}  # noqa: B009
    return replace(plan, **changed)


def _of_rest(pair: tuple[float, float], size: int, left: int) -> tuple[float, float]:
    """(0.25, 0.75) of 8 units are (0.5, 1.0) of the 4 that are left."""
    return min(1.0, pair[0] * size / left), min(1.0, pair[1] * size / left)


def _report(
    model: nn.Module,
    graph: UnitGraph,
    costs: CostModel,
    mask: UnitMask,
    budget: Budget | None,
    criterion: Criterion,
    plan: Allocation,
    history: list[Mapping[str, float]],
    *,
    limits: Limits,
    multiple_of: Multiples,
) -> PruneReport:
    dense = costs.dense_costs()
    own_limits: Limits = getattr(plan, "limits", limits)
    own_multiples: Multiples = getattr(plan, "multiple_of", multiple_of)
    free = free_counts(graph, own_limits, own_multiples)
    least = costs.costs({name: counts[0] for groups, counts in free.items() for name in groups})
    groups, layers = describe(graph, costs, mask.counts())
    absolute = budget.limits(dense) if budget is not None else {}
    notes = []
    if budget is not None and all(dense[name] <= limit for name, limit in absolute.items()):
        notes.append(f"The dense model is within the budget already ({budget}), so nothing was cut.")
        warnings.warn(notes[-1], stacklevel=3)
    return PruneReport(
        model=type(model).__name__,
        criterion=type(criterion).__name__,
        allocation=type(plan).__name__,
        asked={name: getattr(budget, name) for name in absolute},
        limits=absolute,
        before=dense,
        after=costs.costs(mask.counts()),
        least=least,
        groups=groups,
        layers=layers,
        fixed=[{"module": item.module, "size": item.size, "reason": item.reason} for item in graph.fixed],
        steps=history,
        notes=notes,
    )


def _as_call(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    raise InvalidValueError(
        "example_inputs must be a tuple of positional inputs, a mapping of keyword inputs or one tensor,"
        f" got {type(example_inputs).__name__}; pass (x,), one call's worth of inputs"
    )


def _check_devices(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    own = {entry.device.type for entry in model.parameters()}
    given = {tensor.device.type for tensor in find_tensors([*args, *kwargs.values()])}
    if len(own) == 1 and given - own:
        raise InvalidValueError(
            f"the model is on {own.pop()}, the example inputs are on {', '.join(sorted(given))};"
            " move one of them with .to(device)"
        )


def _has(plan: object, name: str) -> bool:
    return is_dataclass(plan) and name in {item.name for item in fields(plan)}


def _with_limits(allocation: Allocation, limits: Limits, multiple_of: Multiples) -> Allocation:
    """A ready allocation with limits and multiples, where it can have them and has none of its own."""
    changed: dict[str, Any] = {}
    for name, value, unset in (("limits", limits, {}), ("multiple_of", multiple_of, 1)):
        if value == unset:
            continue
        if not _has(allocation, name):
            raise InvalidValueError(f"{type(allocation).__name__} has no {name}; leave out keep, limits and multiple_of")
        if getattr(allocation, name) != unset:
            raise InvalidValueError(f"the allocation has {name} of its own; give all of them to {type(allocation).__name__}")
        changed[name] = value
    return replace(cast(Any, allocation), **changed) if changed else allocation


def _as_allocation(
    allocation: Allocation | str, budget: Budget | None, limits: Limits, multiple_of: Multiples, criterion: Criterion
) -> Allocation:
    if not isinstance(allocation, str):
        if budget is not None and getattr(allocation, "budget", budget) != budget:
            raise InvalidValueError(
                f"the allocation has a budget of its own ({getattr(allocation, 'budget', None)}); leave `budget` out"
            )
        return _with_limits(allocation, limits, multiple_of)
    name = "uniform_within" if allocation == "uniform" else allocation
    kind = allocations.find(name)
    known = {item.name for item in fields(kind)} if is_dataclass(kind) else set()
    if "budget" in known and budget is None:
        raise InvalidValueError(f'{allocation!r} needs a budget, as in budget=sparsekit.Budget(flops="50%")')
    given: dict[str, Any] = {"budget": budget, "limits": limits, "multiple_of": multiple_of}
    if name == "global" and is_comparable(criterion):  # by cost such scores would cut dear layers to a thread
        given["scale"] = "none"
    try:
        made: Allocation = kind(**{key: value for key, value in given.items() if key in known})
    except TypeError as error:
        raise InvalidValueError(
            f"allocation {allocation!r} needs more than its name: {error}; build it, as in"
            f" allocation=sparsekit.allocation.{getattr(kind, '__name__', allocation)}(...)"
        ) from error
    return made
