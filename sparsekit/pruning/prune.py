"""prune(): a model and a budget in, a smaller model and a report out."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit._torch import InstanceNorm, NormBase
from sparsekit.allocation import registry as allocations
from sparsekit.allocation.by_cost import global_ranking
from sparsekit.allocation.limits import Limits, PreferredMultiple, check_multiples, free_counts, least_counts
from sparsekit.allocation.problem import Allocation, name_of
from sparsekit.allocation.schedule import Schedule
from sparsekit.criteria.base import Criterion, is_comparable
from sparsekit.criteria.batches import Batch, DataDriven, Loss
from sparsekit.criteria.by_name import as_criterion, with_data
from sparsekit.criteria.scored import Scored
from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.graph.edit import narrow
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule
from sparsekit.measure.budget import Budget
from sparsekit.measure.clock import device_of, evaluated, median_ms
from sparsekit.measure.cost import measure_costs
from sparsekit.measure.paired import prepare
from sparsekit.pruning.calibration import Calibration
from sparsekit.pruning.cutting import Candidate, Cut, Cutter, criterion_name, inside
from sparsekit.pruning.reconstruction import Reconstruct
from sparsekit.pruning.report import CandidateReport, PruneReport, count_denormals, describe
from sparsekit.pruning.result import Pruned
from sparsekit.pruning.selection import Selector, read_limits
from sparsekit.pruning.trained import UncalibratedWarning, signs_of_training
from sparsekit.rng import torch_generator
from sparsekit.tracing.blocks import refuse_meta
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.trace import trace_units

AfterCut: TypeAlias = Callable[[nn.Module, int], object]
"""Called with the narrow model and the number of the step, from 1; trains it in place, or returns the model to continue
with."""

CANDIDATES = (
    ("fisher", "by_cost"),
    ("position_fisher", "by_loss"),
    ("activation", "by_cost"),
    ("activation", "uniform"),
)
"""Criterion and allocation of the cuts that are tried by default where there are batches; the first where there is one."""


def prune(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | ModelInputs | list[tuple[Any, ...] | Mapping[str, Any]],
    *,
    budget: Budget | Mapping[str, str | float] | str | None = None,
    batches: Iterable[Batch] | None = None,
    loss: Loss | None = None,
    reconstruct: Reconstruct = True,
    metric: Callable[[nn.Module], float] | None = None,
    criterion: Criterion | str | Mapping[str, Criterion] | Sequence[Criterion | str] | None = None,
    allocation: Allocation | str | Sequence[Allocation | str] | None = None,
    keep: Iterable[Selector] = (),
    limits: Mapping[Selector, tuple[float, float]] | None = None,
    multiple_of: int | Mapping[str, int] | PreferredMultiple | None = None,
    schedule: Schedule | str | None = None,
    finetune: AfterCut | None = None,
    graph: UnitGraph | None = None,
    prune_norms: bool = False,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    generator: torch.Generator | None = None,
    dry_run: bool = False,
    progress: bool = False,
) -> Pruned:
    """Prune a model to a budget.

    Pass `batches` for every network that was trained: which criterion is right differs from network to network, and a wrong
    one costs most of the accuracy. With batches, a few candidate cuts are made and reconstructed, and the one of least loss
    on batches that were set aside is kept; the report lists them.

    ```python
    pruned = sk.prune(model, (images[:1],), budget=sk.Budget(flops="50%"), batches=loader, loss=F.cross_entropy)
    pruned.model, pruned.report.after["flops"]
    pruned.save("small.safetensors")
    ```

    Args:
        model: The dense model; not changed.
        example_inputs: One call's worth of inputs: a tuple of positional ones, a mapping of keyword inputs, or one tensor. The
            latency of a budget is that of this batch. A list of such tuples and mappings is
            several calls, each traced and verified, so that every branch is seen; costs are those of the first.
        budget: What the small model may cost, also as a mapping or as text such as `"flops=50%,latency_ms=4"`. Never exceeded.
            None where the allocation needs none.
        batches: Training data, such as a loader or a list; at most 48 batches or 1 GiB are read, once. The last fifth is set
            aside to judge candidates; the others score units and reconstruct. Batches without a target, given without a loss
            to a model that computes none, are compared with the dense model's own outputs.
        loss: `loss(outputs, target)` of the batches; None takes `outputs.loss`.
        reconstruct: Whether layers that read dropped units are refitted (`reconstruct`) and batch norms recalibrated after
            every cut, if there are batches; "layers" or "batchnorm" does one of them.
        metric: Scores a model, as accuracy on validation data. The report has its scores of the dense model, after each cut
            and each `finetune`.
        criterion: The importance of a unit: an object or a name, or several of them as candidates, such as the `scores` of
            an earlier result, which cost nothing. None tries the default candidates with batches, and takes the magnitude
            of the weights without. A name that needs data gets the batches and the loss, and so does an object without any.
        allocation: How many units stay in each group: a function or a name ("by_cost", "global", "uniform"), or several as
            candidates. None is "by_cost", or part of the default candidates.
        keep: Layers that keep all their units, by name, regular expression, type or module, or kinds of unit such as "channel".
        limits: The same → (least, largest) share of the units that stays, each in [0, 1].
        multiple_of: What the width of each layer is a multiple of, or kind of unit → number; a group that keeps all its units
            keeps their number. None prefers multiples of 8, for which runtimes have fast kernels: 4 for groups narrower than
            64, and 4 and then any number where more than 2 % of the budget would be unused. 1 allows any width.
        schedule: Steps in which the budget is reached; between them `finetune` is called and units are scored again.
        finetune: Called with the narrow model and the number of the step after every cut.
        graph: The units, if they were traced before; else they are traced.
        prune_norms: Also prune units that a layer norm averages over, as in `trace_units`.
        rules: Rules for layers of your own, as given to `trace_units`.
        generator: The source of randomness of criteria that draw; by default always the same.
        dry_run: Only decide and report: `model` of the result is then the dense model, and `finetune` is not called.
            `compact(model, result.graph, result.mask, inplace=True)` then cuts a model that fits into memory only once; name
            a criterion for such a model, since candidates are cut to be judged.
        progress: Whether to draw progress bars on stderr.

    Returns:
        The small model, the mask, the units, the scores and the report.

    Raises:
        BudgetError: the budget cannot be met, with the minimum and the groups that hold it up; or the allocation does not
            look at the budget and exceeds it.
        UnknownNameError: a metric, criterion, allocation or schedule that does not exist, or a selection that means nothing.
        UnsupportedModelError: `model` is not a module, but a class or a name; or it is on the meta device, without values.
        InvalidValueError: options that do not go together, inputs on another device, scores that hold NaN, or gradients
            that are all zero.
        DataError: an empty loader, or a batch on another device than the model.
        MissingImportanceError: the criterion needs what a model alone does not have.
        TraceError: the model fails on the inputs.
        NoUnitsError: nothing in the model can be removed exactly.

    Warns:
        UncalibratedWarning: a network that shows signs of training is pruned without data.
        StarvedGroupsWarning: a global ranking leaves next to nothing of some groups.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, got {model!r}; build the model first, and pass the instance")
    refuse_meta(model, "prune")
    call, *others = ModelInputs.several(example_inputs)
    for inputs in (call, *others):
        _check_devices(model, inputs)
    if loss is not None and batches is None:
        raise InvalidValueError("a loss needs batches; pass batches=, training data such as a loader")
    if reconstruct not in (True, False, "layers", "batchnorm"):
        raise InvalidValueError(f"reconstruct must be True, False, 'layers' or 'batchnorm', got {reconstruct!r}")
    schedule = Schedule(schedule) if isinstance(schedule, str) else schedule or Schedule()
    wanted = None if budget is None else Budget.of(budget)
    if schedule.steps > 1 and wanted is None:
        raise InvalidValueError(f"a schedule of {schedule.steps} steps needs a budget to go to")
    multiples = PreferredMultiple() if multiple_of is None else multiple_of
    check_multiples(multiples)
    if graph is None:
        graph = trace_units(model, rules=rules, prune_norms=prune_norms, further_calls=[call, *others])
    shares = read_limits(model, graph, list(keep) if not isinstance(keep, str | type | nn.Module) else keep, limits or {})
    calibration = None if batches is None else Calibration.read(model, batches, loss)
    candidates = _candidates(criterion, allocation, calibration, progress=progress)
    costs = measure_costs(model, call.args, call.kwargs, graph)
    dense = costs.dense_costs()
    notes = [] if calibration is not None else _notes_without_data(model, candidates[0].criterion)
    cutter = Cutter(
        dense=model,
        costs=costs,
        call=call,
        budget=wanted,
        multiple_of=multiples,
        calibration=calibration,
        reconstruct=reconstruct,
        rules=rules,
        generator=generator if generator is not None else torch_generator(np.random.default_rng(0)),
        progress=progress,
    )
    if wanted is not None and wanted.latency_ms is not None:
        with torch.no_grad(), evaluated(model):
            cutter.dense_pass = prepare(model, wanted.runtime, call.args, call.kwargs)
            cutter.dense_ms = dense["latency_ms"] = median_ms(cutter.dense_pass, device_of(model, call.args, call.kwargs))
    small, units, mask = model, graph, UnitMask.full(graph)
    history: list[Mapping[str, float]] = []
    tried: Sequence[CandidateReport] = ()
    scores: Mapping[str, Scored] = {}
    measured: dict[str, Any] = {}
    cut: Cut | None = None

    def judge(when: str) -> None:
        if metric is not None and not dry_run:
            measured[f"{getattr(metric, '__name__', 'score')} {when}"] = metric(small)

    judge("of the dense model")
    for step in range(1, schedule.steps + 1):
        last, when = step == schedule.steps, "" if schedule.steps == 1 else f" of step {step}"
        limits_now: dict[str, Any] = wanted.part(schedule.progress(step), dense).limits(dense) if wanted else {}
        target = None if wanted is None else replace(wanted, **limits_now)
        cut = cutter.best(
            candidates,
            small,
            units,
            _limits_of_rest(shares, graph, units),
            target,
            limit_ms=float(target.latency_ms) if target is not None and target.latency_ms is not None else None,
            dry=dry_run and last,
        )
        candidates = [cut.candidate]  # later steps go the same way
        if step == 1:
            tried, scores = cutter.tried, cutter.scores
        measured |= cut.measured
        mask = inside(mask, cut.mask)
        history.append(costs.costs(mask.counts()))
        units, changed = narrow(graph, mask), cut.model is not small
        small = cut.model
        if changed:
            judge(f"after the cut{when}")
        if finetune is not None and not dry_run:
            trained = finetune(small, step)
            small = trained if isinstance(trained, nn.Module) else small
            judge(f"after fine-tuning{when}")
    assert cut is not None
    report = _report(cutter, dense, cut, shares, small, mask, history, measured, tried, notes)
    return Pruned(model if dry_run else small, mask, graph, report, scores)


