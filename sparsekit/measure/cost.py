"""Cost, CostModel, count_cost(), cost_model(): what a model costs under a mask, and at widths that change step by step.

One multiply-add is 2 FLOPs. `flops_compact` is what a physically small model executes: convolutions and matrix products, as
`torch.utils.flop_counter` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError, TraceError, UnknownNameError, nearest
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit.layers import LayerRule
from sparsekit.measure.activations import Lengths, measure_shrinkage
from sparsekit.measure.budget import METRICS
from sparsekit.measure.flops import entry_keys, record_pass
from sparsekit.measure.latency import measure_table
from sparsekit.measure.memory import measure_memory
from sparsekit.measure.shapes import Array, Axes, Volumes
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.blocks import is_large, is_meta
from sparsekit.tracing.inputs import find_tensors, map_tensors


class Meter(Protocol):
    """A cost that is no sum over the weights, such as the peak of the memory."""

    def at(self, counts: Mapping[str, int]) -> float:
        """The cost where the groups keep `counts` units."""
        ...

    def gain(self, counts: Mapping[str, int], groups: Sequence[str], count: int, limit: float) -> float:
        """How far it leads towards `limit` if each of `groups` keeps `count` units: 0 if it does not help."""
        ...


class CostTracker:
    """Costs at widths that change step by step, by arithmetic on the tensors that a step touches."""

    def __init__(
        self,
        volumes: Volumes,
        factors: Mapping[str, Array],
        counts: Mapping[str, int],
        metrics: Sequence[str],
        meters: Mapping[str, Meter],
    ) -> None:
        """Start at `counts`.

        Args:
            volumes: The tensors that costs are sums over.
            factors: Metric → float (tensors,), what an entry of each costs.
            counts: Group name → units kept, for every group.
            metrics: What is tracked.
            meters: Metric → meter, for the others.
        """
        self.counts = dict(counts)
        self._meters = {name: meter for name, meter in meters.items() if name in metrics}
        self._metrics = tuple(name for name in metrics if name not in self._meters)
        self._volumes = volumes
        self._factors = np.array([factors[name] for name in self._metrics]).reshape(len(self._metrics), volumes.count)
        self._lengths = volumes.lengths(counts)
        self._entries = volumes.entries(self._lengths)
        self._totals = self._factors @ self._entries
        self._own: dict[tuple[str, ...], Array] = {}

    def _change(self, groups: Sequence[str], count: int) -> tuple[Array, tuple[Any, Array, Array]]:
        """What a step adds to each metric; the tensors that it touches, their lengths and entries after it."""
        key = tuple(groups)
        step = rows, _, entries = self._volumes.step(key, count - self.counts[key[0]], self._lengths)
        if key not in self._own:
            self._own[key] = self._factors[:, rows]
        return self._own[key] @ (entries - self._entries[rows]), step

    def totals(self) -> dict[str, float]:
        """Metric → cost at the present widths."""
        found = dict(zip(self._metrics, self._totals.tolist()))
        return found | {name: meter.at(self.counts) for name, meter in self._meters.items()}

    def change(self, groups: Sequence[str], count: int) -> dict[str, float]:
        """Metric → what would be added (below 0: saved) if each of `groups`, which keep equally many, kept `count` units."""
        found = dict(zip(self._metrics, self._change(groups, count)[0].tolist()))
        after = {**self.counts, **dict.fromkeys(groups, count)}
        return found | {name: meter.at(after) - meter.at(self.counts) for name, meter in self._meters.items()}

    def gain(self, groups: Sequence[str], count: int, limits: Mapping[str, float]) -> float:
        """What the same step saves of the budgets that are exceeded, as shares of these budgets, added up."""
        total = 0.0
        if self._metrics:
            changes = zip(self._metrics, self._totals.tolist(), self._change(groups, count)[0].tolist())
            total -= sum(
                change / max(limits[name], 1e-300) for name, cost, change in changes if cost > limits.get(name, float("inf"))
            )
        for name, meter in self._meters.items():
            if name in limits:
                total += meter.gain(self.counts, groups, count, limits[name]) / max(limits[name], 1e-300)
        return total

    def move(self, groups: Sequence[str], count: int) -> None:
        """Let each of `groups` keep `count` units from now on."""
        change, (rows, lengths, entries) = self._change(groups, count)
        self._totals = self._totals + change
        self._lengths[rows], self._entries[rows] = lengths, entries
        self.counts.update(dict.fromkeys(groups, count))


@dataclass(frozen=True)
class Cost:
    """What a model costs.

    Args:
        flops_compact: FLOPs of one forward pass of the compact model on the example inputs.
        parameters: Trainable and frozen parameters kept.
        bytes: Bytes of all entries kept, buffers included.
    """

    flops_compact: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class CostTerm:
    """Multiply-adds of one use of a weight: each of its entries is used once per position.

    Args:
        weight: State-dict key.
        positions: Output positions per pass: examples times spatial or time positions; a part of that where only a part of
            the weight is used.
        bias: State-dict key of the bias that is added at each position, if any.
        moves: The positions where they shrink with groups, as those of a layer over tokens do with the channels behind them.
    """

    weight: str
    positions: Fraction
    bias: str | None
    moves: Lengths | None = None

    def positions_at(self, counts: Mapping[str, int]) -> Fraction:
        """Positions per pass where the groups keep `counts` units."""
        return self.positions if self.moves is None else self.moves.at(counts)


@dataclass(frozen=True, eq=False)
class CostModel:
    """FLOPs of a model as terms over its weights, so that the cost of any mask is arithmetic and no pass.

    Args:
        graph: The units.
        terms: One for each use of a weight.
        other_flops: FLOPs of products between activations in the dense model.
        examples: Examples in the traced pass.
        parameters: Keys that are parameters, tied ones once.
        widths: State-dict key → bytes per entry, tied ones once.
        products: Those of `other_flops` that shrink with groups, such as attention maps with their heads.
        meters: Metrics that are no arithmetic over the weights: "memory" and "latency_ms" where somebody asked for them.
    """

    graph: UnitGraph
    terms: tuple[CostTerm, ...]
    other_flops: int
    examples: int
    parameters: frozenset[str]
    widths: Mapping[str, int]
    products: tuple[Lengths, ...] = ()
    meters: Mapping[str, Meter] = field(default_factory=dict)

    def sizes(self, mask: UnitMask | None = None, *, sides: Collection[str] = ("out", "in")) -> dict[str, int]:
        """Count the entries that stay.

        Args:
            mask: What is kept; None keeps all.
            sides: Which axes are cut: "out", "in" or both, as in `UnitSlice.side`.

        Returns:
            State-dict key → entries.
        """
        return self._sizes(self._counts(mask), sides)

    def _sizes(self, counts: Mapping[str, int], sides: Collection[str] = ("out", "in")) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, shape in self.graph.shapes.items():
            kept = list(shape)
            for group, piece in self.graph.slices_of.get(name, ()):
                if piece.side in sides:
                    kept[piece.dim] -= piece.span * (self.graph.groups[group].size - counts[group])
            sizes[name] = math.prod(kept)
        return sizes

    def _counts(self, mask: UnitMask | None) -> dict[str, int]:
        if mask is None:
            return {name: group.size for name, group in self.graph.groups.items()}
        return mask.counts()

    def forward_flops(self, mask: UnitMask | None = None) -> int:
        """FLOPs of one example through the compact model; backward costs twice as much again.

        Args:
            mask: What is kept; None keeps all.
        """
        return int(self._pass_flops(self._counts(mask)) // self.examples)

    def _pass_flops(self, counts: Mapping[str, int]) -> Fraction:
        sizes = self._sizes(counts)
        flops = sum((2 * term.positions_at(counts) * sizes[term.weight] for term in self.terms), Fraction(self._fixed_flops))
        return flops + sum((product.at(counts) for product in self.products), Fraction(0))

    @cached_property
    def _fixed_flops(self) -> Fraction:
        """Of `other_flops`, those that no mask changes."""
        dense = self._counts(None)
        return self.other_flops - sum((product.at(dense) for product in self.products), Fraction(0))

    def narrowed(self, graph: UnitGraph) -> CostModel:
        """The same costs on the graph of a narrow model of this one: numbers of units mean the same there."""
        counts = {name: group.size for name, group in graph.groups.items()}
        terms = tuple(replace(term, positions=term.positions_at(counts)) for term in self.terms)
        other = self._fixed_flops + sum((product.at(counts) for product in self.products), Fraction(0))
        return replace(self, graph=graph, terms=terms, other_flops=int(other))

    def costs(self, counts: Mapping[str, int]) -> dict[str, float]:
        """All metrics of the narrow model, exact but for those of `meters`.

        Args:
            counts: Group name → units kept, for every group.

        Returns:
            "flops" of one example, "params", "bytes", and the metrics of `meters`.
        """
        sizes = self._sizes(counts)
        found = {
            "flops": float(self._pass_flops(counts) / self.examples),
            "params": float(sum(sizes[name] for name in self.widths if name in self.parameters)),
            "bytes": float(sum(sizes[name] * width for name, width in self.widths.items())),
        }
        found.update((name, meter.at(counts)) for name, meter in self.meters.items())
        return found

    def entry_costs(self, counts: Mapping[str, int]) -> dict[str, dict[str, float]]:
        """State-dict key → "flops" of one example that are spent on it, "params" and "bytes"; tied ones once.

        Args:
            counts: Group name → units kept, for every group.
        """
        sizes = self._sizes(counts)
        found = {
            name: {"flops": 0.0, "params": float(sizes[name] * (name in self.parameters)), "bytes": float(sizes[name] * width)}
            for name, width in self.widths.items()
        }
        for term in self.terms:
            found[term.weight]["flops"] += float(2 * term.positions_at(counts) * sizes[term.weight] / self.examples)
        return found

    def dense_costs(self) -> dict[str, float]:
        """The same where every unit is kept."""
        return self.costs(self._counts(None))

    def tracker(self, counts: Mapping[str, int], metrics: Collection[str] | None = None) -> CostTracker:
        """Costs at widths that change step by step; a step costs arithmetic on the tensors that it touches.

        Args:
            counts: Group name → units kept at the start, for every group.
            metrics: What is tracked; None tracks all.
        """
        chosen = tuple(dict.fromkeys(metrics)) if metrics is not None else ("flops", "params", "bytes", *self.meters)
        return CostTracker(*self._volumes, counts, chosen, self.meters)

    @cached_property
    def _volumes(self) -> tuple[Volumes, dict[str, Array]]:
        """What costs are sums over, and metric → the cost of an entry of each."""
        flops = dict.fromkeys(self.widths, Fraction(0))
        for term in self.terms:
            if term.moves is None:
                flops[term.weight] = flops.get(term.weight, Fraction(0)) + 2 * term.positions
        parts: list[tuple[Axes, Fraction, int, int]] = [
            (self._axes(name), each, int(name in self.parameters and name in self.widths), self.widths.get(name, 0))
            for name, each in flops.items()
        ]
        parts += [((*self._axes(t.weight), *t.moves.axes), 2 * t.moves.factor, 0, 0) for t in self.terms if t.moves is not None]
        parts += [(product.axes, product.factor, 0, 0) for product in self.products]
        parts.append(((), self._fixed_flops, 0, 0))
        factors = np.array([(float(each / self.examples), params, width) for _, each, params, width in parts]).T
        return Volumes([axes for axes, *_ in parts], list(self.graph.groups)), dict(zip(("flops", "params", "bytes"), factors))

    def _axes(self, name: str) -> Axes:
        """The axes of the tensor under a key."""
        axes: list[tuple[int, dict[str, float]]] = [(size, {}) for size in self.graph.shapes[name]]
        for group, piece in self.graph.slices_of.get(name, ()):
            whole, spans = axes[piece.dim]
            spans[group] = spans.get(group, 0) + piece.span
            axes[piece.dim] = whole - piece.span * self.graph.groups[group].size, spans
        return tuple(axes)

    def entries(self, mask: UnitMask | WeightMask | None = None) -> dict[str, int]:
        """State-dict key → entries kept, tied ones once."""
        if isinstance(mask, WeightMask):
            return {name: int(mask[name].sum()) if name in mask else math.prod(self.graph.shapes[name]) for name in self.widths}
        sizes = self.sizes(mask)
        return {name: sizes[name] for name in self.widths}

    def cost(self, mask: UnitMask | WeightMask | None = None) -> Cost:
        """All numbers for the traced pass."""
        entries = self.entries(mask)
        return Cost(
            flops_compact=self.forward_flops(mask if isinstance(mask, UnitMask) else None) * self.examples,
            parameters=sum(count for name, count in entries.items() if name in self.parameters),
            bytes=sum(count * self.widths[name] for name, count in entries.items()),
        )


def trace_cost(model: nn.Module, *example_inputs: Any, graph: UnitGraph, **example_kwargs: Any) -> CostModel:
    """Run the model once and note which weight is used at how many positions.

    Args:
        model: The dense model; not changed.
        *example_inputs: One call's inputs; the first axis of the first tensor counts the examples.
        graph: Its units.
        **example_kwargs: Keyword inputs.

    Returns:
        The cost model.

    Raises:
        TraceError: the model fails on the inputs.
    """
    refused: TraceError | None = None
    for copied, args, kwargs in _copies(model, example_inputs, example_kwargs):
        try:
            return _trace(copied, args, kwargs, graph)
        except TraceError as error:  # on the meta device, a model that looks at values
            refused = error
    assert refused is not None
    raise refused


def _copies(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    """Copies to run, the cheaper first: FLOPs need no values, so that of a large model one without any will mostly do."""
    if not is_large(model):
        yield copy_with(model, {}).eval(), args, kwargs  # unlike a deep copy, it takes computed weights, as of weight norm
        return
    bare = {id(entry): entry.detach().to("meta") for entry in named_entries(model).values()}
    without_values = copy_with(model, {name: bare[id(entry)] for name, entry in named_entries(model).items()}).to("meta")
    yield without_values.eval(), *map_tensors(lambda tensor: tensor.to("meta"), (args, dict(kwargs)))
    if not is_meta(model):
        yield copy_with(model, dict(model.named_parameters(remove_duplicate=False))).eval(), args, kwargs


def _trace(copied: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], graph: UnitGraph) -> CostModel:
    state, keys = copied.state_dict(keep_vars=True), entry_keys(copied)
    recorder = record_pass(copied, args, kwargs)
    first = next(iter(find_tensors([*args, *kwargs.values()])), None)
    moves = measure_shrinkage(copied, graph, recorder, args, kwargs)
    return CostModel(
        graph=graph,
        terms=tuple(
            CostTerm(call.key, recorder.amount(call), _bias_of(call.key, state), moves.get(place))
            for place, call in enumerate(recorder.calls)
            if call.key is not None
        ),
        other_flops=sum(call.flops for call in recorder.calls if call.key is None),
        examples=max(1, first.shape[0]) if first is not None and first.dim() else 1,
        parameters=frozenset(name for name in keys.values() if isinstance(state[name], nn.Parameter)),
        widths={name: state[name].element_size() for name in keys.values()},
        products=tuple(lengths for place, lengths in moves.items() if recorder.calls[place].key is None),
    )


def _bias_of(weight: str, state: Mapping[str, Tensor]) -> str | None:
    module, _, attribute = weight.rpartition(".")
    bias = f"{module}.{attribute.replace('weight', 'bias')}" if module else attribute.replace("weight", "bias")
    return bias if bias != weight and bias in state else None


def count_cost(
    model: nn.Module,
    *example_inputs: Any,
    graph: UnitGraph | None = None,
    mask: UnitMask | WeightMask | None = None,
    **example_kwargs: Any,
) -> Cost:
    """FLOPs, parameters and bytes of one forward pass under a mask.

    Args:
        model: The dense model; not changed.
        *example_inputs: One call's inputs.
        graph: Its units; needed with a mask.
        mask: What is kept; None keeps all.
        **example_kwargs: Keyword inputs.

    Returns:
        The cost of the pass, for all its examples together.

    Raises:
        InvalidValueError: a mask without a graph.
        ForeignMaskError: the mask belongs to another graph.
    """
    if graph is None:
        if mask is not None:
            raise InvalidValueError("count_cost needs graph= to read a mask; pass the graph that the mask was made with")
        graph = UnitGraph({}, {name: tensor.shape for name, tensor in model.state_dict().items()})
    if mask is not None:
        mask.check(graph)
    return trace_cost(model, *example_inputs, graph=graph, **example_kwargs).cost(mask)


def cost_model(
    model: nn.Module,
    *example_inputs: Any,
    graph: UnitGraph,
    metrics: Iterable[str] = (),
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    **example_kwargs: Any,
) -> CostModel:
    """Measure once what numbers of units cost; asking for costs is arithmetic from then on.

    FLOPs, parameters and bytes are exact and always there. The others take passes of the model and must be asked for.

    Args:
        model: The dense model; not changed.
        *example_inputs: One call's inputs; the first axis of the first tensor counts the examples.
        graph: Its units.
        metrics: What is needed, such as `budget.metrics`.
        rules: Rules for layers of your own, as given to `trace_units`.
        **example_kwargs: Keyword inputs.

    Returns:
        The costs: `costs(counts)` for given numbers, `tracker(counts)` for numbers that change step by step.

    Raises:
        TraceError: the model fails on the inputs.
        UnknownNameError: no such metric.
    """
    chosen = tuple(metrics)
    for name in chosen:
        if name not in METRICS:
            raise UnknownNameError(f"unknown metric {name!r}; {nearest(name, METRICS)}")
    costs = trace_cost(model, *example_inputs, graph=graph, **example_kwargs)
    meters: dict[str, Meter] = {}
    if "memory" in chosen:
        meters["memory"] = measure_memory(model, example_inputs, example_kwargs, graph, rules)
    if "latency_ms" in chosen:
        meters["latency_ms"] = measure_table(model, example_inputs, example_kwargs, graph, rules)
    return replace(costs, meters=meters) if meters else costs
