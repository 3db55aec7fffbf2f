"""prune(): a model and a budget in, a smaller model and a report out."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.allocation.base import Allocation
from sparsekit.allocation.limits import Liked, Multiples, check_multiples, free_counts, least_counts
from sparsekit.allocation.schedule import Schedule
from sparsekit.criteria.base import Criterion
from sparsekit.criteria.batches import Batch, Loss
from sparsekit.criteria.by_name import as_criterion, with_data
from sparsekit.errors import InvalidValueError, NoUnitsError, UnsupportedModelError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import measure_costs
from sparsekit.measure.widths import best_multiple
from sparsekit.pruning.depth import go_shallow, read_depth
from sparsekit.pruning.plans import as_allocation, has_field
from sparsekit.pruning.report import PruneReport, count_denormals, describe
from sparsekit.pruning.result import Pruned
from sparsekit.pruning.selection import Selector, read_limits, select_groups
from sparsekit.pruning.steps import AfterCut, Repair, Start, Steps
from sparsekit.rng import torch_generator
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.blocks import refuse_meta
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.trace import trace_units


def prune(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | ModelInputs | list[tuple[Any, ...] | Mapping[str, Any]],
    *,
    budget: Budget | Mapping[str, str | float] | str | None = None,
    batches: Iterable[Batch] | None = None,
    loss: Loss | None = None,
    repair: Repair = True,
    metric: Callable[[nn.Module], float] | None = None,
    criterion: Criterion | str | None = None,
    allocation: Allocation | str = "by_cost",
    keep: Iterable[Selector] = (),
    limits: Mapping[Selector, tuple[float, float]] | None = None,
    multiple_of: int | Mapping[str, int] | Literal["auto"] = 1,
    schedule: Schedule | str | None = None,
    finetune: AfterCut | None = None,
    graph: UnitGraph | None = None,
    norm: Literal["fixed", "kept"] = "fixed",
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    generator: torch.Generator | None = None,
    cut: bool = True,
    progress: bool = False,
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
            peak of the memory and the latency of a budget are those of this batch. A list of such tuples and mappings is
            several calls, each traced and verified, so that every branch is seen; costs are those of the first.
        budget: What the small model may cost, also as a mapping or as text such as `"flops=50%,latency_ms=4"`. Never exceeded.
            None where the allocation says all by itself.
        batches: Training data that can be read again, such as a loader or a list, of which some dozen batches are used. With
            them units are scored by `Fisher` unless `criterion` says otherwise, and the cut model is repaired.
        loss: `loss(outputs, target)` of the batches; None takes `outputs.loss`.
        repair: Whether layers that read dropped units are refitted (`compensate`) and batch norms recalibrated, after every
            cut, where there are batches; "compensate" or "recalibrate" does one of them.
        metric: Scores a model, as accuracy on validation data. The report has its scores of the dense model, after each cut,
            each repair and each `finetune`.
        criterion: What a unit is worth, or its name; by default the magnitude of its weights, and `Fisher` with batches. A
            name that needs data gets the batches and the loss, and so does an object that has none.
        allocation: How many units stay in each group, or its name: "by_cost", "global", "isomorphic", "uniform", "knapsack".
            A ready one brings its own budget; it takes `keep`, `limits` and `multiple_of` where it has none.
        keep: Layers that keep all their units, by name, regular expression, type or module, or kinds of unit such as "channel".
        limits: The same → (least, largest) share of the units that stays, each in [0, 1]. The kind "block" stands for residual
            branches, such as those of a ResNet or attention and the MLPs of a transformer, and "layer" for modules that do
            nothing but add some. All of them stay unless a limit is given, such as `{"block": (0, 1)}`. They go first, then
            units of what is left. `keep`, and the least share for a name, hold for branches as well.
        multiple_of: What the width of each layer is a multiple of, or kind of unit → number; a group that keeps all its units
            keeps their number. "auto" takes what suits this device best, mostly 16 or 8, as far as that leaves at most 2 % of
            the budget unused and groups have as many units; then the widths depend on the processor.
        schedule: Steps in which the budget is reached; between them `finetune` is called and units are scored anew.
        finetune: Called with the narrow model and the number of the step after every cut.
        graph: The units, if they were traced before; else they are traced.
        norm: What becomes of units that a layer norm averages over, as in `trace_units`.
        rules: Rules for layers of your own, as given to `trace_units`.
        generator: The source of randomness of criteria that draw; by default always the same.
        cut: False decides and reports only: `model` of the result is then the dense model, and nothing is called on it.
            `compact(model, result.graph, result.mask, inplace=True)` then cuts a model that fits into memory only once; where
            branches are gone, graph and mask are those of what is left.
        progress: Whether to draw progress bars on stderr.

    Returns:
        The small model, the mask, the units and the report.

    Raises:
        BudgetError: the budget cannot be met, with the least cost and the groups that hold it up; or the allocation does not
            look at the budget and exceeds it.
        UnknownNameError: a metric, criterion, allocation or schedule that does not exist, or a selection that means nothing.
        UnsupportedModelError: the model is no module, but a class or a name; or it is on the meta device, without values.
        InvalidValueError: options that do not go together, inputs on another device, scores that hold NaN.
        DataError: an empty loader, or a batch on another device than the model.
        MissingImportanceError: the criterion needs what a model alone does not have.
        TraceError: the model fails on the inputs.
        NoUnitsError: nothing in the model can be removed exactly.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"expected a torch.nn.Module, got {model!r}; build the model first, and pass what comes out"
        )
    refuse_meta(model, "prune")
    call, *others = ModelInputs.several(example_inputs)
    for inputs in (call, *others):
        _check_devices(model, inputs)
    schedule = Schedule(schedule) if isinstance(schedule, str) else schedule or Schedule()
    wanted = None if budget is None else Budget.of(budget)
    weight = next((entry for entry in model.parameters() if entry.is_floating_point()), None)
    liked = 1 if weight is None or multiple_of != "auto" else best_multiple(weight.device, weight.dtype)
    multiples = multiple_of if multiple_of != "auto" else Liked(liked)
    check_multiples(multiples)
    depth, width_limits = read_depth(model, limits or {})
    if graph is None:
        try:
            graph = trace_units(model, rules=rules, norm=norm, example_inputs=[call, *others])
        except NoUnitsError as error:
            if depth is None:
                raise
            graph = UnitGraph({}, {name: entry.shape for name, entry in named_entries(model).items()}, fixed=error.fixed)
    if loss is not None and batches is None:
        raise InvalidValueError("a loss needs batches; pass batches=, training data such as a loader")
    if repair not in (True, False, "compensate", "recalibrate"):
        raise InvalidValueError(f"repair must be True, False, 'compensate' or 'recalibrate', got {repair!r}")
    chosen = as_criterion(criterion) if batches is None else with_data(criterion, batches, loss, progress=progress)
    keep = list(keep) if not isinstance(keep, str | type | nn.Module) else keep
    # Where branches go, some limits name branches alone.
    of_widths = {each: pair for each, pair in width_limits.items() if depth is None or select_groups(model, graph, each)}
    plan = as_allocation(allocation, wanted, read_limits(model, graph, keep, of_widths), multiples, chosen)
    wanted = wanted if wanted is not None else getattr(plan, "budget", None)
    if schedule.steps > 1 and (wanted is None or not has_field(plan, "budget")):
        raise InvalidValueError(
            f"a schedule of {schedule.steps} steps needs a budget to go to, and an allocation within a budget;"
            f" {type(plan).__name__} has none"
        )
    metrics = wanted.metrics if wanted else ()
    costs = measure_costs(model, call.args, call.kwargs, graph, metrics, rules)
    draws = generator if generator is not None else torch_generator(np.random.default_rng(0))
    start = Start(model, graph, costs, plan, wanted)
    if depth is not None:
        start = go_shallow(
            start, [call, *others], depth, keep=keep, limits=width_limits, criterion=chosen, generator=draws, rules=rules
        )
    steps = Steps(
        dense=model,
        costs=costs,
        asked=wanted,
        start=start,
        call=call,
        criterion=chosen,
        schedule=schedule,
        generator=draws,
        rules=rules,
        cut=cut,
        batches=batches,
        repair=repair,
        metric=metric,
        progress=progress,
    )
    small, mask, history = steps.run(finetune if cut else None)
    return Pruned(small if cut else model, mask, start.graph, _report(steps, small, mask, history))


def _report(steps: Steps, small: nn.Module, mask: UnitMask, history: list[Mapping[str, float]]) -> PruneReport:
    start, budget, dense, counts = steps.start, steps.asked, steps.costs.dense_costs(), mask.counts()
    multiple_of: Multiples = getattr(start.allocation, "multiple_of", 1)
    # What a device likes gives way where a budget asks for less.
    free = free_counts(
        start.graph, getattr(start.allocation, "limits", {}), 1 if isinstance(multiple_of, Liked) else multiple_of
    )
    groups, layers = describe(start, steps.costs, counts)
    absolute = budget.limits(dense) if budget is not None else {}
    denormals = count_denormals(small)
    notes = [*start.notes]
    if budget is not None and all(dense[name] <= limit for name, limit in absolute.items()):
        notes.append(f"The dense model is within the budget already ({budget}), so nothing was cut.")
        warnings.warn(notes[-1], stacklevel=3)
    if isinstance(multiple_of, Liked):
        notes.append(f"Widths are multiples of {multiple_of.step}, which suits this device, or less where the budget asks it.")
    if denormals:
        notes.append(
            f"{denormals:,} weights are denormal numbers, smaller than any normal one, with which many processors compute"
            " several times as slowly; torch.set_flush_denormal(True) takes them for 0"
        )
    return PruneReport(
        model=type(steps.dense).__name__,
        criterion=type(steps.criterion).__name__,
        allocation=type(start.allocation).__name__,
        asked={name: getattr(budget, name) for name in absolute},
        limits=absolute,
        before=dense,
        after=start.costs.costs(counts) | ({} if steps.latency_ms is None else {"latency_ms": steps.latency_ms}),
        least=start.costs.costs(least_counts(free)),
        groups=groups,
        layers=layers,
        fixed=[{"module": item.module, "size": item.size, "reason": item.reason} for item in start.graph.fixed],
        steps=history,
        measured=steps.measured,
        notes=notes,
        denormals=denormals,
        unrounded=steps.unrounded if start.model is steps.dense else {},
    )


def _check_devices(model: nn.Module, call: ModelInputs) -> None:
    own = {entry.device.type for entry in model.parameters()}
    given = {tensor.device.type for tensor in find_tensors([*call.args, *call.kwargs.values()])}
    if len(own) == 1 and given - own:
        raise InvalidValueError(
            f"the model is on {own.pop()}, the example inputs are on {', '.join(sorted(given))};"
            " move one of them with .to(device)"
        )
