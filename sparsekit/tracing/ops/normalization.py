"""Operators that normalize: over a batch, over groups of channels, over the last axes, and softmax."""

from torch import Tensor, nn

from sparsekit.labels.values import TensorLabels
from sparsekit.layers.parametrized import normed_weight
from sparsekit.tracing.ops.call import Call, Outputs, handles

BATCH_NORMS = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm batch_norm "
    "_batch_norm_no_update miopen_batch_norm _batch_norm_with_update"
)


@handles(BATCH_NORMS)
def _batch_norm(call: Call) -> Outputs:
    x = call.labels("input")
    made = call.tracer.scaled(x.units[1], *map(call.arguments.get, ("weight", "bias", "running_mean", "running_var")))
    others = x.without_zero().with_axis(1, None)
    # Statistics over the batch or over space would mix units on those axes.
    call.tracer.fix(others.axes, f"normalized by {call.name!r} across an axis of units")
    return [others.with_axis(1, made), None, None, None][: len(call.outputs)]


@handles("native_group_norm")
def _group_norm(call: Call) -> Outputs:
    tracer, x = call.tracer, call.labels("input")
    groups = int(call.arg("group"))
    tracer.fix(x.axes[2:], "normalized by 'group_norm' across an axis of units")
    channel = x.units[1]
    if channel is not None:
        if groups == 1:
            tracer.fix(channel, "normalized over all its units by 'group_norm'", averaged=True)
        else:
            # Part of a norm group cannot be removed (its statistics would change); a whole group can.
            rows = channel.nodes.reshape(groups, -1)
            tracer.unite_rows(rows.T)
            if not isinstance(call.arguments.get("weight"), Tensor):  # its length would show the number of channels
                if isinstance(tracer.running, nn.GroupNorm):
                    tracer.count(rows[:, 0], tracer.module, "num_groups")
                    tracer.count(channel.nodes, tracer.module, "num_channels")
                elif call.tracer.given.held(groups):
                    tracer.sized(rows[:, 0], [groups])
                elif groups != channel.size:
                    tracer.fix(channel, "normalized by 'group_norm' with a fixed number of groups")
    made = tracer.scaled(channel, *map(call.arguments.get, ("weight", "bias")))
    return [TensorLabels((x.without_zero().axes[0], made, *([None] * (len(x.axes) - 2)))), None, None]


@handles("native_layer_norm _fused_rms_norm")
def _layer_norm(call: Call) -> Outputs:
    tracer, count = call.tracer, len(call.arg("normalized_shape", []))
    whole = range(-count, 0)
    x = call.labels("input self", *whole)
    tracer.fix(x.axes[len(x.axes) - count :], "normalized over its units by 'layer_norm'", averaged=True)
    for name in ("weight", "bias"):
        if isinstance(call.arguments.get(name), Tensor):
            tracer.fix(call.labels(name), "scale of a norm over all units", quiet=True)
    return [x.without_zero()] + [None] * (len(call.outputs) - 1)


@handles("_softmax _log_softmax _safe_softmax")
def _softmax(call: Call) -> Outputs:
    dim = call.dim(-1)
    x = call.labels("self", dim)
    call.tracer.fix(x.axes[dim], "passes through softmax over its units")
    # The fixed axis keeps its labels: if it is the model's output, no other reason is given.
    return x.without_zero()


@handles("_weight_norm_interface")
def _weight_norm(call: Call) -> Outputs:
    direction, length = call.arguments["v"], call.arguments["g"]
    return [normed_weight(call.tracer, direction, length, call.arg("dim", 0)), None]
