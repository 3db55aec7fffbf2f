"""prune(): a model and a budget in, a smaller model and a report out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from sparsekit.allocation import PreferredMultiple, Schedule, by_ratio
from sparsekit.allocation.limits import Multiples, check_multiples, free_counts, least_counts, step_of
from sparsekit.criteria.batches import Batches, Loss
from sparsekit.errors import InvalidValueError, level_of_user
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.graph.edit import compact_graph, within
from sparsekit.layers import LayerRule
from sparsekit.measure import Budget, cost_model
from sparsekit.measure.timing import device_of, median_ms, prepare
from sparsekit.progress import working
from sparsekit.pruning.calibration import Calibration
from sparsekit.pruning.cutting import LEFT_OUT, Decision, Stage, notes_on_time
from sparsekit.pruning.depth import try_depths, whole_mask
from sparsekit.pruning.finetune import Metric, score_of
from sparsekit.pruning.reconstruction import Reconstruct
from sparsekit.pruning.report import PruneReport, describe, notes_on
from sparsekit.pruning.result import Pruned, PrunePlan
from sparsekit.pruning.selection import Ratios, Selector, free_blocks, read_limits, read_ratios
from sparsekit.pruning.settings import (
    Allocations,
    Criteria,
    ExampleInputs,
    Settings,
    check_model,
    data_notes,
    make_candidates,
    read_depth,
    refuse_contradictions,
    refuse_foreign,
    refuse_unreachable,
)
from sparsekit.registry import calling
from sparsekit.rng import torch_generator
from sparsekit.tracing.modes import evaluated, measured
from sparsekit.tracing.removable import with_blocks
from sparsekit.tracing.runs import RunsOnExamples
from sparsekit.tracing.trace import trace_units

AfterCut: TypeAlias = Callable[[nn.Module, int], object]
"""Called with the narrow model and the number of the step, from 1; trains it in place, or returns the model to continue
with."""


def prune(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    budget: Budget | Mapping[str, str | float] | str | None = None,
    ratio: Ratios | None = None,
    batches: Batches | None = None,
    loss: Loss | None = None,
    reconstruct: Reconstruct = True,
    metric: Metric | None = None,
    choose_by: Literal["loss", "metric"] = "loss",
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
    depth: int | tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Pruned:
    """Prune a trained model to a budget, and return a smaller, plain module.

    Only the model, its inputs and the budget are required, but pass `batches` for every trained network. The right criterion
    differs from network to network, and a wrong one costs most of the accuracy. With batches, `prune` makes a few candidate
    cuts, reconstructs them, and keeps the one with the lowest loss on batches that it has set aside. Without them, units are
    ranked by the magnitude of their weights, and nothing is reconstructed.

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
        example_inputs: Inputs of one call: a tuple of positional inputs, a mapping of keyword inputs, or one tensor. FLOPs and
            latency are measured on them. Pass a list of such tuples and mappings if the model has branches: each call is traced
            and verified, and the first one sets the costs.
        budget: Upper limits for the small model, such as `Budget(flops="50%")`, `{"params": 2e6, "latency_ms": 4}` or
            `"flops=50%,params=2e6"`. A percentage is a share of the dense model. None with `ratio`, or with an allocation of
            your own that needs no budget.
        ratio: Share of the units that each layer keeps, in (0, 1], in place of a budget: 0.5, or layer, as in `exclude`, →
            share. Of several that select a layer, the name of its group or else the first one counts.
        batches: Training data: a loader or a list of tensors, of tuples (input, …, target), or of mappings of keyword inputs.
            They are read once, at most 48 batches or 1 GiB. A loader without `shuffle`, and a list of more batches, are read in
            an order drawn with a fixed seed. The last fifth of the examples, and at least 64 (or half, if there are fewer than
            128), is set aside to compare candidates; the rest scores units and reconstructs. Without targets and without
            `loss`, the pruned model is compared with the outputs of the dense model.
        loss: `loss(outputs, target)`, the mean over the examples of a batch. None takes `outputs.loss`, as models of
            transformers return it.
        reconstruct: Correction after every cut, with batches: True refits the layers that follow pruned units, and recalibrates
            batch norms; "layers" or "batchnorm" does one of the two; False does neither. A correction that raises the loss on
            the examples that were set aside is undone.
        metric: Scores a model, such as accuracy on validation data; called in eval mode and without gradients. The report shows
            the scores of the dense model, after each cut and after each call of `finetune`. A number, larger is better.
        choose_by: What chooses among candidates: the "loss" on the examples that were set aside, or the "metric", which is then
            called for each of them.
        criterion: How to score units: an object or name, or several of them to compare, such as the `scores` of an earlier
            result, which are not computed again. A criterion that needs data and has none gets `batches` and `loss`. None
            compares the default candidates; without batches, it takes weight magnitudes. Several criteria or allocations need
            batches.
        allocation: How many units each group keeps: a function or name ("by_cost", "by_loss", "global", "uniform"), or several
            of them to compare. None takes "by_cost", or the allocations of the default candidates.
        exclude: Layers that keep all their units, by name, regular expression, type or module; or kinds of unit, such as
            "channel".
        limits: Layers, named in the same way → (smallest, largest) share of their units that stays, each in [0, 1]. Ranks of
            LoRA adapters stay unless `limits` or `ratio` names them, as in `{"rank": (0, 1)}`.
        multiple_of: The width of each pruned layer is a multiple of this number; or kind of unit → number. None prefers
            multiples of 16, for which runtimes have fast kernels, in layers of 16 channels or more. If more than 2 % of the
            budget would be left unused, all layers take multiples of 8 or 4, or any width. Pass 1 to allow any width.
        schedule: Steps towards the budget, such as `Schedule("cubic", 4)`. Units are scored again before each step.
        finetune: Called after every step with the narrow model and the number of the step, from 1. It trains the model in
            place, or returns the model to continue with, of the same shapes.
        graph: Units from an earlier `trace_units`. None traces the model.
        prune_hidden_size: Also prune units that a layer norm averages over, as in `trace_units`.
        rules: Rules for layer types of your own, as in `trace_units`.
        generator: Source of randomness for criteria that draw. None always draws the same numbers.
        depth: How many residual blocks, such as those of a ResNet or the layers of a language model, are removed whole before
            units: a number, or the smallest and the largest number to try; needs `batches`. Blocks are ordered by the loss on
            the batches. Units are then removed until the budget is met. Of several numbers of blocks, the one with the lowest
            final loss on the held-out examples is chosen. None removes no block.
        progress: Whether to draw progress on stderr. None draws if that is a terminal.

    Returns:
        The small model, the mask, the unit graph, the report, and the scores of all units.

    Raises:
        BudgetError: The budget cannot be met; the message names the minimum and the groups that prevent it. Or the allocation
            ignores the budget and exceeds it.
        UnknownNameError: A metric, criterion, allocation, schedule or layer does not exist.
        UnsupportedModelError: `model` is not a module, is on the meta device, without values, or was made in `inference_mode`.
        InvalidValueError: Options contradict each other, inputs are on another device, scores hold NaN, or all gradients are
            zero.
        DataError: The loader is empty, or a batch is on another device than the model.
        MissingImportanceError: The criterion needs data or an importance that it did not get.
        TraceError: The model fails on the inputs.
        NoUnitsError: Nothing in the model can be removed exactly.
        ForeignMaskError: Scores of other weights.

    Warns:
        UncalibratedWarning: A network that shows signs of training is pruned without data.
        StarvedGroupsWarning: A global ranking leaves next to nothing of some groups.
    """
    for name, given in (("metric", metric), ("finetune", finetune)):
        if given is not None and not callable(given):
            raise InvalidValueError(f"{name} must be a function that is called with a model, got {given!r}")
    if choose_by not in ("loss", "metric") or (choose_by == "metric" and metric is None):
        raise InvalidValueError(f"choose_by must be 'loss', or 'metric' with metric=, got {choose_by!r}")
    score = None if metric is None else partial(_scored, metric)
    settings = _read(
        model, example_inputs, budget=budget, ratio=ratio, batches=batches, loss=loss, reconstruct=reconstruct,
        criterion=criterion, allocation=allocation, exclude=exclude, limits=limits, multiple_of=multiple_of, schedule=schedule,
        graph=graph, prune_hidden_size=prune_hidden_size, rules=rules, generator=generator, depth=depth,
        progress=progress,
    )  # fmt: skip
    with torch.inference_mode(mode=False):
        chosen_by = replace(settings, score=score if choose_by == "metric" else None)
        return _run(chosen_by, "" if metric is None else _identifier(metric), score, finetune)


def plan(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    budget: Budget | Mapping[str, str | float] | str | None = None,
    ratio: Ratios | None = None,
    batches: Batches | None = None,
    loss: Loss | None = None,
    reconstruct: Reconstruct = True,
    criterion: Criteria | None = None,
    allocation: Allocations | None = None,
    exclude: Iterable[Selector] = (),
    limits: Mapping[Selector, tuple[float, float]] | None = None,
    multiple_of: int | Mapping[str, int] | PreferredMultiple | None = None,
    graph: UnitGraph | None = None,
    prune_hidden_size: bool = False,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    generator: torch.Generator | None = None,
    depth: int | tuple[int, int] | None = None,
    progress: bool | None = None,
) -> PrunePlan:
    """Decide which units to keep, as `prune` does, without cutting the model.

    Use it to look at the widths first, or if the model fits into memory only once. In that case, name a criterion, so that no
    candidate is built, and cut the model in place.

    ```python
    plan = sk.plan(model, (x,), budget="flops=50%", criterion="magnitude")
    print(plan)
    small = sk.compact(model, plan.graph, plan.mask, inplace=True)
    ```

    Args and errors are those of `prune`.

    Returns:
        The plan, with mask, unit graph, report and scores.
    """
    settings = _read(
        model, example_inputs, budget=budget, ratio=ratio, batches=batches, loss=loss, reconstruct=reconstruct,
        criterion=criterion, allocation=allocation, exclude=exclude, limits=limits, multiple_of=multiple_of, schedule=None,
        graph=graph, prune_hidden_size=prune_hidden_size, rules=rules, generator=generator, depth=depth,
        progress=progress,
    )  # fmt: skip
    with torch.inference_mode(mode=False):
        known = try_depths(settings)
        own = settings if known is None else known.settings
        if known is None:
            decision = Stage(own, own.dense, own.graph, own.budget, UnitMask.full(own.graph)).decide(own.candidates)
        else:
            decision = known.decision
        mask = decision.cut.mask
        report = _report(settings, own, decision, mask, [own.costs.costs(mask.counts())], {})
        return PrunePlan(
            mask=whole_mask(settings, mask, own.removed), graph=settings.graph, report=report, scores=decision.scores
        )


def _read(
    model: nn.Module, example_inputs: ExampleInputs, *, budget: Budget | Mapping[str, str | float] | str | None,
    ratio: Ratios | None, batches: Batches | None, loss: Loss | None, reconstruct: Reconstruct,
    criterion: Criteria | None, allocation: Allocations | None, exclude: Iterable[Selector],
    limits: Mapping[Selector, tuple[float, float]] | None, multiple_of: int | Mapping[str, int] | PreferredMultiple | None,
    schedule: Schedule | str | None, graph: UnitGraph | None, prune_hidden_size: bool,
    rules: Mapping[type[nn.Module], LayerRule] | None, generator: torch.Generator | None,
    depth: int | tuple[int, int] | None, progress: bool | None,
) -> Settings:  # fmt: skip
    """Check the arguments of `prune`, trace the model and read the batches."""
    call = check_model(model, example_inputs)
    if loss is not None and batches is None:
        raise InvalidValueError("a loss needs batches; pass batches=, training data such as a loader")
    if reconstruct not in (True, False, "layers", "batchnorm"):
        raise InvalidValueError(f"reconstruct must be True, False, 'layers' or 'batchnorm', got {reconstruct!r}")
    schedule = Schedule(schedule) if isinstance(schedule, str) else schedule or Schedule()
    if not isinstance(schedule, Schedule):
        raise InvalidValueError(f"schedule must be a name or sparsekit.allocation.Schedule(name, steps), got {schedule!r}")
    if limits is not None and not isinstance(limits, Mapping):
        raise InvalidValueError(
            f"limits must map layers to (smallest, largest) share, as in {{'conv1': (0.5, 1.0)}}, got {limits!r}"
        )
    wanted = None if budget is None else Budget.of(budget)
    refuse_contradictions(wanted, ratio, allocation)
    if schedule.steps > 1 and wanted is None:
        raise InvalidValueError(f"a schedule of {schedule.steps} steps needs a budget to go to")
    preferred = PreferredMultiple() if ratio is None else 1
    multiples = preferred if multiple_of is None else multiple_of
    check_multiples(multiples)
    with torch.inference_mode(mode=False):  # inference mode forbids the measurements below
        if graph is None:
            with working("Tracing and verifying units", show=progress):
                graph = trace_units(model, example_inputs, rules=rules, prune_hidden_size=prune_hidden_size)
        numbers = read_depth(depth, batches)
        if numbers[1]:
            graph = with_blocks(model, example_inputs, graph)
        blocks = free_blocks(model, graph, exclude, limits or {}) if numbers[1] else ()
        if numbers[0] > len(blocks):
            raise InvalidValueError(
                f"depth={depth!r} removes {numbers[0]} blocks, and {len(blocks)} can be removed; `sparsekit units` lists them"
            )
        shares = read_limits(model, graph, exclude, limits or {}, ratio)
        if ratio is not None:
            allocation = partial(by_ratio, ratios=read_ratios(model, graph, ratio))
        costs = cost_model(model, call, graph)
        dense_costs, dense_pass = costs.dense_costs(), None
        refuse_unreachable(graph, costs, wanted, shares, multiples)
        calibration = None if batches is None else Calibration.read(model, batches, loss)
        candidates = make_candidates(criterion, allocation, calibration, progress=progress)
        refuse_foreign(model, candidates)
        if wanted is not None and wanted.latency_ms is not None:
            with torch.no_grad(), evaluated(model):
                dense_pass = prepare(model, wanted.runtime, call.args, call.kwargs)
                dense_costs["latency_ms"] = median_ms(dense_pass, device_of(model, call.args, call.kwargs))
        notes = [*data_notes(model, candidates, calibration), *([] if costs.note is None else [costs.note])]
        return Settings(
            dense=model, call=call, graph=graph, costs=costs, dense_costs=dense_costs, limits=shares, budget=wanted,
            schedule=schedule, multiple_of=multiples, candidates=candidates, calibration=calibration, reconstruct=reconstruct,
            rules=rules, generator=generator if generator is not None else torch_generator(np.random.default_rng(0)),
            progress=progress, dense_pass=dense_pass, depth=numbers, blocks=blocks, notes=notes,
        )  # fmt: skip


def _scored(metric: Metric, model: nn.Module) -> float:
    with measured(model), calling("metric"):
        found = metric(model)
    return score_of(found, "metric")


def _run(settings: Settings, named: str, metric: Callable[[nn.Module], float] | None, finetune: AfterCut | None) -> Pruned:
    """Decide and execute each step of the schedule. The best candidate of the first step is used in all steps."""
    known = try_depths(settings)
    own, small = (settings, settings.dense) if known is None else (known.settings, known.start)
    units, mask = own.graph, UnitMask.full(own.graph)
    candidates = settings.candidates if known is None else (known.decision.candidate,)
    first: Decision | None = None
    history: list[Mapping[str, float]] = []
    found: dict[str, Any] = {}

    def score(when: str) -> None:
        if metric is not None:
            found[f"{named}_{when}"] = metric(small)

    steps = settings.schedule.steps
    if metric is not None:
        found[f"{named}_dense"] = metric(settings.dense)
    for step in range(1, steps + 1):
        when = "" if steps == 1 else f"_step{step}"
        if known is not None and steps == 1:
            decision, small, more = known.decision, known.small, known.measured
        else:
            stage = Stage(own, small, units, own.target(step), mask)
            decision = stage.decide(candidates)
            small, more = stage.execute(decision.cut)
            del stage  # frees the wider model
        first, candidates = first or (decision if known is None else known.decision), (decision.candidate,)
        mask = within(mask, decision.cut.mask)
        history.append(own.costs.costs(mask.counts()))
        found |= more
        units = compact_graph(own.graph, mask)
        score(f"pruned{when}")
        if finetune is not None:
            small = _finetuned(finetune, small, step)
            score(f"finetuned{when}")
    assert first is not None
    RunsOnExamples(settings.call)(small, settings.dense)
    report = _report(settings, own, first._replace(cut=decision.cut), mask, history, found)
    whole = whole_mask(settings, mask, own.removed)
    return Pruned(mask=whole, graph=settings.graph, report=report, scores=first.scores, model=small, inputs=settings.call)


def _finetuned(finetune: AfterCut, small: nn.Module, step: int) -> nn.Module:
    """Call `finetune`, and return the trained model. Raises InvalidValueError if its parameters have other names or shapes."""
    shapes = {name: value.shape for name, value in small.named_parameters()}
    with calling("finetune"):
        trained = finetune(small, step)
    trained = trained if isinstance(trained, nn.Module) else small
    own = {name: value.shape for name, value in trained.named_parameters()}
    if own != shapes:
        differing = sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name))
        raise InvalidValueError(
            f"finetune must return the narrow model that it was given, got a {type(trained).__name__} that differs in"
            f" {', '.join(differing[:3])}; train the model in place and return None, or take a wrapper off before returning"
        )
    return trained


def _identifier(metric: Metric) -> str:
    name = re.sub(r"\W+", "_", getattr(metric, "__name__", "")).strip("_")
    return name if name not in ("", "lambda") else "score"


def _multiple(graph: UnitGraph, counts: Mapping[str, int], given: Multiples) -> int | None:
    """Return the divisor of the widths of wide layers: the given one, or the preferred one that was used; None by kind."""
    if not isinstance(given, PreferredMultiple):
        return given if isinstance(given, int) else None
    cut = [group for group in graph.groups.values() if counts[group.name] not in (0, group.size)]
    for step in given.steps:
        steps = {group.name: step_of(group, replace(given, step=step)) for group in cut}
        if max(steps.values(), default=1) > 1 and all(counts[name] % own == 0 for name, own in steps.items()):
            return step
    return 1


def _report(
    settings: Settings,
    own: Settings,
    decision: Decision,
    mask: UnitMask,
    history: list[Mapping[str, float]],
    found: Mapping[str, Any],
) -> PruneReport:
    """Report a cut of the dense model; `own` are the settings without the removed blocks, and `mask` has their units."""
    budget, graph, counts = settings.budget, settings.graph, whole_mask(settings, mask, own.removed).counts()
    # Preferred multiples are lowered if a budget needs it.
    multiples = 1 if isinstance(settings.multiple_of, PreferredMultiple) else settings.multiple_of
    absolute = budget.limits(settings.dense_costs) if budget is not None else {}
    latency_ms = decision.cut.latency_ms
    before = {**settings.dense_costs, **({} if latency_ms is None else {"latency_ms": settings.typical_ms})}
    after = own.costs.costs(mask.counts()) | ({} if latency_ms is None else {"latency_ms": latency_ms})
    left = after["flops"] / before["flops"]
    notes = [*settings.notes, *notes_on(decision.tried), *notes_on_time(decision.cut, left)]
    if LEFT_OUT in found:
        notes.append(f"Left out: {found[LEFT_OUT]}, since the loss on held-out examples is lower without.")
    if budget is not None and all(before[name] <= limit for name, limit in absolute.items()):
        notes.append(
            f"The dense model is within the budget already ({budget}), so nothing was cut.{budget.question(*absolute)}"
        )
        warnings.warn(notes[-1], stacklevel=level_of_user())
    return PruneReport(
        model=type(settings.dense).__name__,
        criterion=decision.candidate.label,
        allocation=decision.candidate.way,
        requested={name: getattr(budget, name) for name in absolute},
        limits=absolute,
        before=before,
        after=after,
        minimum=settings.costs.costs(least_counts(free_counts(graph, settings.limits, multiples))),
        groups=describe(settings.costs, counts, own.costs),
        unprunable=graph.unprunable,
        steps=history,
        measured={name: value for name, value in found.items() if name != LEFT_OUT},
        candidates=decision.tried,
        notes=notes,
        removed=own.removed,
        multiple=_multiple(graph, counts, settings.multiple_of),
    )
