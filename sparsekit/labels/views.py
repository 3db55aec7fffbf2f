"""Effects of a write through a view on the labels of the tensors that share its memory: `out[:, t] = h` in a loop."""

from torch import Tensor

from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import Labels, TensorLabels


def written_over(tracer: Tracer, tensor: Tensor, target: Tensor, written: TensorLabels, reason: str) -> TensorLabels | None:
    """Labels of a tensor after values with the labels `written` were written to `target`, a view of the same memory.

    Units that meet there become one. Units along an axis of ordinary values, such as part of a key, are fixed for `reason`;
    those along other axes, such as heads, are not. None if ordinary values were written over units.
    """
    before = tracer.joint_labels(tensor)
    if before.parts or before.joint or before.entry or written.parts or written.joint:
        return None
    axes: list[Labels | None] = [None] * tensor.dim()
    for k, labels in enumerate(written.axes):
        if labels is None:
            continue
        d = _same_axis(tensor, target, k)
        own = before.axes[d] if d is not None else None
        if d is None or own is None:
            if not labels.is_uniform:  # a constant does no harm where no units are
                tracer.fix(labels, reason)
            continue
        if own.is_uniform and labels.is_uniform:
            continue  # two constants are not one
        if not own.is_uniform and not labels.is_uniform:
            tracer.unite(own.nodes, labels.nodes)
        axes[d] = Labels(labels.nodes if own.is_uniform else own.nodes, tracer.both(own.sources, labels.sources))
    lost = any(own is not None and new is None for own, new in zip(before.units, axes, strict=True))
    return None if lost else TensorLabels(tuple(axes))


def _same_axis(tensor: Tensor, target: Tensor, k: int) -> int | None:
    """Return the axis of `tensor` with the same positions as axis `k` of `target`."""
    size, stride = target.shape[k], target.stride(k)
    found = [d for d in range(tensor.dim()) if tensor.shape[d] == size and tensor.stride(d) == stride]
    if len(found) != 1 or stride == 0 or size < 2:
        return None
    # In memory laid out without overlap, the position along an axis can be read off an address.
    for owner, axis in ((tensor, found[0]), (target, k)):
        others = [(owner.shape[d], owner.stride(d)) for d in range(owner.dim()) if d != axis and owner.shape[d] > 1]
        inner = sum((n - 1) * s for n, s in others if s < stride)
        if inner >= stride or any(s % (size * stride) for _, s in others if s >= stride):
            return None
    apart = abs(int(target.storage_offset()) - int(tensor.storage_offset()))
    return found[0] if apart // stride % size == 0 else None
