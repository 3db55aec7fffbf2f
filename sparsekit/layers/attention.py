"""Rule for `nn.MultiheadAttention`. A unit is a head: rows of the three projections, and columns of the output projection.

If the remaining heads together are not as wide as the input, the layer becomes a `NarrowMultiheadAttention`.
"""

import inspect
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from sparsekit._torch import set_packed_projections
from sparsekit.labels.values import IntArray
from sparsekit.layers import NOT_ZERO, Args, Kwargs, Labels, LayerRule, Run, TensorLabels, Tracer
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention

_ARGUMENTS = tuple(inspect.signature(nn.MultiheadAttention.forward).parameters)[1:]


def _projections(module: nn.MultiheadAttention) -> list[Tensor]:
    # Weights of queries, keys and values; one tensor if they are stacked.
    if module.in_proj_weight is not None:
        return [module.in_proj_weight]
    return [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]


def _is_whole(module: nn.MultiheadAttention) -> bool:
    """Return whether all heads together are as wide as queries and output, as torch's own forward needs."""
    weights = _projections(module)
    rows = weights[0].shape[0] // 3 if len(weights) == 1 else weights[0].shape[0]
    return rows == weights[0].shape[1] == module.out_proj.weight.shape[0]


class MultiheadAttentionRule(LayerRule):
    """Rule for `nn.MultiheadAttention`. Its inputs, heads and outputs carry different units."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.MultiheadAttention,)

    def resize(self, module: nn.Module) -> None:
        if type(module) not in (nn.MultiheadAttention, NarrowMultiheadAttention):
            return  # a subclass may use its sizes in other ways, so its heads are unprunable
        assert isinstance(module, nn.MultiheadAttention)
        weights = _projections(module)
        module.embed_dim, module.kdim, module.vdim = weights[0].shape[1], weights[-2:][0].shape[1], weights[-1].shape[1]
        module.num_heads = weights[0].shape[0] // module.head_dim // (3 if len(weights) == 1 else 1)
        whole = _is_whole(module)
        module.__class__ = nn.MultiheadAttention if whole else NarrowMultiheadAttention
        # False also switches off the fused path of a transformer layer, which assumes a square projection.
        set_packed_projections(module, whole and len(weights) == 1)

    def trace(self, tracer: Tracer, module: nn.Module, run: Run, args: Args, kwargs: Kwargs) -> Any:
        assert isinstance(module, nn.MultiheadAttention)
        outputs = run(*args, **kwargs)
        given = dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs)
        inputs = [given[name] for name in ("query", "key", "value")]
        own = [p for p in module.parameters() if p is not None]
        if type(module) not in (nn.MultiheadAttention, NarrowMultiheadAttention) or any(tracer.entry(p) is None for p in own):
            for tensor in [*own, *inputs]:
                labels = tracer.labels(tensor)
                tracer.fix(labels, "a subclass of nn.MultiheadAttention, or one with computed weights, keeps its heads")
                tracer.make(labels, 0)
            return outputs
        for tensor in inputs:
            others = tracer.labels(tensor, *range(tensor.dim() - 1)).axes[:-1]
            tracer.fix(others, "an axis of units runs through attention as positions or batch")
        weights = _projections(module)
        columns = [tracer.labels(weight) for weight in weights] * (3 if len(weights) == 1 else 1)
        for tensor, weight in zip(inputs, columns, strict=True):
            tracer.contract(TensorLabels(tracer.labels(tensor).axes[-1:]), 0, weight, 1)
        heads = self._heads(tracer, module)
        self._masks(tracer, heads, given.get("attn_mask"), module)
        self._label(tracer, module, heads, outputs, inputs[0])
        return outputs

    def _heads(self, tracer: Tracer, module: nn.MultiheadAttention) -> IntArray:
        """Unite the positions of each head; return one node for each head."""
        heads: IntArray | None = None
        stacked = [module.in_proj_weight, module.in_proj_bias]
        separate = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        for tensor, dim in [*((t, 0) for t in (*stacked, *separate)), (module.bias_k, 2), (module.bias_v, 2)]:
            if tensor is None:
                continue
            labels = tracer.labels(tensor)
            rows = labels.axes[dim]
            assert rows is not None
            tracer.make(labels, dim, "head")
            blocks = rows.nodes.reshape(-1, module.num_heads, module.head_dim)
            heads = blocks[0, :, 0] if heads is None else heads
            tracer.unite(np.broadcast_to(heads[:, None], blocks.shape).reshape(-1), rows.nodes)
        assert heads is not None
        columns = tracer.labels(module.out_proj.weight).axes[1]
        assert columns is not None
        values = np.repeat(heads, module.head_dim)
        tracer.unite(values, columns.nodes)
        tracer.read(Labels(values, np.full(values.size, NOT_ZERO, dtype=np.int64)), columns.nodes)
        return heads

    def _masks(self, tracer: Tracer, heads: IntArray, mask: Tensor | None, module: nn.MultiheadAttention) -> None:
        # A mask with one entry for each head is pruned with the heads, if possible.
        if mask is None or mask.dim() != 3:
            return
        axis = tracer.labels(mask, 1, 2).axes[0]
        if axis is not None and not axis.is_uniform:
            tracer.unite(np.tile(heads, axis.size // module.num_heads), axis.nodes)
        elif axis is None:
            tracer.fix(heads, "attn_mask has a map for each head, which belongs to no unit")

    def _label(self, tracer: Tracer, module: nn.MultiheadAttention, heads: IntArray, outputs: Any, query: Tensor) -> None:
        attended, maps = outputs
        rows = tracer.labels(module.out_proj.weight).axes[0]
        rows = tracer.scaled(rows, module.out_proj.weight, module.out_proj.bias)
        tracer.set(attended, TensorLabels((*([None] * (attended.dim() - 1)), rows)))
        if maps is None:
            return
        own = Labels(heads, np.full(heads.size, NOT_ZERO, dtype=np.int64))
        by_head = maps.dim() == query.dim() + 1
        axes = (*([None] * (maps.dim() - 3)), own, None, None) if by_head else (None,) * maps.dim()
        tracer.set(maps, TensorLabels(axes, mixed=None if by_head else heads))


class TransformerEncoderRule(LayerRule):
    """Rule for `nn.TransformerEncoder`: if a layer has lost heads, padded batches must not be packed into nested tensors."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.TransformerEncoder,)

    def resize(self, module: nn.Module) -> None:
        """Set `use_nested_tensor`, which works with the fused path only."""
        layers = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
        if not all(_is_whole(layer) for layer in layers):
            module.__dict__.setdefault("_nested_when_whole", module.use_nested_tensor)
            module.use_nested_tensor = False  # type: ignore[assignment]
        elif "_nested_when_whole" in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop("_nested_when_whole")
