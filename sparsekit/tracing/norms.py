"""NormRecorder: under prune_hidden_size=True, records while tracing which units each call averages over."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sparsekit._torch import tree_leaves
from sparsekit.labels.facts import Average
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import IntArray, Labels, TensorLabels
from sparsekit.runtime.kept_norms import NormCall, NormMode


class NormRecorder(NormMode):
    """Labels the results of averages over units, which the operators' handlers would make unprunable, and records the calls."""

    def __init__(self, tracer: Tracer, model: nn.Module) -> None:
        super().__init__()
        self.tracer = tracer
        self._modules = dict(model.named_modules())
        for name, module in self._modules.items():
            self.patch(module, name)

    def meet(self, module: str, number: int, call: NormCall, plain: Callable[[], Any]) -> Any:
        """Record the call; label the results if exactly one axis of units is averaged over."""
        tracer = self.tracer
        if call.name in ("softmax", "topk") or not tracer.watching:  # layer rules record those over units
            return plain()
        labels = tracer.joint_labels(call.x)
        dim = _unit_axis(labels, call.dims)
        scales = [t for t in (call.weight, call.bias) if t is not None]
        if dim is not None and any(tracer.joint_labels(t).axes[call.axis_of_scale(dim)] is None for t in scales):
            dim = None
        if dim is None:
            tracer.facts.append(Average(module, number))
            return plain()
        axis = labels.axes[dim]
        assert axis is not None
        cause = tracer.cause("averaged over by one call that sees other units from time to time")
        tracer.facts.append(Average(module, number, call.name, axis.nodes, dim - call.x.dim(), cause))
        self._count(module, call, axis.nodes)
        with tracer.looking_away():
            outputs = plain()
        if call.is_norm:
            answer = self._norm(call, labels, dim, axis)
        else:  # the average of zeros is zero, their spread too
            answer = TensorLabels(tuple(None if d in call.dims else axis for d, axis in enumerate(labels.units)))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                tracer.set(tensor, answer if tensor.dim() == len(answer.axes) else answer.dropped({*call.dims}))
        return outputs

    def _count(self, name: str, call: NormCall, nodes: IntArray) -> None:
        """Record that `normalized_shape` of a layer norm without a scale counts the units: no other size shows them."""
        module = self._modules[name]
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and call.weight is None and len(call.dims) == 1:
            self.tracer.count(nodes, name, "normalized_shape")

    def _norm(self, call: NormCall, x: TensorLabels, dim: int, axis: Labels) -> TensorLabels:
        """Label the result of a norm: it is zero where scale and shift are gated."""
        made = self.tracer.scaled(axis, call.weight, call.bias, dim=call.axis_of_scale(dim), quiet=True)
        if call.name == "rms_norm" and call.weight is None:
            made = axis  # zero stays zero
        return x.without_zero().with_axis(dim, made)


def _unit_axis(labels: TensorLabels, dims: tuple[int, ...]) -> int | None:
    """Return the one axis of units among `dims`, or None if there is none or more than one."""
    if labels.joint is not None or labels.parts is not None or labels.mixed is not None:
        return None
    units = labels.units
    found = [d for d in dims if units[d] is not None]
    return found[0] if len(found) == 1 else None
