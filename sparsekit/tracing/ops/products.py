"""Operators that multiply and sum over an axis: matrix products, convolutions, the look-up of embeddings, fused attention."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sparsekit.graph.groups import Kind
from sparsekit.labels.facts import ALIGNED, Count, Heads, Multiple
from sparsekit.labels.values import Labels, TensorLabels
from sparsekit.tracing.ops.call import Call, Outputs, handles
from sparsekit.tracing.ops.pointwise import combine


def _batch(call: Call, owners: Sequence[TensorLabels], count: int) -> tuple[Labels | None, ...]:
    """Return the labels of the first `count` axes of a product, along which equal positions are multiplied.

    In products of activations, the positions on these axes are attention heads. The product is zero where one factor is.
    """
    shape = call.out.shape[:count]
    factors = []
    for owner in owners:
        axes = tuple(_repeated(axis, size) for axis, size in zip(owner.axes, shape, strict=False))
        factors.append(TensorLabels(axes, owner.entry))
    merged = combine(call, factors, [shape] * len(owners), shape, "mul").axes
    if all(owner.entry is None for owner in owners):
        call.tracer.facts += [Heads(axis.nodes[axis.nodes >= 0]) for axis in merged if axis is not None]
    return merged


def _repeated(labels: Labels | None, size: int) -> Labels | None:
    """Return the labels of key or value heads, repeated if each serves several consecutive query heads."""
    if labels is None or labels.size == size or size % labels.size:
        return labels
    return labels.take(np.repeat(np.arange(labels.size, dtype=np.int64), size // labels.size))


@handles(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention"
)
def _attention(call: Call) -> Outputs:
    """Follow units through softmax(q k^T · scale + mask) v over the last two axes; all axes before are batch or heads."""
    tracer, out = call.tracer, call.outputs[0]
    rank = out.dim()
    query, key = call.labels("query", -1, -2), call.labels("key", -1, -2)
    value = call.labels("value", -2)
    tracer.fix([query.axes[-1], key.axes[-1]], "scaled by the size of its head")
    tracer.fix([query.axes[-2], key.axes[-2], value.axes[-2]], "attended over an axis of units")
    lead = _batch(call, [query, key, value], rank - 2)
    labels = TensorLabels((*lead, None, value.units[-1]))
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    if isinstance(mask, Tensor):
        # The mask is added to the maps, which have the leading axes of the result.
        maps = (*out.shape[:-1], call.arguments["key"].shape[-2])
        own = TensorLabels((*lead, None, None))
        combine(call, [own, tracer.labels(mask, -1, -2)], [maps, tuple(mask.shape)], maps, "add")
    return [labels] + [None] * (len(call.outputs) - 1)


def _outer(call: Call, owner: TensorLabels, dim: int, kind: Kind | None = None) -> Labels | None:
    """Return an axis of a factor that stays in the product; if the factor is a state entry, the axis produces units."""
    call.tracer.make(owner, dim, kind)
    return owner.units[dim]


def _product(call: Call, a: TensorLabels, b: TensorLabels) -> TensorLabels:
    """Follow units through (…, m, k) times (…, k, n), or vectors of the last axis."""
    a_last, b_first = len(a.axes) - 1, max(len(b.axes) - 2, 0)
    call.tracer.contract(a, a_last, b, b_first)
    axes = [*_batch(call, [a, b], 1)] if len(a.axes) == 3 else []
    if len(a.axes) >= 2:
        axes.append(_outer(call, a, a_last - 1))
    if len(b.axes) >= 2:
        axes.append(_outer(call, b, len(b.axes) - 1))
    return TensorLabels(tuple(axes))


def _with_bias(call: Call, product: TensorLabels, name: str, space: int = 0) -> TensorLabels:
    """Return a product with its bias, if there is one, added along all but the last axes of space."""
    bias = call.arguments.get(name)
    if not isinstance(bias, Tensor):
        return product
    labels, shape = call.tracer.labels(bias), tuple(call.out.shape)
    column = TensorLabels((*labels.axes, *([None] * space)), labels.entry)
    return combine(call, [product, column], [shape, (*bias.shape, *([1] * space))], shape, "add")


@handles("mm bmm mv dot addmm addmv baddbmm matmul")
def _multiply(call: Call) -> Outputs:
    names = [n for n in call.arguments if n in ("mat", "mat1", "mat2", "batch1", "batch2", "vec", "vec2", "tensor", "other")]
    first = "self" if len(names) == 1 else names[0]
    a = call.labels(first, -1)
    b = call.labels(names[-1], max(call.arguments[names[-1]].dim() - 2, 0))
    product = _product(call, a, b)
    return product if first == "self" else _with_bias(call, product, "self")


@handles("_grouped_mm grouped_mm_fallback")
def _grouped(call: Call) -> Outputs:
    """Follow units through (rows, k) times (groups, k, n): each group of rows is multiplied by its own matrix."""
    tracer, rows, matrices = call.tracer, call.tensor("self input"), call.tensor("mat2 weight")
    if (rows.dim(), matrices.dim()) != (2, 3):
        call.fix_inputs(f"{call.name!r} of tensors with {rows.dim()} and {matrices.dim()} axes")
        return None
    a, b = tracer.labels(rows, -1), tracer.labels(matrices, 1)
    tracer.fix([a.axes[0], b.axes[0]], "an axis of units is divided into groups of rows")
    tracer.contract(a, 1, b, 1)
    aligned = [a.axes[1], b.axes[1], b.axes[2] if matrices.stride(2) == 1 else None]
    tracer.facts += [Multiple(axis.nodes[axis.nodes >= 0], ALIGNED) for axis in aligned if axis is not None]
    return _with_bias(call, TensorLabels((None, _outer(call, b, 2, "feature"))), "bias")


@handles("linear")
def _linear(call: Call) -> Outputs:
    a, w = call.labels("input", -1), call.labels("weight")
    call.tracer.contract(a, len(a.axes) - 1, w, 1)
    return _with_bias(call, TensorLabels((*a.units[:-1], _outer(call, w, 0))), "bias")


@handles("convolution _convolution convolution_overrideable mkldnn_convolution")
def _convolution(call: Call) -> Outputs:
    tracer = call.tracer
    x, w = call.labels("input"), call.labels("weight")
    groups, transposed = int(call.arg("groups", 1)), bool(call.arg("transposed", False))
    tracer.fix(x.axes[2:], "convolved along an axis of units")
    in_dim, out_dim = (0, 1) if transposed else (1, 0)
    made, space = _channels(call, x, w, groups, in_dim, out_dim), call.out.dim() - 2
    return _with_bias(call, TensorLabels((x.units[0], made, *([None] * space))), "bias", space)


def _channels(call: Call, x: TensorLabels, w: TensorLabels, groups: int, in_dim: int, out_dim: int) -> Labels | None:
    """Unite the input channels with the weight and return the labels of the output channels."""
    tracer = call.tracer
    if groups == 1:
        tracer.contract(x, 1, w, in_dim)
        return _outer(call, w, out_dim)
    channels, inputs, outputs = call.arguments["input"].shape[1], x.units[1], w.axes[out_dim]
    per_group = channels // groups
    if per_group == 1:
        if inputs is not None:
            tracer.sized(inputs.nodes, [groups])
        return _depthwise(call, inputs, w, groups, transposed=in_dim == 0)
    weight_in = w.axes[in_dim]
    if inputs is None or weight_in is None:
        tracer.fix(inputs, "convolved with a weight that belongs to no unit")
        tracer.fix(weight_in, "reads values that belong to no unit", quiet=True)
    elif in_dim == 1:
        # Each group has its own channels but one axis of the weight serves all: a unit is one position of every group.
        for row in inputs.nodes.reshape(groups, per_group):
            tracer.unite(row, weight_in.nodes)
        _read(call, inputs, w, np.tile(weight_in.nodes, groups))
    else:
        tracer.unite(inputs.nodes, weight_in.nodes)
        tracer.unite_rows(weight_in.nodes.reshape(groups, -1))
        _read(call, inputs, w, weight_in.nodes)
    if outputs is None:
        return None
    tracer.make(w, out_dim)
    if in_dim == 1:
        tracer.unite_rows(outputs.nodes.reshape(groups, -1))
        return outputs
    return Labels(np.tile(outputs.nodes, groups), np.tile(outputs.sources, groups))


def _depthwise(call: Call, inputs: Labels | None, w: TensorLabels, groups: int, *, transposed: bool) -> Labels | None:
    """Unite the input and all outputs of each group, if groups have one input channel; return the output channels."""
    tracer, rows = call.tracer, w.axes[0]
    if rows is None:
        tracer.fix(inputs, "convolved with a weight that belongs to no unit")
        return None
    multiplier = call.outputs[0].shape[1] // groups
    tracer.make(w, 0)
    if transposed:
        tracer.fix(w.axes[1], "outputs of one channel group", quiet=True)
        rows = rows.take(np.repeat(np.arange(groups, dtype=np.int64), multiplier))
    if inputs is None:
        tracer.fix(rows, "follows values that belong to no unit", quiet=w.entry is not None)
        return None
    if rows.is_uniform:  # one filter for all groups
        if rows.numbers and (inputs.nodes >= 0).all():
            tracer.facts.append(Count(inputs.nodes, (rows.numbers,)))
        return inputs.take(np.repeat(np.arange(groups, dtype=np.int64), multiplier))
    tracer.unite(np.repeat(inputs.nodes, multiplier), rows.nodes)
    # Outputs are the input's units; rows of the weight gate them.
    return rows


def _read(call: Call, values: Labels, w: TensorLabels, columns: np.typing.NDArray[np.int64]) -> None:
    own = w.entry is not None and w.entry.is_parameter
    call.tracer.read(values, columns if own else None)


@handles("embedding _embedding_bag _embedding_bag_forward_only")
def _embedding(call: Call) -> Outputs:
    tracer, w = call.tracer, call.labels("weight")
    indices = call.arguments["indices"]
    for tensor in call.tensors:
        if tensor is not call.arguments["weight"]:
            tracer.fix(tracer.labels(tensor), f"used as an index by {call.name!r}")
    tracer.fix(w.axes[0], "vocabulary", quiet=True)
    column = _outer(call, w, 1)
    lead = indices.dim() if call.name == "embedding" else 1
    return [TensorLabels((*([None] * lead), column)), None, None, None][: max(1, len(call.outputs))]
