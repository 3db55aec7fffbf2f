"""prune(): a model and a budget in, a smaller model and a report out."""

from __future__ import annotations

import re
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
from sparsekit.allocation.problem import Allocation
from sparsekit.allocation.schedule import Schedule
from sparsekit.criteria.base import Criterion, is_comparable
from sparsekit.criteria.batches import Batch, DataDriven, Loss
from sparsekit.criteria.by_name import as_criterion, with_data
from sparsekit.criteria.orders import Scored
from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.graph.edit import narrow
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule
from sparsekit.measure.budget import Budget
from sparsekit.measure.clock import device_of, evaluated, measured, median_ms
from sparsekit.measure.cost import measure_costs
from sparsekit.measure.paired import prepare
from sparsekit.pruning.calibration import Calibration
from sparsekit.pruning.cutting import Candidate, Cut, Cutter, inside
from sparsekit.pruning.reconstruction import Reconstruct
from sparsekit.pruning.report import CandidateReport, PruneReport, describe
from sparsekit.pruning.result import Pruned
from sparsekit.pruning.selection import Selector, read_limits
from sparsekit.pruning.trained import UncalibratedWarning, signs_of_training
from sparsekit.registry import calling
from sparsekit.rng import torch_generator
from sparsekit.tracing.blocks import refuse_meta
from sparsekit.tracing.inputs import ModelInputs, find_tensors
from sparsekit.tracing.trace import trace_units

AfterCut: TypeAlias = Callable[[nn.Module, int], object]
"""Called with the narrow model and the number of the step, from 1; trains it in place, or returns the model to continue
with."""
ExampleInputs: TypeAlias = (
    tuple[Any, ...] | Mapping[str, Any] | Tensor | ModelInputs | list[tuple[Any, ...] | Mapping[str, Any]]
)
"""Inputs of one call, positional or by name, or a list of several calls."""
Criteria: TypeAlias = Criterion | str | Mapping[str, Criterion] | Sequence[Criterion | str]
"""A criterion or its name, or several as candidates."""
Allocations: TypeAlias = Allocation | str | Sequence[Allocation | str]
"""An allocation or its name, or several as candidates."""

CANDIDATES = (
    ("fisher", "by_cost"),
    ("position_fisher", "by_loss"),
    ("wanda", "by_cost"),
    ("wanda", "uniform"),
)
"""Criterion and allocation of the cuts that are tried by default where there are batches; the first where there is one."""