def _candidates(
    criterion: Criterion | str | Mapping[str, Criterion] | Sequence[Criterion | str] | None,
    allocation: Allocation | str | Sequence[Allocation | str] | None,
    calibration: Calibration | None,
    *,
    progress: bool,
) -> list[Candidate]:
    """Return the cuts to try: what was named, each criterion with each allocation, or the default ones."""
    made: dict[str, Criterion] = {}

    def criterion_of(given: Criterion | str | None) -> Criterion:
        if calibration is None:
            return as_criterion(given)
        if isinstance(given, str):  # scored once, with whatever allocation
            made.setdefault(given, _with_calibration(given, calibration, progress))
            return made[given]
        return _with_calibration(given, calibration, progress)

    if criterion is None and allocation is None and calibration is not None:
        return [Candidate(criterion_of(first), _allocation(second, criterion_of(first))) for first, second in CANDIDATES]
    named: list[Any] = list(criterion.values()) if isinstance(criterion, Mapping) else _listed(criterion)
    ways: list[Any] = _listed(allocation)
    if not named or not ways:
        raise InvalidValueError("criterion and allocation need at least one candidate each; None takes the default")
    criteria = [criterion_of(each) for each in named]
    return [Candidate(each, _allocation("by_cost" if way is None else way, each)) for each in criteria for way in ways]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _with_calibration(criterion: Criterion | str | None, calibration: Calibration, progress: bool) -> Criterion:
    return with_data(criterion, calibration.fit, calibration.gradient_loss, progress=progress)


