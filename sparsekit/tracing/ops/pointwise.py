"""Operators that work position by position, with broadcasting: sums, products, activations."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit.labels.facts import Count
from sparsekit.labels.values import NOT_ZERO, IntArray, Labels, TensorLabels, aligned
from sparsekit.tracing.ops.call import MOST_POSITIONS, Call, Outputs, handles

_ZERO_IF_ALL_ARE = frozenset({"add", "sub", "rsub", "maximum", "minimum", "where", "fmax", "fmin", "hypot"})
_JOINS = frozenset({"cat", "stack", "concat"})
_FIRST = frozenset({"prelu", "_prelu_kernel"})  # zero where the first operand is


def is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags


def _keeps_zero(call: Call) -> bool:
    """Return true if the operator, with its other arguments as given, maps zero to zero, found by running it."""
    arguments = dict(call.arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = torch.zeros(1, dtype=value.dtype)
    try:
        made = torch.ops.aten.clone(call.func(**arguments))
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((made == 0).all())


def _sources(call: Call, name: str, operands: Sequence[IntArray], size: int) -> IntArray:
    """Return sources of the result from the operands' sources (NOT_ZERO everywhere for operands without units)."""
    unknown = np.full(size, NOT_ZERO, dtype=np.int64)
    if name == "mul":
        return functools.reduce(lambda a, b: np.where(a != NOT_ZERO, a, b), operands)
    if name in _FIRST or (name == "masked_fill" and not isinstance(value := call.arg("value", 0), Tensor) and value == 0):
        return operands[0]
    if name == "div":
        return operands[0] if call.arg("rounding_mode") is None else unknown
    if name in _JOINS or (name in _ZERO_IF_ALL_ARE and len(operands) > 1):
        return functools.reduce(call.tracer.both, operands[:2] if name == "where" else operands)  # without the condition
    return operands[0] if len(operands) == 1 and _keeps_zero(call) else unknown


def combine(
    call: Call,
    owners: Sequence[TensorLabels],
    shapes: Sequence[Sequence[int]],
    shape: Sequence[int],
    name: str | None = None,
) -> TensorLabels:
    """Return the labels of an element-wise result.

    `owners` are the labels of the operands, whose `shapes` broadcast to `shape`. `name` names the operation if it is only a
    part of the operator: "add" for the bias of a product.
    """
    rank, name = len(shape), name or call.name
    owners, joint = _meet(call, name, owners, shapes, rank)
    axes: list[Labels | None] = []
    for d, size in enumerate(shape):
        pieces: list[tuple[Labels, TensorLabels]] = []
        sources: list[IntArray] = []
        ordinary = False
        for owner, own_shape in zip(owners, shapes, strict=True):
            k = d - (rank - len(own_shape))
            own, own_size = (owner.axes[k], own_shape[k]) if k >= 0 else (None, 1)
            if own is not None and own_size != size:
                call.tracer.fix(own, f"a single unit is broadcast by {name!r}", quiet=owner.entry is not None)
                own = None
            sources.append(own.sources if own is not None else np.full(size, NOT_ZERO, dtype=np.int64))
            pieces += [] if own is None else [(own, owner)]
            ordinary = ordinary or (own is None and own_size > 1)
        held = [(axis, owner) for axis, owner in pieces if not axis.is_uniform]
        if ordinary:
            for axis, owner in held:
                reason = f"combined by {name!r} with"
                if owner.entry is not None or call.tracer.is_constant(axis):
                    call.tracer.fix(axis, f"{reason} values that belong to no unit", quiet=True)
                else:
                    call.tracer.fix(axis, call.outside(reason, d, rank))
            # Fixed units keep their labels, so that later operators fix the same units, and output layers are recognized.
            axes.append(held[0][0].without_zero() if held else None)
        elif not pieces or (not held and size == 1 and len(pieces) < len(owners)):
            axes.append(None)
        else:
            nodes = (held or pieces)[0][0].nodes
            for axis, _ in pieces if held else ():
                if axis.numbers and (nodes >= 0).all():
                    call.tracer.facts.append(Count(nodes, (axis.numbers,)))
            for axis, owner in held:
                call.tracer.unite(nodes, axis.nodes)
                if owner.entry is not None:
                    call.tracer.make_nodes(axis.nodes)
            axes.append(Labels(nodes, _sources(call, name, sources, size)))
    return TensorLabels(tuple(axes), joint=joint)


