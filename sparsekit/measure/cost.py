"""Cost, CostModel, count_cost(), cost_model(): the cost of a model under a mask, and at widths that change step by step.

One multiply-add is 2 FLOPs. `flops` counts the convolutions and matrix products of a physically small model, as
`torch.utils.flop_counter` does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from sparsekit._torch import set_mode
from sparsekit.errors import InvalidValueError, level_of_user
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit.measure.flops import UncountedFlopsWarning, entry_keys, record_pass, told_failure
from sparsekit.measure.shrinkage import CostTracker, Extents, Lengths, Prices, Volumes, measure_shrinkage
from sparsekit.surgery.blocks import remove_blocks
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.blocks import is_large
from sparsekit.tracing.inputs import ModelInputs, find_tensors, map_tensors
from sparsekit.tracing.perturbed import is_meta


@dataclass(frozen=True)
class Cost:
    """The cost of a model.

    Args:
        flops: FLOPs of one forward pass of the compact model on the example inputs.
        parameters: Trainable and frozen parameters kept.
        bytes: Bytes of all entries kept, buffers included.
    """

    flops: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class CostTerm:
    """One use of a weight in a pass: each of its elements takes part in one multiply-add per position.

    Args:
        weight: State-dict key of the weight.
        positions: Examples × spatial or time positions; a fraction of them if the call uses only a part of the weight.
        bias: State-dict key of the bias; None without one.
        moves: The positions as a function of widths, if they shrink with groups. Token mixing, for example, is applied to
            each channel.
    """

    weight: str
    positions: Fraction
    bias: str | None
    moves: Lengths | None = None


@dataclass(frozen=True, eq=False)
class CostModel:
    """Computes the costs of a model at any widths from terms over its weights, without running it. Made by `cost_model`.

    Args:
        graph: The unit graph of the model.
        terms: One term for each use of a weight.
        other_flops: FLOPs of products between activations in the dense model.
        examples: Number of examples in the traced pass.
        parameters: State-dict keys of parameters, tied ones once.
        widths: State-dict key → bytes per element, tied ones once.
        products: The part of `other_flops` that shrinks with groups, such as attention maps with their heads.
        uncounted: Operator of unknown FLOPs → keys of the prunable weights that it uses.
    """

    graph: UnitGraph
    terms: tuple[CostTerm, ...]
    other_flops: int
    examples: int
    parameters: frozenset[str]
    widths: Mapping[str, int]
    products: tuple[Lengths, ...] = ()
    uncounted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def note(self) -> str | None:
        """A sentence about FLOPs that are not counted, if there are any."""
        if not self.uncounted:
            return None
        found = "; ".join(f"{name!r}, which reads {', '.join(keys[:3])}" for name, keys in self.uncounted.items())
        return (
            f"FLOPs are too low: no formula is known for the operator {found}."
            " torch.utils.flop_counter.register_flop_formula gives it one"
        )

    @property
    def free_weights(self) -> frozenset[str]:
        """Keys of prunable weights that only operators of unknown FLOPs read: pruning them seems to save nothing."""
        read = {key for keys in self.uncounted.values() for key in keys}
        return frozenset(read - {term.weight for term in self.terms})

    def sizes(self, mask: UnitMask | None = None, *, sides: Collection[str] = ("out", "in")) -> dict[str, int]:
        """Return state-dict key → number of elements left under a mask, if axes of these sides (`UnitSlice.side`) are cut."""
        counts, sizes = self._counts(mask), {}
        for name, shape in self.graph.shapes.items():
            kept = list(shape)
            for group, piece in self.graph.slices_of.get(name, ()):
                if piece.side in sides:
                    kept[piece.dim] -= piece.span * (self.graph.groups[group].size - counts[group])
            sizes[name] = math.prod(kept)
        return sizes

    def _counts(self, mask: UnitMask | None) -> dict[str, int]:
        if mask is not None and mask.removed:
            raise InvalidValueError(
                f"the costs of a model without {', '.join(sorted(mask.removed))} do not follow from widths;"
                " count_cost(model, x, graph=graph, mask=mask) counts them"
            )
        return {name: group.size for name, group in self.graph.groups.items()} if mask is None else mask.counts()

    def forward_flops(self, mask: UnitMask | None = None) -> int:
        """Return the FLOPs of a forward pass of one example through the compact model; a backward pass costs twice that."""
        return self._pass_flops(mask) // self.examples

    def _pass_flops(self, mask: UnitMask | None) -> int:
        volumes, prices = self._sums
        flops, scale = prices["flops"]
        return round(float(flops @ volumes.at(self._counts(mask))) * self.examples / scale)

    def costs(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Return all metrics of the narrow model, exactly: "flops" of one example, "params" and "bytes".

        `counts` is, here and below, group name → units kept, for every group.
        """
        return self.tracker(counts).totals()

    def entry_costs(self, counts: Mapping[str, int]) -> dict[str, dict[str, float]]:
        """Return state-dict key → its part of "flops" of one example, "params" and "bytes". Tied keys occur once."""
        volumes, prices = self._sums
        found = {name: dict.fromkeys(prices, 0.0) for name in self.widths}
        entries = volumes.at(counts)
        for metric, (each, scale) in prices.items():
            for (name, *_), cost in zip(self._parts, (each * entries / scale).tolist(), strict=True):
                if name is not None:
                    found[name][metric] += cost
        return found

    def dense_costs(self) -> dict[str, float]:
        """Return all metrics of the dense model, as `costs` does."""
        return self.costs(self._counts(None))

    def tracker(self, counts: Mapping[str, int], metrics: Collection[str] | None = None) -> CostTracker:
        """Return a tracker of costs at widths that start at `counts`. `metrics`: those to track; None: all."""
        volumes, prices = self._sums
        return CostTracker(volumes, {name: prices[name] for name in (prices if metrics is None else metrics)}, counts)

    @cached_property
    def _parts(self) -> list[tuple[str | None, Extents, Fraction]]:
        """Return the terms of costs: weight or None, axes, and FLOPs per element in a pass. The keys of `widths` come first."""
        flops = dict.fromkeys(self.widths, Fraction(0))
        moving: list[tuple[str | None, Extents, Fraction]] = []
        for term in self.terms:
            if term.moves is None:
                flops[term.weight] += 2 * term.positions
            else:
                moving.append((term.weight, (*self._axes(term.weight), *term.moves.axes), 2 * term.moves.factor))
        dense = self._counts(None)
        fixed = self.other_flops - sum((product.at(dense) for product in self.products), Fraction(0))
        products = [(None, product.axes, product.factor) for product in self.products]
        return [*((name, self._axes(name), each) for name, each in flops.items()), *moving, *products, (None, (), fixed)]

    @cached_property
    def _sums(self) -> tuple[Volumes, Prices]:
        """Return the numbers of elements of all terms, and prices per element. Costs below 2 to the power of 53 are exact."""
        parts = self._parts
        volumes = Volumes([axes for _, axes, _ in parts], list(self.graph.groups))
        whole = math.lcm(*(each.denominator for *_, each in parts))
        prices = {"flops": (np.array([float(each * whole) for *_, each in parts]), whole * self.examples)}
        for metric, widths in (("params", dict.fromkeys(self.parameters, 1)), ("bytes", self.widths)):
            factors = [float(widths.get(name, 0)) for name in self.widths]
            prices[metric] = np.array([*factors, *[0.0] * (len(parts) - len(factors))]), 1
        return volumes, prices

    def _axes(self, name: str) -> Extents:
        axes: list[tuple[int, dict[str, float]]] = [(size, {}) for size in self.graph.shapes[name]]
        for group, piece in self.graph.slices_of.get(name, ()):
            whole, spans = axes[piece.dim]
            spans[group] = spans.get(group, 0) + piece.span
            axes[piece.dim] = whole - piece.span * self.graph.groups[group].size, spans
        return tuple(axes)

    def cost(self, mask: UnitMask | WeightMask | None = None) -> Cost:
        """Return the cost of the traced pass under a mask; None keeps everything."""
        entries = self.sizes(mask if isinstance(mask, UnitMask) else None)
        if isinstance(mask, WeightMask):
            entries |= {name: int(keep.sum()) for name, keep in mask.items()}
        return Cost(
            flops=self._pass_flops(mask if isinstance(mask, UnitMask) else None),
            parameters=sum(entries[name] for name in self.widths if name in self.parameters),
            bytes=sum(entries[name] * width for name, width in self.widths.items()),
        )


