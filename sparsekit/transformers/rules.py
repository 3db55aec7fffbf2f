"""Rules for layers of transformers: mixtures of experts and Mamba-2.

An expert is a unit. It owns its matrices, stacked along axis 0 of two weights, and the row of the router that decides which
tokens it gets. Under a mask, the router chooses among kept experts only, as in the narrow model.
"""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from sparsekit.labels.facts import ALIGNED, Average, Least, Multiple
from sparsekit.labels.values import IntArray
from sparsekit.layers import Args, Kwargs, Labels, LayerRule, Run, TensorLabels, Tracer, of_type

_FAMILIES = {
    "flex_olmo": "FlexOlmo",
    "mellum": "Mellum",
    "minimax": "MiniMax",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_vl_moe": "Qwen3VLMoeText",
}
"""Families whose router computes a softmax over all experts, then chooses the largest values for each token."""
_CHOOSE_FIRST = {
    "gpt_oss": "GptOss",
    "granitemoe": "GraniteMoe",
    "granitemoe_swa": "GraniteMoeSWA",
    "granitemoehybrid": "GraniteMoeHybrid",
    "granitemoeshared": "GraniteMoeShared",
    "openai_privacy_filter": "OpenAIPrivacyFilter",
}
"""Families whose router chooses the largest scores for each token, then computes a softmax over these."""