def _allocation(allocation: Allocation | str, criterion: Criterion) -> Allocation:
    found = allocations.find(allocation) if isinstance(allocation, str) else allocation
    if not callable(found):
        raise InvalidValueError(
            f"allocation must be a name or a function of a Problem, such as sparsekit.allocation.by_cost, got {allocation!r}"
        )
    # Divided by cost, such scores would leave next to nothing of expensive layers.
    if found is global_ranking and is_comparable(criterion):
        return partial(global_ranking, scale="none")
    made: Allocation = found
    return made


def _limits_of_rest(limits: Limits, graph: UnitGraph, rest: UnitGraph) -> Limits:
    """Limits as shares of what is left: (0.25, 0.75) of 8 units are (0.5, 1.0) of the 4 that are left."""
    found = {}
    for name, (least, largest) in limits.items():
        times = graph.groups[name].size / rest.groups[name].size
        found[name] = min(1.0, least * times), min(1.0, largest * times)
    return found


def _notes_without_data(model: nn.Module, criterion: Criterion) -> list[str]:
    """Say what pruning without batches leaves undone, and warn where that costs a trained network its accuracy."""
    notes = []
    norms = sum(
        isinstance(module, NormBase) and not isinstance(module, InstanceNorm) and module.running_mean is not None
        for module in model.modules()
    )
    if norms:
        notes.append(
            f"The statistics of {norms} batch norms are those of the dense model and no longer fit; pass batches=, or call"
            " recalibrate_batchnorm before the model is used."
        )
    if isinstance(criterion, DataDriven) or (signs := signs_of_training(model)) is None:
        return notes
    notes.append(
        f"{type(model).__name__} was trained ({signs}), but it was pruned without data: trained networks are usually at chance"
        " afterwards. Pass batches= (a dozen batches, labels not needed) to choose units by their effect and to reconstruct"
        " what the cut damages."
    )
    warnings.warn(notes[-1], UncalibratedWarning, stacklevel=3)
    return notes