def _trace(copied: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], graph: UnitGraph) -> CostModel:
    state, keys = named_entries(copied), entry_keys(copied)
    recorder = record_pass(copied, args, kwargs)
    first = next(iter(find_tensors([*args, *kwargs.values()])), None)
    moves = measure_shrinkage(copied, graph, recorder, args, kwargs)
    uncounted: dict[str, tuple[str, ...]] = {}
    for name, key in recorder.unknown:
        if key in graph.slices_of:
            uncounted[name] = (*uncounted.get(name, ()), key)
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
        uncounted=uncounted,
    )


def _bias_of(weight: str, state: Mapping[str, Tensor]) -> str | None:
    module, dot, attribute = weight.rpartition(".")
    bias = module + dot + attribute.replace("weight", "bias")
    return bias if bias != weight and bias in state else None


def count_cost(
    model: nn.Module, example_inputs: Any, *, graph: UnitGraph | None = None, mask: UnitMask | WeightMask | None = None
) -> Cost:
    """Return the FLOPs, parameters and bytes of one forward pass under a mask.

    Args:
        model: The dense model; not changed.
        example_inputs: Inputs of one call, as in `prune`: a tuple, a mapping of keyword inputs, or one tensor.
        graph: The unit graph of the model; needed with a mask.
        mask: Units or entries to keep; None keeps all.

    Returns:
        The cost of the pass, for all its examples together.

    Raises:
        InvalidValueError: a mask without a graph, or inputs of another kind.
        ForeignMaskError: the mask belongs to another graph.
    """
    if mask is not None:
        if graph is None:
            raise InvalidValueError("count_cost needs graph= to read a mask; pass the graph that the mask was made with")
        mask.check(graph)
        if isinstance(mask, UnitMask) and mask.removed:
            model = remove_blocks(model, [graph.blocks[name] for name in mask.removed])
            graph, mask = mask.shortened(graph)
    return cost_model(model, example_inputs, graph).cost(mask)


