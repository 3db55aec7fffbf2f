"""What a write through a view does to the labels of the tensors that share its memory: `out[:, t] = h` in a loop."""

from collections.abc import Callable

from torch import Tensor

from sparsekit.layers.labels.values import IntArray, Labels, TensorLabels


def written_over(
    tensor: Tensor,
    before: TensorLabels,
    target: Tensor,
    written: TensorLabels,
    both: Callable[[IntArray, IntArray], IntArray],
) -> tuple[TensorLabels, list[tuple[IntArray, IntArray]]] | None:
    """Labels of a tensor after `target`, a view of the same memory, was written to.

    Args:
        tensor: Another view of that memory, or `target` itself.
        before: Its labels until now.
        target: What was written to.
        written: Labels of the values written.
        both: Sources of a value that is one of two values.

    Returns:
        The labels, and runs of nodes that become one unit; None if units would lie beside values that belong to no unit, or
        if axes cannot be matched.
    """
    if before.parts or before.joint or before.entry or written.parts or written.joint:
        return None
    axes: list[Labels | None] = [None] * tensor.dim()
    pairs: list[tuple[IntArray, IntArray]] = []
    for k, labels in enumerate(written.axes):
        if labels is None:
            continue
        d = _same_axis(tensor, target, k)
        own = before.axes[d] if d is not None else None
        if d is None or own is None:
            if labels.is_uniform:
                continue  # a constant does no harm where no units are
            return None
        if own.is_uniform and labels.is_uniform:
            continue  # two constants are not one
        if own.is_uniform or labels.is_uniform:
            nodes = labels.nodes if own.is_uniform else own.nodes
        else:
            pairs.append((own.nodes, labels.nodes))
            nodes = own.nodes
        axes[d] = Labels(nodes, both(own.sources, labels.sources))
    for own, new in zip(before.axes, axes, strict=True):
        if own is not None and not own.is_uniform and new is None:
            return None
    return TensorLabels(tuple(axes)), pairs


def _same_axis(tensor: Tensor, target: Tensor, k: int) -> int | None:
    """The axis of `tensor` whose positions are those of axis `k` of `target`, one by one."""
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
