"""Attention: batched products in which every head has its own map, and the fused operator that does all of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sparsekit.layers.labels.values import NOT_ZERO, Labels, TensorLabels
from sparsekit.tracing.ops.call import Call, Outputs, table
from sparsekit.tracing.ops.joining import merge
from sparsekit.tracing.ops.pointwise import combine


def merge_heads(call: Call, pieces: Sequence[Labels | None], owners: Sequence[TensorLabels]) -> Labels | None:
    """Labels of a batch axis of a product: units on it multiply only with themselves.

    Between activations these are attention heads. The product is zero where one factor is.
    """
    merged = merge(call, pieces, owners)
    if merged is None or merged.is_uniform:
        return merged
    if all(owner.entry is None for owner in owners):
        call.tracer.heads.append(merged.nodes[merged.nodes >= 0])
    sources = np.full(merged.size, NOT_ZERO, dtype=np.int64)
    for axis in pieces:
        assert axis is not None
        sources = np.where(sources == NOT_ZERO, axis.sources, sources)
    return Labels(merged.nodes, sources)


def _repeated(labels: Labels | None, size: int) -> Labels | None:
    """Labels of key or value heads, each of which serves several query heads in a row."""
    if labels is None or labels.size == size or size % labels.size:
        return labels
    return labels.take(np.repeat(np.arange(labels.size, dtype=np.int64), size // labels.size))


def _attention(call: Call) -> Outputs:
    """softmax(q k^T · scale + mask) v over the last two axes; all axes before are batch or heads."""
    tracer, out = call.tracer, call.outputs[0]
    rank = out.dim()
    query, key = call.labels("query", -1, -2), call.labels("key", -1, -2)
    value = call.labels("value", -2)
    for labels in (query, key):
        tracer.fix(labels.axes[-1], "scaled by the size of its head")
    for labels in (query, key, value):
        tracer.fix(labels.axes[-2], "attended over an axis of units")
    lead: list[Labels | None] = []
    for dim in range(rank - 2):
        pieces = [_repeated(labels.axes[dim], out.shape[dim]) for labels in (query, key, value)]
        lead.append(merge_heads(call, pieces, [query, key, value]))
    labels = TensorLabels((*lead, None, value.units[-1]))
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    if isinstance(mask, Tensor):
        # The mask is added to the maps, which have the leading axes of the result.
        maps = (*out.shape[:-1], call.arguments["key"].shape[-2])
        own = TensorLabels((*lead, None, None))
        combine(call, [own, tracer.labels(mask, -1, -2)], [maps, tuple(mask.shape)], maps, "add")
    return [labels] + [None] * (len(call.outputs) - 1)


def _nothing(call: Call) -> Outputs:
    """Asks which implementation to take; computes nothing."""
    del call
    return []


HANDLERS = table(
    ("_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu", _attention),
    ("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", _attention),
    ("_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention", _attention),
    ("_fused_sdp_choice", _nothing),
)