def _names(families: Mapping[str, str], what: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{file}.modeling_{file}.{name}{what}" for file, name in families.items())


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    # Arguments in the order of the signature of `forward`.
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    return list(bound.arguments.values())[1:]


def _hidden(tracer: Tracer, x: Tensor, what: str) -> TensorLabels:
    # Labels of the last axis. Units on other axes become unprunable.
    labels = tracer.labels(x, *range(x.dim() - 1))
    tracer.fix(labels.axes[:-1], f"an axis of units runs through a {what} or batch")
    return TensorLabels(labels.axes[-1:])


class RouterRule(LayerRule):
    """Rule for routers: a score per expert, the choice of the `top_k` largest per token, and a softmax before or after it."""

    type_names: ClassVar[tuple[str, ...]] = _names(_FAMILIES | _CHOOSE_FIRST, "TopKRouter")

    def resize(self, module: nn.Module) -> None:
        """Set `num_experts` and `hidden_dim`."""
        number, width = module.get_parameter("weight").shape
        _set_sizes(module, num_experts=number, hidden_dim=width)

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        """Label the scores with the experts. Labels of the chosen indices tell `ExpertsRule` which router it has."""
        outputs = run(*args, **kwargs)
        router: Any = module
        (x,), weight, top_k = _given(module, args, kwargs), router.weight, int(router.top_k)
        labels = tracer.labels(weight)
        experts = labels.axes[0]
        tracer.contract(_hidden(tracer, x, "mixture of experts as positions"), 0, labels, 1)
        if experts is None:
            return outputs
        if tracer.entry(weight) is None or experts.size <= top_k:
            tracer.fix(experts, f"each token takes {top_k} of {experts.size} experts, or the router's weight is computed")
        if getattr(router, "bias", None) is not None:
            tracer.unite(experts.nodes, _nodes(tracer.labels(router.bias), 0))
        cause = tracer.cause("routed by one call that sees other experts from time to time")
        function = of_type(module, dict.fromkeys(_names(_CHOOSE_FIRST, "TopKRouter"), "topk")) or "softmax"
        tracer.facts.append(Average(tracer.module, 0, function, experts.nodes, -1, cause))
        tracer.facts.append(Least(experts.nodes, top_k))
        for tensor in outputs:
            before = (None,) * (tensor.dim() - 1)
            if tensor.shape[-1] == experts.size > top_k:
                tracer.set(tensor, TensorLabels((*before, experts.without_zero())))
            else:  # indices of chosen experts; other uses of them make the experts unprunable
                tracer.set(tensor, TensorLabels((*before, None), mixed=experts.nodes))
        return outputs


class BalanceRule(LayerRule):
    """Rule for language models, whose loss over router scores (`output_router_logits=True`) uses the number of experts."""

    type_names: ClassVar[tuple[str, ...]] = _names(_FAMILIES | _CHOOSE_FIRST, "ForCausalLM")
    sizes: ClassVar[frozenset[str]] = frozenset({"num_experts"})

    def resize(self, module: nn.Module) -> None:
        """Set `num_experts` if all layers have equally many, which that loss requires."""
        found = {
            len(m.get_parameter("weight")) for m in module.modules() if of_type(m, dict.fromkeys(RouterRule.type_names, m))
        }
        if len(found) == 1:
            _set_sizes(module, num_experts=found.pop())


class ExpertsRule(LayerRule):
    """Rule for experts: `gate_up_proj` (experts, 2 · inner features, width), `down_proj` (experts, width, inner features).

    If `is_transposed`, the last two axes are swapped. If `has_bias`, there are `gate_up_proj_bias` (experts, 2 · inner
    features) and `down_proj_bias` (experts, width). Unless `is_concatenated`, gate and up rows alternate. Inner features are
    units too, shared by all experts. The operators process experts one by one, in order.
    """

    type_names: ClassVar[tuple[str, ...]] = _names(_FAMILIES | _CHOOSE_FIRST, "Experts")
    in_order_of_units: ClassVar[bool] = True

    def resize(self, module: nn.Module) -> None:
        """Set the numbers of experts, of features and of inner features."""
        experts: Any = module
        number, *matrix = experts.down_proj.shape
        width, inner = reversed(matrix) if _is_transposed(module) else matrix
        _set_sizes(module, num_experts=number, hidden_dim=width, hidden_size=width)
        _set_sizes(module, intermediate_dim=inner, intermediate_size=inner)

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        """Unite both weights with the rows of the router, and the two halves of the first with the columns of the second."""
        out = run(*args, **kwargs)
        x, index, _ = _given(module, args, kwargs)
        first, second = (tracer.labels(module.get_parameter(name)) for name in ("gate_up_proj", "down_proj"))
        biases = [tracer.labels(p) for name, p in module.named_parameters(recurse=False) if name.endswith("_bias")]
        row, column = (2, 1) if _is_transposed(module) else (1, 2)
        tracer.contract(_hidden(tracer, x, "mixture of experts as positions"), 0, first, column)
        experts, others = first.axes[0], second.axes[0]
        if experts is not None and others is not None:
            tracer.make(first, 0, "expert")
            for labels in (second, *biases):
                tracer.unite(experts.nodes, _nodes(labels, 0))
            tracer.read(others.without_zero(), others.nodes)
            routed = tracer.labels(index).mixed
            if routed is None:
                tracer.fix(experts, "a router that is not known chooses the experts")
            else:
                tracer.unite(routed, experts.nodes)
        tracer.make(second, row, "feature")
        tracer.set(out, TensorLabels((*[None] * (out.dim() - 1), second.axes[row])))
        for weight, bias in zip((first, second), biases, strict=False):
            tracer.make(bias, 1)
            tracer.unite(_nodes(weight, row), _nodes(bias, 1))
        halves, columns = first.axes[row], second.axes[column]
        if halves is not None and columns is not None:
            tracer.make(first, row, "feature")
            is_concatenated = getattr(module, "is_concatenated", True)
            parts = halves.nodes.reshape(2, -1) if is_concatenated else halves.nodes.reshape(-1, 2).T
            tracer.unite_rows(np.concatenate([columns.nodes[None], parts]))
            tracer.read(columns.without_zero(), columns.nodes)
            kernel = getattr(getattr(module, "config", None), "_experts_implementation", None)
            if kernel == "grouped_mm":
                widths = (columns, first.axes[column])
                tracer.facts += [Multiple(axis.nodes, ALIGNED) for axis in widths if axis is not None]
            elif kernel not in (None, "eager", "batched_mm"):
                reason = f"products of experts by {kernel!r} take few widths; set_experts_implementation('eager') takes any"
                tracer.fix(columns, reason, quiet=True)
        return out


class Mamba2Rule(LayerRule):
    """Rule for Mamba-2 and its copies. Units are heads, with their inputs, gates, step sizes and decay, and state features.

    The gated norm averages over all heads, so heads are prunable only with `prune_hidden_size=True`. If B and C are shared by
    groups of heads, the same head and the same state feature of every group are removed. The rows of `in_proj` are gates,
    inputs, B, C and step sizes, in this order.
    """

    type_names: ClassVar[tuple[str, ...]] = tuple(
        f"transformers.models.{module}.modeling_{module}.{name}"
        for module, name in {
            "mamba2": "Mamba2Mixer",
            "bamba": "BambaMixer",
            "granitemoehybrid": "GraniteMoeHybridMambaLayer",
            "nemotron_h": "NemotronHMamba2Mixer",
            "zamba2": "Zamba2MambaMixer",
        }.items()
    )

    def resize(self, module: nn.Module) -> None:
        mixer: Any = module
        mixer.num_heads = mixer.A_log.shape[0]
        mixer.ssm_state_size = (len(mixer.in_proj.weight) - 2 * mixer.num_heads * mixer.head_dim - mixer.num_heads) // (
            2 * mixer.n_groups
        )
        mixer.intermediate_size, mixer.conv_dim = mixer.num_heads * mixer.head_dim, mixer.conv1d.weight.shape[0]
        _set_sizes(mixer.norm, group_size=mixer.intermediate_size // mixer.n_groups)

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        """Unite the positions of each head in all tensors, and record the norm over all heads."""
        out = run(*args, **kwargs)
        mixer: Any = module
        x = args[0] if args else kwargs["hidden_states"]
        inputs, outputs = tracer.labels(mixer.in_proj.weight), tracer.labels(mixer.out_proj.weight)
        tracer.contract(_hidden(tracer, x, "state space as time"), 0, inputs, 1)
        tracer.make(outputs, 0)
        rows = tracer.scaled(outputs.axes[0], mixer.out_proj.weight, mixer.out_proj.bias)
        tracer.set(out, TensorLabels((*[None] * (out.dim() - 1), rows)))
        if mixer.num_heads > 1:
            self._unite(tracer, mixer, inputs, outputs)
        self._unite_states(tracer, mixer)
        return out

    def _unite_states(self, tracer: Tracer, mixer: Any) -> None:
        """Unite the rows of B and C of each state feature, which are zero where the rows of the convolution are."""
        size = 2 * mixer.n_groups * mixer.ssm_state_size
        tensors = {mixer.in_proj: slice(2 * mixer.intermediate_size, 2 * mixer.intermediate_size + size)}
        tensors[mixer.conv1d] = slice(mixer.intermediate_size, None)
        axes = [
            (layer, Labels(axis.nodes[part], axis.sources[part]))
            for layer, part in tensors.items()
            for tensor in (layer.weight, layer.bias)
            if tensor is not None and (axis := tracer.labels(tensor).axes[0]) is not None
        ]
        tracer.unite_rows(axes[0][1].nodes.reshape(-1, mixer.ssm_state_size))
        for _, axis in axes:
            tracer.unite(axes[0][1].nodes, axis.nodes)
            tracer.make_nodes(axis.nodes, "feature")
        zero = [axis.sources for layer, axis in axes if layer is mixer.conv1d]
        tracer.read(Labels(axes[0][1].nodes, zero[0] if len(zero) == 1 else tracer.both(*zero)), None)

    def _unite(self, tracer: Tracer, mixer: Any, inputs: TensorLabels, outputs: TensorLabels) -> None:
        wide, count = mixer.intermediate_size, mixer.num_heads
        rows = _nodes(inputs, 0)
        heads = rows[:wide].reshape(count, -1)[:, 0]
        tracer.unite_rows(heads.reshape(mixer.n_groups, -1))
        of_values = np.repeat(heads, mixer.head_dim)

        def unite(tensor: Tensor | None, *parts: slice) -> None:
            if tensor is None:
                return
            for part in parts:
                nodes = _nodes(tracer.labels(tensor), 0)[part]
                tracer.unite(heads if nodes.size == count else of_values, nodes)

        everything = slice(None)
        for tensor in (mixer.in_proj.weight, mixer.in_proj.bias):
            unite(tensor, slice(wide), slice(wide, 2 * wide), slice(-count, None))
        tracer.make_nodes(rows[: 2 * wide], "head")
        for tensor in (mixer.conv1d.weight, mixer.conv1d.bias):
            unite(tensor, slice(wide))
        for tensor in (mixer.norm.weight, mixer.A_log, mixer.D, mixer.dt_bias):
            unite(tensor, everything)
        columns = _nodes(outputs, 1)
        tracer.unite(of_values, columns)
        tracer.read(Labels(columns, np.zeros_like(columns)), columns)
        if not tracer.kept_norms:
            tracer.fix(heads, "normalized over all heads by the gated norm of Mamba-2", averaged=True)
            return
        cause = tracer.cause("averaged over by one call that sees other heads from time to time")
        averaged = of_values[: getattr(mixer.norm, "group_size", wide)]  # all groups keep the same heads
        tracer.facts.append(Average(f"{tracer.module}.norm", 0, "mean", averaged, -1, cause))


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "is_transposed", False))


def _nodes(labels: TensorLabels, dim: int) -> IntArray:
    axis = labels.axes[dim]
    return np.zeros(0, dtype=np.int64) if axis is None else axis.nodes


def _set_sizes(module: nn.Module, **sizes: int) -> None:
    """Set the size attributes that the module has, since their names differ between model families."""
    for name, size in sizes.items():
        if hasattr(module, name):
            setattr(module, name, size)
