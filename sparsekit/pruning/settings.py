"""Settings: the checked arguments of one call of prune(), the traced graph, and the candidates."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit.allocation import Allocation, PreferredMultiple, Problem, Schedule, by_cost, by_loss, global_ranking, uniform
from sparsekit.allocation import registry as allocations
from sparsekit.allocation.limits import Limits, Multiples, free_counts
from sparsekit.allocation.problem import name_of
from sparsekit.criteria import Criterion, Scored, as_criterion, is_comparable, with_data
from sparsekit.criteria.batches import DataDriven
from sparsekit.errors import ForeignMaskError, InvalidValueError, UnsupportedModelError, level_of_user
from sparsekit.graph.graph import UnitGraph
from sparsekit.layers import LayerRule
from sparsekit.measure import Budget, CostModel
from sparsekit.pruning.calibration import Calibration, signs_of_training
from sparsekit.pruning.reconstruction import Reconstruct, batch_norms, statistics_prior
from sparsekit.pruning.selection import Ratios
from sparsekit.surgery.files import hash_state
from sparsekit.tracing.blocks import refuse_meta
from sparsekit.tracing.inputs import ModelInputs, find_tensors, refuse_inference

ExampleInputs: TypeAlias = (
    tuple[Any, ...] | Mapping[str, Any] | Tensor | ModelInputs | list[tuple[Any, ...] | Mapping[str, Any]]
)
"""Inputs of one call, positional or by name, or a list of several calls."""
Criteria: TypeAlias = Criterion | str | Mapping[str, Criterion] | Sequence[Criterion | str]
"""A criterion or its name, or several as candidates."""
Allocations: TypeAlias = Allocation | str | Sequence[Allocation | str]
"""An allocation or its name, or several as candidates."""

CANDIDATES = (
    ("fisher", "by_cost"), ("fisher", "by_loss"), ("position_fisher", "by_loss"), ("wanda", "by_cost"), ("wanda", "uniform"),
)  # fmt: skip
"""Criterion and allocation of the cuts that are compared by default; the first where nothing can be held out."""
_WITHIN = (by_cost, by_loss, global_ranking, uniform)
"""Allocations that need a budget."""


class UncalibratedWarning(UserWarning):
    """A trained network is pruned without data."""


class Candidate(NamedTuple):
    """A criterion and an allocation. Labels are unique in a call of `prune`."""

    criterion: Criterion
    allocation: Allocation
    label: str
    way: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """The checked arguments of one call of `prune`, in common for all its cuts.

    `dense_costs` has milliseconds if the budget limits them; `dense_pass` is then a pass of the dense model in its runtime, and
    `dense_ms` are its timings in the turns of a search.
    `limits` is group name → (least, largest) share of its units that stays. `depth` is the smallest and the largest number of
    blocks to remove, `blocks` those that may be removed, and `removed` those that the model of `graph` and `costs` lacks.
    """

    dense: nn.Module
    call: ModelInputs
    graph: UnitGraph
    costs: CostModel
    dense_costs: Mapping[str, float]
    limits: Limits
    budget: Budget | None
    schedule: Schedule
    multiple_of: Multiples
    candidates: Sequence[Candidate]
    calibration: Calibration | None
    reconstruct: Reconstruct
    rules: Mapping[type[nn.Module], LayerRule] | None
    generator: torch.Generator
    progress: bool | None
    dense_pass: Callable[[], object] | None
    notes: Sequence[str]
    score: Callable[[nn.Module], float] | None = None  # chooses among candidates in place of the loss
    depth: tuple[int, int] = (0, 0)
    blocks: Sequence[str] = ()
    removed: tuple[str, ...] = ()
    dense_ms: list[float] = field(default_factory=list)

    @property
    def typical_ms(self) -> float:
        """The dense model's milliseconds: those that a share of the budget refers to, or the median of its turns so far."""
        of_dense = self.budget is not None and isinstance(self.budget.latency_ms, str)
        return self.dense_costs["latency_ms"] if of_dense or not self.dense_ms else median(self.dense_ms)

    @cached_property
    def prior(self) -> Mapping[str, Tensor]:
        """What the dense model's statistics add to those of all cut models: `statistics_prior`."""
        assert self.calibration is not None
        return statistics_prior(self.dense, self.calibration.fit)

    @cached_property
    def hash(self) -> str:
        """Hash of the dense weights, by which scores are matched to their model."""
        return hash_state(self.dense.state_dict())

    def target(self, step: int) -> Budget | None:
        return None if self.budget is None else self.budget.part(self.schedule.progress(step), self.dense_costs)

    def limits_of(self, rest: UnitGraph) -> Limits:
        """Return limits as shares of the units that are left: (0.25, 0.75) of 8 units are (0.5, 1.0) of 4."""
        found = {}
        for name, (least, largest) in self.limits.items():
            times = self.graph.groups[name].size / rest.groups[name].size
            found[name] = min(1.0, least * times), min(1.0, largest * times)
        return found