def prune(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    budget: Budget | Mapping[str, str | float] | str | None = None,
    batches: Iterable[Batch] | None = None,
    loss: Loss | None = None,
    reconstruct: Reconstruct = True,
    metric: Callable[[nn.Module], float] | None = None,
    criterion: Criteria | None = None,
    allocation: Allocations | None = None,
    exclude: Iterable[Selector] = (),
    limits: Mapping[Selector, tuple[float, float]] | None = None,
    multiple_of: int | Mapping[str, int] | PreferredMultiple | None = None,
    schedule: Schedule | str | None = None,
    finetune: AfterCut | None = None,
    graph: UnitGraph | None = None,
    prune_hidden_size: bool = False,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    generator: torch.Generator | None = None,
    dry_run: bool = False,
    progress: bool = False,
) -> Pruned:
    """Prune a trained model to a budget, and return a smaller, plain module.

    Only the model, its inputs and the budget are required, but pass `batches` for every trained
    network. The right criterion differs from network to network, and a wrong one costs most of the
    accuracy. With batches, `prune` makes a few candidate cuts, reconstructs them, and keeps the one
    with the lowest loss on batches that it has set aside. Without them, units are ranked by the
    magnitude of their weights, and nothing is reconstructed.

    ```python
    import torch
    from torch import nn

    import sparsekit as sk

    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
    images, labels = torch.randn(64, 3, 8, 8), torch.randint(10, (64,))
    batches = list(zip(images.split(16), labels.split(16)))

    pruned = sk.prune(
        model, (images[:1],), budget="flops=50%", batches=batches, loss=nn.functional.cross_entropy
    )
    print(pruned.report)
    pruned.model(images)
    pruned.save("small.safetensors")
    ```

    Args:
        model: The dense model. It is not changed.
        example_inputs: Inputs of one call: a tuple of positional inputs, a mapping of keyword inputs,
            or one tensor. FLOPs and latency are measured on them. Pass a list of such tuples and
            mappings if the model has branches: each call is traced and verified, and costs are those
            of the first.
        budget: Upper limits for the small model, such as `Budget(flops="50%")`,
            `{"params": 2e6, "latency_ms": 4}` or `"flops=50%,params=2e6"`. A percentage is a share of
            the dense model. None for allocations that need no budget, such as `by_ratio`.
        batches: Training data: a loader or a list of tensors, of tuples (input, …, target), or of
            mappings of keyword inputs. They are read once, at most 48 batches or 1 GiB. The last fifth
            is set aside to compare candidates; the rest scores units and reconstructs. Without targets
            and without `loss`, the cut model is compared with the outputs of the dense model.
        loss: `loss(outputs, target)`, the mean over the examples of a batch. None takes
            `outputs.loss`, as models of transformers return it.
        reconstruct: What is corrected after every cut, with batches: True refits the layers that
            follow pruned units, and recalibrates batch norms; "layers" or "batchnorm" does one of the
            two; False does neither.
        metric: Scores a model, such as accuracy on validation data; called in eval mode and without
            gradients. The report shows the scores of the dense model, after each cut and after each
            call of `finetune`.
        criterion: The importance of a unit: an object or name, or several of them to compare, such
            as the `scores` of an earlier result, which are not computed again. A criterion that needs
            data and has none gets `batches` and `loss`. None compares the default candidates; without
            batches, it takes weight magnitudes.
        allocation: How many units stay in each group: a function or name ("by_cost", "by_loss",
            "global", "uniform"), or several of them to compare. None takes "by_cost", or those of the
            default candidates.
        exclude: Layers that keep all their units, by name, regular expression, type or module; or kinds of
            unit, such as "channel".
        limits: Layers, named in the same way → (smallest, largest) share of their units that stays,
            each in [0, 1].
        multiple_of: Number of which the width of each layer is a multiple, or kind of unit → number.
            A layer that loses no unit keeps its width. None prefers multiples of 8, for which runtimes
            have fast kernels. Layers narrower than 64 take multiples of 4. If more than 2 % of the
            budget would be left unused, all layers take 4 or 1. Pass 1 to allow any width.
        schedule: Steps in which the budget is reached, such as `Schedule("cubic", 4)`. Units are scored
            again before each step.
        finetune: Called after every step with the narrow model and the number of the step, from 1. It
            trains the model in place, or returns the model to continue with.
        graph: Units from an earlier `trace_units`. None traces the model.
        prune_hidden_size: Also prune units that a layer norm averages over, as in `trace_units`.
        rules: Rules for layer types of your own, as in `trace_units`.
        generator: Source of randomness for criteria that draw. None always draws the same numbers.
        dry_run: Decide and report only. The `model` of the result is the dense model, and `finetune` is
            not called. To cut a model that fits into memory only once, name a criterion, then call
            `compact(model, result.graph, result.mask, inplace=True)`.
        progress: Draw progress bars on stderr.

    Returns:
        The small model, the mask, the units, the report, and the scores of all units.

    Raises:
        BudgetError: The budget cannot be met; the message names the minimum and the groups that
            prevent it. Or the allocation ignores the budget and exceeds it.
        UnknownNameError: A metric, criterion, allocation, schedule or layer does not exist.
        UnsupportedModelError: `model` is not a module, or is on the meta device, without values.
        InvalidValueError: Options contradict each other, inputs are on another device, scores hold
            NaN, or all gradients are zero.
        DataError: The loader is empty, or a batch is on another device than the model.
        MissingImportanceError: The criterion needs data or an importance that it did not get.
        TraceError: The model fails on the inputs.
        NoUnitsError: Nothing in the model can be removed exactly.

    Warns:
        UncalibratedWarning: A network that shows signs of training is pruned without data.
        StarvedGroupsWarning: A global ranking leaves next to nothing of some groups.
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
        graph = trace_units(model, example_inputs, rules=rules, prune_hidden_size=prune_hidden_size)
    shares = read_limits(
        model, graph, list(exclude) if not isinstance(exclude, str | type | nn.Module) else exclude, limits or {}
    )
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
    found: dict[str, Any] = {}
    cut: Cut | None = None

    def judge(when: str) -> None:
        if metric is not None and not dry_run:
            with measured(small), calling("metric"):
                found[f"{_identifier(metric)}_{when}"] = metric(small)

    judge("dense")
    for step in range(1, schedule.steps + 1):
        last, when = step == schedule.steps, "" if schedule.steps == 1 else f"_step{step}"
        limits_now: dict[str, Any] = wanted.part(schedule.progress(step), dense).limits(dense) if wanted else {}
        target = None if wanted is None else replace(wanted, **limits_now)
        cut = cutter.best(
            candidates,
            small,
            units,
            _limits_of_rest(shares, graph, units),
            target,
            dry=dry_run and last,
        )
        candidates = [cut.candidate]  # later steps go the same way
        if step == 1:
            tried, scores = cutter.tried, cutter.scores
        found |= cut.measured
        mask = inside(mask, cut.mask)
        history.append(costs.costs(mask.counts()))
        units, changed = narrow(graph, mask), cut.model is not small
        small = cut.model
        if changed:
            judge(f"pruned{when}")
        if finetune is not None and not dry_run:
            with calling("finetune"):
                trained = finetune(small, step)
            small = trained if isinstance(trained, nn.Module) else small
            judge(f"finetuned{when}")
    assert cut is not None
    report = _report(cutter, dense, cut, shares, mask, history, found, tried, notes)
    return Pruned(model if dry_run else small, mask, graph, report, scores, call)


def _candidates(
    criterion: Criteria | None, allocation: Allocations | None, calibration: Calibration | None, *, progress: bool
) -> list[Candidate]:
    """Return the cuts to try: what was named, each criterion with each allocation, or the default ones."""

    def listed(value: Any) -> list[Any]:
        return list(value) if isinstance(value, list | tuple) else [value]

    def criterion_of(given: Criterion | str | None) -> Criterion:
        if calibration is None:
            return as_criterion(given)
        return with_data(given, calibration.fit, calibration.gradient_loss, progress=progress)

    if criterion is None and allocation is None and calibration is not None:
        made = {name: criterion_of(name) for name, _ in CANDIDATES}  # scored once, with whatever allocation
        return [Candidate(made[name], _allocation(way, made[name])) for name, way in CANDIDATES]
    named, ways = listed(list(criterion.values()) if isinstance(criterion, Mapping) else criterion), listed(allocation)
    if not named or not ways:
        raise InvalidValueError("criterion and allocation need at least one candidate each; None takes the default")
    criteria = [criterion_of(each) for each in named]
    return [Candidate(each, _allocation("by_cost" if way is None else way, each)) for each in criteria for way in ways]


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


def _identifier(metric: Callable[[nn.Module], float]) -> str:
    name = re.sub(r"\W+", "_", getattr(metric, "__name__", "")).strip("_")
    return name if name not in ("", "lambda") else "score"


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
    mask: UnitMask,
    history: list[Mapping[str, float]],
    found: Mapping[str, Any],
    tried: Sequence[CandidateReport],
    notes: list[str],
) -> PruneReport:
    costs, budget, graph, counts = cutter.costs, cutter.budget, cutter.costs.graph, mask.counts()
    # Preferred multiples give way where a budget asks for less.
    free = free_counts(graph, limits, 1 if isinstance(cutter.multiple_of, PreferredMultiple) else cutter.multiple_of)
    absolute = budget.limits(dense) if budget is not None else {}
    if budget is not None and all(dense[name] <= limit for name, limit in absolute.items()):
        notes.append(f"The dense model is within the budget already ({budget}), so nothing was cut.")
        warnings.warn(notes[-1], stacklevel=3)
    return PruneReport(
        model=type(cutter.dense).__name__,
        criterion=cut.candidate.names[0],
        allocation=cut.candidate.names[1],
        requested={name: getattr(budget, name) for name in absolute},
        limits=absolute,
        before=dense,
        after=costs.costs(counts) | ({} if cut.latency_ms is None else {"latency_ms": cut.latency_ms}),
        minimum=costs.costs(least_counts(free)),
        groups=describe(costs, counts),
        unprunable=[{"module": item.module, "size": item.size, "reason": item.reason} for item in graph.unprunable],
        steps=history,
        measured=found,
        candidates=tried if len(tried) > 1 else (),
        notes=notes,
    )


def _check_devices(model: nn.Module, call: ModelInputs) -> None:
    own = {entry.device.type for entry in model.parameters()}
    given = {tensor.device.type for tensor in find_tensors([*call.args, *call.kwargs.values()])}
    if len(own) == 1 and given - own:
        raise InvalidValueError(
            f"the model is on {own.pop()}, the example inputs are on {', '.join(sorted(given))};"
            " move one of them with .to(device)"
        )
