"""NarrowMultiheadAttention computes what nn.MultiheadAttention computes with its other heads silenced."""

from __future__ import annotations

import copy
from typing import Any

import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.trace import trace_units

HEADS, SIZE = 4, 3
WIDTH = HEADS * SIZE


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def silenced(module: nn.MultiheadAttention, keep: Tensor) -> nn.MultiheadAttention:
    quiet = copy.deepcopy(module)
    with torch.no_grad():
        quiet.out_proj.weight[:, ~keep.repeat_interleave(SIZE)] = 0.0
    return quiet


def narrowed(module: nn.MultiheadAttention, keep: Tensor, *inputs: Tensor) -> nn.MultiheadAttention:
    model = zoo.Lambda(
        lambda m, *x: m.head(m.attention(*x, need_weights=False)[0]), attention=module, head=nn.Linear(WIDTH, 1).double()
    )
    graph = trace_units(model, *inputs, verify=False)
    mask = {name: keep if group.kind == "head" else torch.ones(group.size).bool() for name, group in graph.groups.items()}
    return compact(model, graph, UnitMask(mask)).attention


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_whole_module_with_heads_silenced(data: st.DataObject) -> None:
    batch_first = data.draw(st.booleans())
    other = data.draw(st.booleans())
    options = {
        "batch_first": batch_first,
        "bias": data.draw(st.booleans()),
        "add_bias_kv": data.draw(st.booleans()),
        "add_zero_attn": data.draw(st.booleans()),
        **({"kdim": 5, "vdim": 7} if other else {}),
    }
    module = attention(**options)
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=HEADS, max_size=HEADS).filter(any)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    batched = data.draw(st.booleans())
    targets, sources, batch = 4, data.draw(st.integers(1, 6)), 2

    def draw(length: int, width: int) -> Tensor:
        order = ((batch, length) if batch_first else (length, batch)) if batched else (length,)
        return torch.randn(*order, width, dtype=torch.float64, generator=generator)

    query, key, value = draw(targets, WIDTH), draw(sources, 5 if other else WIDTH), draw(sources, 7 if other else WIDTH)
    padding = mask = None
    if data.draw(st.booleans()):
        padding = torch.rand(*((batch,) if batched else ()), sources, generator=generator) < 0.3
        padding[..., 0] = False
        padding = padding if data.draw(st.booleans()) else padding.double().masked_fill(padding, float("-inf"))
    if data.draw(st.booleans()):
        mask = torch.rand(targets, sources, generator=generator) < 0.3
        mask[:, 0] = False
        mask = mask if data.draw(st.booleans()) else torch.randn(targets, sources, dtype=torch.float64, generator=generator)
    weights = data.draw(st.booleans())
    arguments = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": weights}
    small = narrowed(module, keep, query, key, value)
    expected, _ = silenced(module, keep)(query, key, value, **arguments)
    found, maps = small(query, key, value, **arguments)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert (maps is not None) == weights
    if weights:
        _, all_maps = module(query, key, value, **arguments, average_attn_weights=False)
        kept = all_maps[:, keep] if batched else all_maps[keep]
        torch.testing.assert_close(maps, kept.mean(-3), rtol=1e-10, atol=1e-10)
        _, own = small(query, key, value, **arguments, average_attn_weights=False)
        torch.testing.assert_close(own, kept, rtol=1e-10, atol=1e-10)