def check_model(model: nn.Module, example_inputs: ExampleInputs) -> ModelInputs:
    """Return the first call, or refuse a model or inputs that `prune` cannot take."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, got {model!r}; build the model first, and pass the instance")
    if hasattr(model, "unit_mask") and hasattr(model, "compact"):
        raise UnsupportedModelError(f"prune takes a plain model, got a {type(model).__name__}; pass masked.compact()")
    refuse_meta(model, "prune")
    refuse_inference(model)
    calls = ModelInputs.several(example_inputs)
    own = {entry.device.type for entry in model.parameters()}
    for call in calls:
        given = {tensor.device.type for tensor in find_tensors([*call.args, *call.kwargs.values()])}
        if len(own) == 1 and given - own:
            raise InvalidValueError(
                f"the model is on {own.pop()}, the example inputs are on {', '.join(sorted(given))};"
                " move one of them with .to(device)"
            )
    return calls[0]


def refuse_foreign(model: nn.Module, candidates: Sequence[Candidate]) -> None:
    """Refuse scores of other weights."""
    given = [each for each in candidates if isinstance(each.criterion, Scored) and each.criterion.of]
    own = hash_state(model.state_dict()) if given else ""
    for each in given:
        if isinstance(each.criterion, Scored) and each.criterion.of != own:
            raise ForeignMaskError(
                f"the {each.label} scores are of another {type(model).__name__}, or of this one with other weights; score it"
                " again, or rank these weights by them anyway: criterion=sk.criteria.Scored(scores.values)"
            )


def refuse_contradictions(budget: Budget | None, ratio: Ratios | None, allocation: Allocations | None) -> None:
    """Refuse a budget, a ratio and an allocation that contradict each other, or none of them."""
    if ratio is not None:
        other = "budget" if budget is not None else "allocation" if allocation is not None else None
        if other is not None:
            raise InvalidValueError(f"give ratio={ratio!r} or {other}=, not both: each says how many units stay")
    elif budget is None:
        named = [allocations.find(each) if isinstance(each, str) else each for each in _listed(allocation)]
        if all(each is None or getattr(each, "func", each) in _WITHIN for each in named):
            raise InvalidValueError(
                'prune needs a budget, as in budget="flops=50%", or ratio=0.5, the share of its units that every layer keeps'
            )


def refuse_unreachable(graph: UnitGraph, costs: CostModel, budget: Budget | None, limits: Limits, multiples: Multiples) -> None:
    """Refuse a budget below the minimum of the model. Limits of milliseconds are not checked: they need measurements."""
    # Preferred multiples give way where a budget asks for less.
    free = free_counts(graph, limits, 1 if isinstance(multiples, PreferredMultiple) else multiples)
    if budget is not None:
        absolute = budget.limits(costs.dense_costs() | {"latency_ms": 1.0})
        absolute.pop("latency_ms", None)
        Problem(graph, {}, costs, absolute, free, budget).check_reachable()


def read_depth(depth: int | tuple[int, int] | None, batches: object) -> tuple[int, int]:
    """Return the smallest and the largest number of blocks to remove."""
    pair = (0, 0) if depth is None else (depth, depth) if isinstance(depth, int) else depth
    good = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not good or not 0 <= pair[0] <= pair[1]:
        raise InvalidValueError(
            f"depth must be a number of blocks, 0 or more, or the smallest and the largest number, as in (0, 6), got {depth!r}"
        )
    if pair[1] and batches is None:
        raise InvalidValueError(f"depth={depth!r} needs batches=, on whose loss the blocks are ordered")
    return pair


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def make_candidates(
    criterion: Criteria | None, allocation: Allocations | None, calibration: Calibration | None, *, progress: bool | None
) -> list[Candidate]:
    """Return the cuts to try: each named criterion with each named allocation, or the default ones."""

    def criterion_of(given: Criterion | str | None) -> Criterion:
        if calibration is None:
            return as_criterion(given)
        return with_data(given, calibration.fit, calibration.gradient_loss, progress=progress)

    if criterion is None and allocation is None and calibration is not None:
        made = {name: criterion_of(name) for name, _ in CANDIDATES}  # scored once, with whatever allocation
        pairs = [(made[name], way) for name, way in CANDIDATES]
    else:
        named, ways = _listed(list(criterion.values()) if isinstance(criterion, Mapping) else criterion), _listed(allocation)
        if not named or not ways:
            raise InvalidValueError("criterion and allocation need at least one candidate each; None takes the default")
        criteria = [criterion_of(each) for each in named]
        # Scores of an earlier call keep the allocations that they had there.
        before = [(_label(as_criterion(name)), way) for name, way in CANDIDATES] if isinstance(criterion, Mapping) else []
        pairs = []
        for each in criteria:
            usual = [way for label, way in before if label == _label(each)] or ["by_cost"]
            pairs += [(each, way) for way in (usual if allocation is None else ways)]
        if len(pairs) > 1 and (calibration is None or not calibration.judge):
            raise InvalidValueError(
                f"{len(pairs)} candidates are compared by their loss on held-out examples, and there are none; pass batches="
                " of two examples or more, or a single criterion and allocation"
            )
    found = [(own, _allocation(way, own)) for own, way in pairs]
    labels = _unique([own for own, _ in found], _label)
    names = _unique([way for _, way in pairs], lambda way: name_of(allocations.find(way) if isinstance(way, str) else way))
    return [Candidate(own, way, label, name) for (own, way), label, name in zip(found, labels, names)]


def _label(criterion: Criterion) -> str:
    return str(getattr(criterion, "name", type(criterion).__name__))


def _unique(items: Sequence[Any], name: Callable[[Any], str]) -> list[str]:
    """Return a name for each object: "Magnitude" for the first of its kind, "Magnitude 2" for the second."""
    keys = [item if isinstance(item, str) else id(item) for item in items]
    names: dict[object, str] = {}
    counts: Counter[str] = Counter()
    for key, item in zip(keys, items):
        if key not in names:
            counts[plain := name(item)] += 1
            names[key] = plain if counts[plain] == 1 else f"{plain} {counts[plain]}"
    return [names[key] for key in keys]


def _allocation(allocation: Allocation | str, criterion: Criterion) -> Allocation:
    found = allocations.find(allocation) if isinstance(allocation, str) else allocation
    if not callable(found):
        raise InvalidValueError(
            f"allocation must be a name or a function of a Problem, such as sparsekit.allocation.by_cost, got {allocation!r}"
        )
    # `by_cost` compares scaled scores: comparable ones, divided by cost, would leave next to nothing of expensive layers.
    if found is global_ranking and is_comparable(criterion):
        return partial(global_ranking, scale="none")
    made: Allocation = found
    return made


def data_notes(model: nn.Module, candidates: Sequence[Candidate], calibration: Calibration | None) -> list[str]:
    """Return remarks on the batches; warn if there are none and a trained network will lose its accuracy."""
    first = candidates[0]
    if calibration is not None:
        return calibration.notes(first.label, first.way) if len(candidates) > 1 else []
    notes = []
    norms = len(batch_norms(model))
    if norms:
        notes.append(
            f"The statistics of {norms} batch norms are those of the dense model and no longer fit; pass batches=, or call"
            " recalibrate_batchnorm before the model is used."
        )
    if isinstance(first.criterion, DataDriven) or (signs := signs_of_training(model)) is None:
        return notes
    notes.append(
        f"{type(model).__name__} was trained ({signs}), but it was pruned without data: trained networks are usually at chance"
        " afterwards. Pass batches= (a dozen batches, labels not needed) to choose units by their effect and to reconstruct"
        " what the cut damages."
    )
    warnings.warn(notes[-1], UncalibratedWarning, stacklevel=level_of_user())
    return notes
