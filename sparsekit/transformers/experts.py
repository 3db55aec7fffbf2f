"""Mixtures of experts as transformers has them: the unit is a whole expert, with its row of the router.

An expert owns its matrices, stacked along axis 0 of two weights, and the row of the router that decides which tokens it gets.
Under a mask the router's softmax runs over kept experts alone, as in the narrow model, so that no token is sent to another one.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import NormNote, TensorLabels
from sparsekit.layers.base import LayerRule

_FAMILIES = {
    "flex_olmo": "FlexOlmo",
    "minimax": "MiniMax",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_vl_moe": "Qwen3VLMoeText",
}
"""Those whose router is a softmax over all experts, of which each token takes the largest."""


def _names(what: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{file}.modeling_{file}.{name}{what}" for file, name in _FAMILIES.items())


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call in the order of the signature of `forward`."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    return list(bound.arguments.values())[1:]


def _hidden(tracer: Tracer, x: Tensor) -> TensorLabels:
    """Return the last axis of the input of a layer over tokens; its other axes must be ordinary ones."""
    labels = tracer.labels(x, *range(x.dim() - 1))
    tracer.fix(labels.axes[:-1], "an axis of units runs through a mixture of experts as positions or batch")
    return TensorLabels(labels.axes[-1:])


class RouterRule(LayerRule):
    """The router: a score for each expert, a softmax over them, and the `top_k` largest of each token."""

    type_names: ClassVar[tuple[str, ...]] = _names("TopKRouter")

    def resize(self, module: nn.Module) -> None:
        """Set `num_experts` and `hidden_dim`."""
        router: Any = module
        router.num_experts, router.hidden_dim = router.weight.shape

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Label the scores with the experts; what was chosen for a token tells the experts whose rows these are."""
        outputs = run(*args, **kwargs)
        router: Any = module
        (x,), weight, top_k = _given(module, args, kwargs), router.weight, int(router.top_k)
        labels = tracer.labels(weight)
        experts = labels.axes[0]
        tracer.contract(_hidden(tracer, x), 0, labels, 1)
        if experts is None:
            return outputs
        if tracer.entry(weight) is None or experts.size <= top_k:
            tracer.fix(experts, f"each token takes {top_k} of {experts.size} experts, or the router's weight is computed")
        cause = tracer.cause("routed by one call that sees other experts from time to time")
        tracer.norms.setdefault((tracer.module, 0), []).append(NormNote("softmax", experts.nodes, -1, cause))
        tracer.least.append((experts.nodes, top_k))
        logits, *chosen = outputs
        tracer.set(logits, TensorLabels((*[None] * (logits.dim() - 1), experts.without_zero())))
        for tensor in chosen:  # whoever else uses them keeps the experts
            tracer.set(tensor, TensorLabels((None,) * tensor.dim(), mixed=experts.nodes))
        return outputs


class ExpertsRule(LayerRule):
    """The experts: `gate_up_proj` (experts, 2 · inner features, width) and `down_proj` (experts, width, inner features).

    Inner features are units too, the same ones in every expert. The operators work through the experts in their order.
    """

    type_names: ClassVar[tuple[str, ...]] = _names("Experts")
    in_order_of_units: ClassVar[bool] = True

    def resize(self, module: nn.Module) -> None:
        """Set `num_experts`, `hidden_dim` and `intermediate_dim`."""
        experts: Any = module
        experts.num_experts, experts.hidden_dim, experts.intermediate_dim = experts.down_proj.shape

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Unite both weights with the rows of the router, and the two halves of the first with the columns of the second."""
        out = run(*args, **kwargs)
        x, index, _ = _given(module, args, kwargs)
        first, second = (tracer.labels(module.get_parameter(name)) for name in ("gate_up_proj", "down_proj"))
        tracer.contract(_hidden(tracer, x), 0, first, 2)
        experts, others = first.axes[0], second.axes[0]
        if experts is not None and others is not None:
            tracer.make(first, 0, "expert")
            tracer.unite(experts.nodes, others.nodes)
            tracer.read(others.without_zero(), others.nodes)
            routed = tracer.labels(index).mixed
            if routed is None:
                tracer.fix(experts, "a router that is not known chooses the experts")
            else:
                tracer.unite(routed, experts.nodes)
        tracer.make(second, 1, "feature")
        tracer.set(out, TensorLabels((*[None] * (out.dim() - 1), second.axes[1])))
        halves, columns = first.axes[1], second.axes[2]
        if halves is not None and columns is not None:
            tracer.make(first, 1, "feature")
            tracer.unite_rows(np.concatenate([columns.nodes[None], halves.nodes.reshape(2, -1)]))
            tracer.read(columns.without_zero(), columns.nodes)
            if getattr(getattr(module, "config", None), "_experts_implementation", "eager") != "eager":
                reason = "fused products of experts take few widths; set_experts_implementation('eager') takes any"
                tracer.fix(columns, reason, quiet=True)
        return out