def _meet(
    call: Call, name: str, owners: Sequence[TensorLabels], shapes: Sequence[Sequence[int]], rank: int
) -> tuple[list[TensorLabels], Labels | None]:
    """Return the operands without their joint labels, and the joint labels of an element-wise result.

    If another operand has ordinary values along an axis, positions along it are tied. If it has units along one axis, units
    differ along that axis only.
    """
    met = list(owners)
    while True:  # ends, since every round but the last ties an axis
        joints = [k for k, labels in enumerate(met) if labels.joint is not None]
        if not joints:
            return met, None
        before = list(met)
        for k in joints:
            met[k] = _fitting(call, met, shapes, rank, k)
        if all(old is new for old, new in zip(before, met, strict=True)):
            full = np.broadcast_shapes(*(aligned(j.nodes, rank).shape for labels in met if (j := labels.joint) is not None))
            if math.prod(full) <= MOST_POSITIONS:
                break
            met = [call.tracer.settle(labels) for labels in met]
    codes = [(aligned(j.nodes, rank), aligned(j.sources, rank)) for labels in met if (j := labels.joint) is not None]
    spread = [np.broadcast_to(nodes, full) for nodes, _ in codes]
    for other in spread[1:]:
        call.tracer.unite(spread[0].reshape(-1), other.reshape(-1))
    rest = iter(codes)
    unknown = np.full(full, NOT_ZERO, dtype=np.int64)
    parts = [np.broadcast_to(next(rest)[1], full) if labels.joint is not None else unknown for labels in met]
    sources = _sources(call, name, [part.reshape(-1) for part in parts], math.prod(full)).reshape(full)
    for labels in met:
        if labels.joint is not None and labels.entry is not None:
            call.tracer.make_nodes(labels.joint.nodes.reshape(-1))
    return [replace(labels, joint=None) for labels in met], Labels(spread[0], sources)


def _fitting(
    call: Call, owners: Sequence[TensorLabels], shapes: Sequence[Sequence[int]], rank: int, number: int
) -> TensorLabels:
    """Return operand `number`, with those axes of its joint labels tied along which units cannot differ in other operands."""
    labels, shift = owners[number], rank - len(shapes[number])
    assert labels.joint is not None
    ordinary, dims = None, labels.joint.dims
    for dim in dims:
        for other, shape in zip(owners, shapes, strict=True):
            k = dim + shift - (rank - len(shape))
            if other is labels or k < 0 or shape[k] == 1 or (other.joint is not None and other.joint.nodes.shape[k] > 1):
                continue
            axis = other.axes[k]
            if axis is None or (not axis.is_uniform and call.tracer.is_constant(axis)):
                ordinary = dim
            elif not axis.is_uniform:
                for rest in dims:
                    labels = labels if rest == dim else call.tracer.tie(labels, rest)
                return labels
    return labels if ordinary is None else call.tracer.tie(labels, ordinary)


@handles(
    "where masked_fill prelu _prelu_kernel rrelu dropout native_dropout hardswish hardsigmoid mish log_sigmoid_forward softplus"
)
def spread(call: Call) -> Outputs:
    """Unite the units at each position of an element-wise operator."""
    tensors = call.tensors
    if call.name == "where":
        tensors = [
            call.arguments[name] for name in ("self", "other", "condition") if isinstance(call.arguments.get(name), Tensor)
        ]
    owners = [call.tracer.joint_labels(t) for t in tensors]
    labels = combine(call, owners, [tuple(t.shape) for t in tensors], tuple(call.out.shape))
    return [labels] * max(1, len(call.outputs))


@handles("glu")
def _glu(call: Call) -> Outputs:
    labels, dim = call.labels("self").computed(), call.dim(-1)
    axis = labels.axes[dim]
    if axis is None:
        return labels
    call.tracer.unite_rows(axis.nodes.reshape(2, -1))
    return labels.with_axis(dim, axis.take(slice(0, axis.size // 2)))


@handles("bernoulli uniform normal exponential random log_normal cauchy geometric")
def _draw(call: Call) -> Outputs:
    """Label random numbers that are written over a tensor or drawn in its shape."""
    return call.labels("self mean std").without_zero()
