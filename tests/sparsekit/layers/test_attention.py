"""Attention loses whole heads, exactly; a layer without its rule, or with a wrong one, keeps its units whole."""

import copy
import functools
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import check_masked_equals_compact, random_mask
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import NoUnitsError
from sparsekit.labels.tracer import Tracer
from sparsekit.layers import find_rule
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention
from sparsekit.tracing import blocks
from sparsekit.tracing.trace import UnprunableWarning, trace_units

traced = functools.cache(zoo.traced)


def test_returned_averages_keep_the_heads_and_returned_maps_are_an_output() -> None:
    model = zoo.Lambda(lambda m, x: m.attn(x, x, x), attn=nn.MultiheadAttention(6, 3))
    with (
        pytest.warns(UnprunableWarning, match=r"'attn' \(3 units\) cannot be pruned: the model returns values averaged"),
        pytest.raises(NoUnitsError),
    ):
        trace_units(model, torch.randn(2, 4, 6))
    model = zoo.Lambda(lambda m, x: m.attn(x, x, x, average_attn_weights=False), attn=nn.MultiheadAttention(6, 3))
    with pytest.raises(NoUnitsError, match=r"attn, attn.out_proj \(3, 6\): model output"):
        trace_units(model, torch.randn(2, 4, 6))


def test_a_padded_batch_runs_through_a_narrow_encoder_with_the_fused_path_on() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    graph = trace_units(model, {"src": x, "src_key_padding_mask": padding})
    keep = {name: torch.ones(group.size, dtype=torch.bool) for name, group in graph.groups.items()}
    keep["layers.1.self_attn"][0] = False
    assert model.use_nested_tensor
    small = sk.compact(model, graph, sk.UnitMask(keep))
    assert not small.use_nested_tensor
    assert type(small.layers[0].self_attn) is nn.MultiheadAttention
    assert type(small.layers[1].self_attn) is NarrowMultiheadAttention
    with torch.no_grad():
        fused = small(x, src_key_padding_mask=padding)
    plain = small(x, src_key_padding_mask=padding)
    torch.testing.assert_close(fused[~padding], plain[~padding], rtol=1e-5, atol=1e-5)
    again = sk.compact(model, graph, sk.UnitMask.full(graph))
    assert again.use_nested_tensor


HIDDEN = {
    "most": torch.full((5, 5), -torch.inf).fill_diagonal_(0.0),
    "padding": torch.where(torch.arange(5) < torch.tensor([[5], [3]]), 0.0, -torch.inf),
}


@pytest.mark.parametrize(("hidden", "large"), [("most", True), ("padding", False)])
def test_float_masks_with_minus_infinity_are_inputs_like_any_other(
    hidden: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LARGE_NUMBERS", 0 if large else 10**12)
    torch.manual_seed(0)
    option = "src_mask" if hidden == "most" else "src_key_padding_mask"
    model = zoo.Lambda(
        lambda m, x, mask: m.down(m.up(m.layer(x, **{option: mask})).relu()),
        layer=nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        up=(8, 10),
        down=(10, 3),
    )
    x, mask = torch.randn(2, 5, 8), HIDDEN[hidden]
    graph = trace_units(model, (x, mask))
    assert [*graph.groups] == [*trace_units(model, (x, torch.zeros_like(mask))).groups]
    check_masked_equals_compact(model, (x, mask), {}, graph, random_mask(graph, 0.5, 0))
    check_masked_equals_compact(model, (x, mask), {}, graph, sk.prune(model, (x, mask), budget="params=80%").mask)
    learnable = sk.LearnableMask(model, (x, mask), ratio=0.5)
    learnable(x, mask).square().mean().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in learnable.parameters() if weight.grad is not None)


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
    graph = trace_units(model, inputs, verify=False)
    mask = {name: keep if group.kind == "head" else torch.ones(group.size).bool() for name, group in graph.groups.items()}
    return sk.compact(model, graph, sk.UnitMask(mask)).attention


@settings(max_examples=30, deadline=None)
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


LAYER_RULE: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "examples/layer_rule.py")))
"""The rules of the example keep the contract where the examples are tested."""


def test_without_its_rule_a_strange_layer_is_probed() -> None:
    model = nn.Sequential(nn.Linear(3, 6), LAYER_RULE.Centred(6), nn.Linear(6, 2))
    assert sk.trace_units(model, torch.randn(2, 5, 3)).groups["0"].size == 6, "a median over time keeps features apart"


class Careless(LAYER_RULE.CentredRule):
    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        out = run(*args, **kwargs)
        tracer.set(out, tracer.labels(args[0]))
        return out


def test_a_wrong_rule_is_caught_by_the_verification() -> None:
    model = nn.Sequential(nn.Linear(3, 6), LAYER_RULE.Centred(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    with pytest.warns(UserWarning, match=r"'0' \(6 units\) cannot be pruned: the compacted model fails"):
        graph = sk.trace_units(model, torch.randn(2, 5, 3), rules={LAYER_RULE.Centred: Careless()})
    assert list(graph.groups) == ["2"]


def test_a_layer_of_a_package_that_is_not_imported_is_known_by_its_name() -> None:
    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.nx = nf, nx
            self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    model = nn.Sequential(Conv1D(6, 3), nn.ReLU(), Conv1D(2, 6))
    assert find_rule(model[0]) is not None
    graph = sk.trace_units(model, torch.randn(2, 4, 3))
    assert {name: group.size for name, group in graph.groups.items()} == {"0": 6}
    small = sk.compact(model, graph, sk.UnitMask({"0": torch.arange(6) < 4}))
    assert (small[0].nf, small[0].nx, small[2].nx) == (4, 3, 4)