def cost_model(model: nn.Module, example_inputs: Any, graph: UnitGraph | None = None) -> CostModel:
    """Measure the costs of a model once; costs of other widths are then computed without running it.

    Args:
        model: The dense model; not changed.
        example_inputs: Inputs of one call, as in `prune`; the first axis of the first tensor counts the examples.
        graph: The unit graph of the model; None if only the costs of the dense model are needed.

    Returns:
        The cost model: `costs(counts)` for given widths, `tracker(counts)` for widths that change step by step.

    Raises:
        TraceError: the model fails on the inputs.
    """
    call = ModelInputs.of(example_inputs)
    if graph is None:
        graph = UnitGraph({}, {name: tensor.shape for name, tensor in named_entries(model).items()})
    found = _measured(model, call.args, call.kwargs, graph)
    if found.note is not None:
        warnings.warn(found.note, UncountedFlopsWarning, stacklevel=level_of_user())
    return found


def _measured(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], graph: UnitGraph) -> CostModel:
    if not is_large(model):  # a deep copy would fail on computed weights, as in weight norm
        return _trace(set_mode(copy_with(model, {}), False), args, kwargs, graph)
    # On the meta device a pass costs no arithmetic, and the copy no memory. Tied entries stay tied.
    bare = {id(entry): entry.detach().to("meta") for entry in named_entries(model).values()}
    copied = copy_with(model, {name: bare[id(entry)] for name, entry in named_entries(model).items()}).to("meta")
    set_mode(copied, False)
    with told_failure():
        try:
            light = map_tensors(lambda tensor: tensor.to("meta"), (args, dict(kwargs)))
            return _trace(copied, light[0], light[1], graph)
        except Exception:
            if is_meta(model):
                raise
        # The control flow of the model depends on values: run it on the real ones, which this copy shares.
        shared = set_mode(copy_with(model, dict(model.named_parameters(remove_duplicate=False))), False)
        return _trace(shared, args, kwargs, graph)
