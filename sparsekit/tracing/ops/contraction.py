"""Operators that multiply and sum over an axis: matrix products, convolutions, and the look-up of embeddings."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sparsekit.layers.labels.values import Labels, TensorLabels
from sparsekit.tracing.ops.attention import merge_heads
from sparsekit.tracing.ops.call import Call, Outputs, table
from sparsekit.tracing.ops.pointwise import combine


def _outer(call: Call, owner: TensorLabels, dim: int) -> Labels | None:
    """An axis of a factor that stays in the product; a state entry makes units there."""
    call.tracer.make(owner, dim)
    return owner.units[dim]


def _product(call: Call, a: TensorLabels, b: TensorLabels) -> TensorLabels:
    """(…, m, k) times (…, k, n), or vectors of the last axis."""
    a_last, b_first = len(a.axes) - 1, max(len(b.axes) - 2, 0)
    call.tracer.contract(a, a_last, b, b_first)
    axes: list[Labels | None] = []
    if len(a.axes) == 3:
        axes.append(merge_heads(call, [a.axes[0], b.axes[0]], [a, b]))
    if len(a.axes) >= 2:
        axes.append(_outer(call, a, a_last - 1))
    if len(b.axes) >= 2:
        axes.append(_outer(call, b, len(b.axes) - 1))
    return TensorLabels(tuple(axes))


def _multiply(call: Call) -> Outputs:
    names = [n for n in call.arguments if n in ("mat1", "mat2", "batch1", "batch2", "vec", "vec2", "tensor", "other")]
    first = "self" if len(names) == 1 else names[0]
    a = call.labels(first, -1)
    b = call.labels(names[-1], max(call.arguments[names[-1]].dim() - 2, 0))
    product = _product(call, a, b)
    if first == "self":
        return product
    bias = call.arguments["self"]
    if not isinstance(bias, Tensor):
        return product
    shape = tuple(call.outputs[0].shape)
    return combine(call, [product, call.tracer.labels(bias)], [shape, tuple(bias.shape)], shape, "add")


def _linear(call: Call) -> Outputs:
    a, w, bias = call.labels("input", -1), call.labels("weight"), call.arguments.get("bias")
    call.tracer.contract(a, len(a.axes) - 1, w, 1)
    product = TensorLabels((*a.units[:-1], _outer(call, w, 0)))
    if bias is None:
        return product
    shape = tuple(call.outputs[0].shape)
    return combine(call, [product, call.tracer.labels(bias)], [shape, tuple(bias.shape)], shape, "add")


def _convolution(call: Call) -> Outputs:
    tracer = call.tracer
    x, w = call.labels("input"), call.labels("weight")
    groups, transposed = int(call.arg("groups", 1)), bool(call.arg("transposed", False))
    for axis in x.axes[2:]:
        tracer.fix(axis, "convolved along an axis of units")
    in_dim, out_dim = (0, 1) if transposed else (1, 0)
    made = _channels(call, x, w, groups, in_dim, out_dim)
    bias = call.arguments.get("bias")
    out = call.outputs[0]
    product = TensorLabels((x.units[0], made, *([None] * (out.dim() - 2))))
    if bias is None:
        return product
    shape = tuple(out.shape)
    column = TensorLabels((tracer.labels(bias).axes[0], *([None] * (out.dim() - 2))), tracer.entry(bias))
    return combine(call, [product, column], [shape, (bias.shape[0], *([1] * (out.dim() - 2)))], shape, "add")


def _channels(call: Call, x: TensorLabels, w: TensorLabels, groups: int, in_dim: int, out_dim: int) -> Labels | None:
    """Unite the input channels with the weight and return the labels of the output channels."""
    tracer = call.tracer
    if groups == 1:
        tracer.contract(x, 1, w, in_dim)
        return _outer(call, w, out_dim)
    channels, inputs, outputs = call.arguments["input"].shape[1], x.units[1], w.axes[out_dim]
    per_group = channels // groups
    if per_group == 1:
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
        _tie(call, weight_in, groups)
        _read(call, inputs, w, weight_in.nodes)
    if outputs is None:
        return None
    tracer.make(w, out_dim)
    if in_dim == 1:
        _tie(call, outputs, groups)
        return outputs
    return Labels(np.tile(outputs.nodes, groups), np.tile(outputs.sources, groups))


def _depthwise(call: Call, inputs: Labels | None, w: TensorLabels, groups: int, *, transposed: bool) -> Labels | None:
    """One input channel per group: the unit is the group, its input and all its outputs."""
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
    tracer.unite(np.repeat(inputs.nodes, multiplier), rows.nodes)
    # The input passes through; the rows gate the outputs.
    return rows


def _tie(call: Call, axis: Labels, groups: int) -> None:
    blocks = axis.nodes.reshape(groups, -1)
    for block in blocks[1:]:
        call.tracer.unite(blocks[0], block)


def _read(call: Call, values: Labels, w: TensorLabels, columns: np.typing.NDArray[np.int64]) -> None:
    own = w.entry is not None and w.entry.is_parameter
    call.tracer.read(values, columns if own else None)


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


HANDLERS = table(
    ("mm bmm mv dot addmm addmv baddbmm matmul", _multiply),
    ("linear", _linear),
    ("convolution _convolution convolution_overrideable mkldnn_convolution", _convolution),
    ("embedding _embedding_bag _embedding_bag_forward_only", _embedding),
)