def _report(
    cutter: Cutter,
    dense: Mapping[str, float],
    cut: Cut,
    limits: Limits,
    small: nn.Module,
    mask: UnitMask,
    history: list[Mapping[str, float]],
    measured: Mapping[str, Any],
    tried: Sequence[CandidateReport],
    notes: list[str],
) -> PruneReport:
    costs, budget, graph, counts = cutter.costs, cutter.budget, cutter.costs.graph, mask.counts()
    # Preferred multiples give way where a budget asks for less.
    free = free_counts(graph, limits, 1 if isinstance(cutter.multiple_of, PreferredMultiple) else cutter.multiple_of)
    absolute = budget.limits(dense) if budget is not None else {}
    denormals = count_denormals(small)
    if budget is not None and all(dense[name] <= limit for name, limit in absolute.items()):
        notes.append(f"The dense model is within the budget already ({budget}), so nothing was cut.")
        warnings.warn(notes[-1], stacklevel=3)
    if denormals:
        notes.append(
            f"{denormals:,} weights are denormal numbers, smaller than any normal one, with which many processors compute"
            " several times as slowly; torch.set_flush_denormal(True) takes them for 0"
        )
    return PruneReport(
        model=type(cutter.dense).__name__,
        criterion=criterion_name(cut.candidate.criterion),
        allocation=name_of(cut.candidate.allocation),
        requested={name: getattr(budget, name) for name in absolute},
        limits=absolute,
        before=dense,
        after=costs.costs(counts) | ({} if cut.latency_ms is None else {"latency_ms": cut.latency_ms}),
        minimum=costs.costs(least_counts(free)),
        groups=describe(costs, counts),
        unprunable=[{"module": item.module, "size": item.size, "reason": item.reason} for item in graph.unprunable],
        steps=history,
        measured=measured,
        candidates=tried if len(tried) > 1 else (),
        notes=notes,
        denormals=denormals,
    )


def _check_devices(model: nn.Module, call: ModelInputs) -> None:
    own = {entry.device.type for entry in model.parameters()}
    given = {tensor.device.type for tensor in find_tensors([*call.args, *call.kwargs.values()])}
    if len(own) == 1 and given - own:
        raise InvalidValueError(
            f"the model is on {own.pop()}, the example inputs are on {', '.join(sorted(given))};"
            " move one of them with .to(device)"
        )
