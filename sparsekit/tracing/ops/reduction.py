"""Operators that reduce or resample axes: sums, means, extremes, pooling, interpolation; and packed sequences."""

from sparsekit.labels.values import Labels, TensorLabels
from sparsekit.tracing.ops.call import Call, Outputs, handles
from sparsekit.tracing.ops.probe import probe

_ADDING = frozenset({"sum", "linalg_vector_norm", "norm", "nansum"})
_KEEP_ZERO = frozenset({"sum", "mean", "amax", "amin", "max", "min", "linalg_vector_norm", "norm", "std", "var"})
_AVERAGES = frozenset({"mean", "var", "std", "var_mean", "std_mean"})


@handles(
    "sum mean amax amin max min var std prod any all argmax argmin norm linalg_vector_norm var_mean std_mean "
    "logsumexp median mode nansum aminmax"
)
def _reduce(call: Call) -> Outputs:
    tensor = call.arguments["self"]
    if not call.outputs:
        call.fix_inputs(f"reduced by {call.name!r}")
        return None
    rank = tensor.dim()
    given = call.arg("dim")
    chosen = list(range(rank)) if given is None or given == [] else [given] if isinstance(given, int) else list(given)
    gone = {d % max(rank, 1) for d in chosen}
    labels = call.labels("self", *gone) if rank else call.labels("self")
    for d in gone:
        axis = labels.axes[d] if d < rank else None
        if axis is None or axis.is_uniform:
            continue
        if call.name in _ADDING:
            call.tracer.read(axis, None)  # exact where the value of a dropped unit is zero
        else:
            call.tracer.fix(axis, f"reduced over its units by {call.name!r}", averaged=call.name in _AVERAGES)
    kept = labels if call.name in _KEEP_ZERO else labels.without_zero()
    keepdim = call.outputs[0].dim() == rank and rank > 0 and bool(gone)
    axes = [None if d in gone else axis for d, axis in enumerate(kept.units) if keepdim or d not in gone]
    return [TensorLabels(tuple(axes)) if out.dim() == len(axes) else None for out in call.outputs]


@handles("cumsum cumprod cummax cummin sort topk logcumsumexp")
def _scan(call: Call) -> Outputs:
    dim = call.dim(-1)
    labels = call.labels("self", dim)
    call.tracer.fix(labels.axes[dim], f"ordered or accumulated over its units by {call.name!r}")
    return [labels.without_zero().with_axis(dim, None)] * len(call.outputs)


@handles("_fft_r2c _fft_c2r _fft_c2c")
def _fourier(call: Call) -> Outputs:
    """Follow units through a transform over other axes, which is linear and the same for every unit."""
    rank = call.arguments["self"].dim()
    chosen = {dim % rank for dim in call.arg("dim")}
    labels = call.labels("self", *chosen)
    call.tracer.fix([labels.axes[dim] for dim in chosen], f"transformed over its units by {call.name!r}")
    return TensorLabels(tuple(None if dim in chosen else axis for dim, axis in enumerate(labels.axes)))


@handles("_cdist_forward _euclidean_dist")
def _distance(call: Call) -> Outputs:
    """Unite both sides of a norm of differences: a unit adds nothing if it is zero on both."""
    tracer, pair = call.tracer, [call.labels("x1", -1), call.labels("x2", -1)]
    left, right = (labels.axes[-1] for labels in pair)
    if left is None or right is None or left.is_uniform or right.is_uniform or call.arg("p", 2.0) <= 0:
        return probe(call, f"compared by {call.name!r} with values that belong to no unit")
    tracer.unite(left.nodes, right.nodes)
    for labels in pair:
        tracer.make(labels, -1)
    tracer.read(Labels(left.nodes, tracer.both(left.sources, right.sources)), None)
    tracer.fix((*pair[0].axes[:-2], *pair[1].axes[:-2]), f"compared pair by pair by {call.name!r}")
    return TensorLabels((*pair[0].axes[:-2], pair[0].axes[-2], pair[1].axes[-2])).without_zero()


@handles(
    "max_pool2d_with_indices max_pool3d_with_indices max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d"
)
def _resample(call: Call) -> Outputs:
    labels, tensor, out = call.labels("self input"), call.tensors[0], call.outputs[0]
    spatial = int("".join(c for c in call.name if c in "123")[:1] or 2)
    lead = tensor.dim() - spatial
    # Adaptive pooling does nothing along axes that already have the output size.
    same = [d for d in range(lead, tensor.dim()) if "adaptive" in call.name and out.shape[d] == tensor.shape[d]]
    left = {*range(lead), *same}
    changed = [axis for d, axis in enumerate(labels.axes) if d not in left]
    call.tracer.fix(changed, f"resampled along an axis of units by {call.name!r}")
    made = TensorLabels(tuple(axis if d in left else None for d, axis in enumerate(labels.units)))
    return [made] * len(call.outputs)


@handles("_pack_padded_sequence _pad_packed_sequence")
def _packed(call: Call) -> Outputs:
    labels = call.labels("input data")
    call.tracer.fix(labels.axes[:-1], "an axis of units is packed into a sequence")
    last, out = labels.axes[-1], call.outputs[0]
    if last is not None and call.name == "_pad_packed_sequence" and call.arg("padding_value", 0) != 0:
        last = last.without_zero()
    return [TensorLabels((*([None] * (out.dim() - 1)), last)), None]
