"""PruneReport: what was asked, what was achieved, and where it was cut, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import format_cost
from sparsekit.measure.cost import CostModel
from sparsekit.pruning.selection import makers

__all__ = ["GroupReport", "LayerReport", "PruneReport", "describe"]


@dataclass(frozen=True)
class GroupReport:
    """A group before and after.

    Args:
        name: Of the group.
        kind: What a unit is.
        before: Units of the dense model.
        after: Units kept.
        modules: Names of the modules that make the units.
        flops_before: FLOPs of one example that are spent on weights which the group touches; those between two groups count
            for both.
        flops_after: The same after the cut.
        params_before: Parameters that the group touches.
        params_after: The same after the cut.
    """

    name: str
    kind: str
    before: int
    after: int
    modules: tuple[str, ...]
    flops_before: float
    flops_after: float
    params_before: float
    params_after: float


@dataclass(frozen=True)
class LayerReport:
    """The width of a layer before and after.

    Args:
        name: Of the module; of its weight where it is not called `weight`.
        before: Width of its output in the dense model.
        after: The same after the cut.
        flops_before: FLOPs of one example.
        flops_after: The same after the cut.
    """

    name: str
    before: int
    after: int
    flops_before: float
    flops_after: float


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """What was asked, what was achieved, and where it was cut.

    Args:
        model: Name of the model's class.
        criterion: Name of the criterion.
        allocation: Name of the allocation.
        asked: Metric → what the budget said.
        limits: Metric → the same in absolute numbers.
        before: Metric → cost of the dense model.
        after: Metric → cost of the pruned model.
        least: Metric → cost where every group keeps as few units as limits and multiples allow.
        groups: Before and after.
        layers: Before and after, in forward order.
        fixed: Units that stay: module, number and reason.
        steps: Metric → cost after each step of the schedule.
        measured: What was measured beside: latencies before and after, errors of tables, scores of fine-tuning.
        notes: Sentences for the reader.
    """

    model: str
    criterion: str
    allocation: str
    asked: Mapping[str, str | float]
    limits: Mapping[str, float]
    before: Mapping[str, float]
    after: Mapping[str, float]
    least: Mapping[str, float]
    groups: Sequence[GroupReport]
    layers: Sequence[LayerReport]
    fixed: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, float]] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.criterion}, {self.allocation}"]
        for name, before in self.before.items():
            asked = f", asked ≤ {format_cost(name, self.limits[name])}" if name in self.limits else ""
            share = f" ({self.after[name] / before:.1%})" if before else ""
            least = f", least {format_cost(name, self.least[name])}" if name in self.least else ""
            lines.append(f"{name}: {format_cost(name, before)} → {format_cost(name, self.after[name])}{share}{asked}{least}")
        lines += [f"{group.name}: {group.before} → {group.after} {group.kind}s" for group in self.groups]
        return "\n".join([*lines, *self.notes])


def describe(
    graph: UnitGraph, costs: CostModel, counts: Mapping[str, int]
) -> tuple[tuple[GroupReport, ...], tuple[LayerReport, ...]]:
    """Groups and layers before and after.

    Args:
        graph: Of the dense model.
        costs: Of the dense model.
        counts: Group name → units kept.
    """
    dense = {name: group.size for name, group in graph.groups.items()}
    before, after = costs.entry_costs(dense), costs.entry_costs(counts)
    made = makers(graph)
    groups = []
    for group in graph.groups.values():
        keys = {piece.name for piece in group.slices} & before.keys()
        sums = [sum(part[key][what] for key in keys) for what in ("flops", "params") for part in (before, after)]
        groups.append(GroupReport(group.name, group.kind, group.size, counts[group.name], made[group.name], *sums))
    layers = []
    for key in dict.fromkeys(term.weight for term in costs.terms):
        shape = graph.shapes[key]
        if len(shape) < 2:
            continue
        pieces = [(name, piece) for name, piece in graph.slices_of.get(key, ()) if piece.side == "out"]
        dim = pieces[0][1].dim if pieces else 0
        kept = shape[dim] - sum(piece.span * (dense[name] - counts[name]) for name, piece in pieces if piece.dim == dim)
        name = key.removesuffix(".weight")  # one of several weights of a module keeps its own name
        layers.append(LayerReport(name, shape[dim], kept, before[key]["flops"], after[key]["flops"]))
    return tuple(groups), tuple(layers)
