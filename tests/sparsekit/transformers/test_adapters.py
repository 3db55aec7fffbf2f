"""Adapters of PEFT on a pruned model: added, merged, unmerged, saved and loaded."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXAMPLE = {"input_ids": torch.arange(24).reshape(2, 12) * 7 % 93 + 2}


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _adapted(base: nn.Module, **options: Any) -> nn.Module:
    config = peft.LoraConfig(r=8, target_modules=LAYERS, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.eval()


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(**EXAMPLE).logits


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rank-stabilized": {"use_rslora": True},
    "patterns": {"rank_pattern": {"up_proj": 4}},
}


def _pruned(kind: str, ratio: float = 0.5) -> nn.Module:
    """Every group loses units, the ranks of the adapters too."""
    model = _adapted(_llama(), **KINDS[kind])
    graph = sk.trace_units(model, EXAMPLE)
    generator = torch.Generator().manual_seed(0)
    scores = {name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()}
    mask = sk.mask_from_scores(graph, scores, sk.allocation.ratio_counts(graph, ratio))
    return sk.compact(model, graph, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_ranks_and_scales_follow_so_that_adapters_are_added_merged_and_unmerged(kind: str) -> None:
    small = _pruned(kind)
    for layer in small.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            base, rank = layer.get_base_layer(), layer.lora_A["default"].weight.shape[0]
            assert (layer.in_features, layer.out_features) == (base.weight.shape[1], base.weight.shape[0])
            assert layer.r["default"] == rank
            before = layer.scaling["default"]
            layer.set_scale("default", 1.0)
            assert layer.scaling["default"] == pytest.approx(before)
    expected = _logits(small)
    small.merge_adapter()
    torch.testing.assert_close(_logits(small), expected, rtol=1e-4, atol=1e-5)
    small.unmerge_adapter()
    torch.testing.assert_close(_logits(small), expected, rtol=1e-4, atol=1e-5)
    small.add_adapter("second", peft.LoraConfig(r=4, target_modules=LAYERS, task_type="CAUSAL_LM", **KINDS[kind]))
    small.set_adapter("second")
    small(**EXAMPLE, labels=EXAMPLE["input_ids"]).loss.backward()
    small.set_adapter("default")
    torch.testing.assert_close(_logits(small), expected, rtol=1e-4, atol=1e-5)
    small.delete_adapter("second")
    torch.testing.assert_close(_logits(small.merge_and_unload()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pruned_model_with_adapters_is_saved_in_two_folders_and_loads_again(kind: str, tmp_path: Path) -> None:
    small = _pruned(kind)
    expected = _logits(small)
    small.save_pretrained(tmp_path / "adapter")
    sk.save_pretrained(copy.deepcopy(small).unload(), tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(sk.load_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(_logits(loaded), expected, rtol=1e-4, atol=1e-5)
    sk.save_pretrained(small.merge_and_unload(), tmp_path / "merged")
    torch.testing.assert_close(_logits(sk.load_pretrained(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def traced() -> tuple[nn.Module, sk.UnitGraph]:
    model = _adapted(_llama())
    return model, sk.trace_units(model, EXAMPLE)


RANKS: dict[str, tuple[dict[str, Any], bool]] = {
    "budget": ({"budget": "flops=60%"}, False),
    "ratio": ({"ratio": 0.5}, False),
    "the layers around them": ({"budget": "flops=60%", "limits": {"base_model.model.model.layers": (0.1, 0.9)}}, False),
    "all kinds of a ratio": ({"ratio": {".*": 0.5}}, False),
    "limits": ({"budget": "flops=60%", "limits": {"rank": (0, 0.5)}}, True),
    "ratio of ranks": ({"ratio": {"rank": 0.5, "head": 0.5}}, True),
    "expression": ({"ratio": {r".*lora_A\..*": 0.5}}, True),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_stay_unless_they_are_asked_for(name: str, traced: tuple[nn.Module, sk.UnitGraph]) -> None:
    given, asked = RANKS[name]
    model, graph = traced
    plan = sk.plan(model, EXAMPLE, graph=graph, **given)
    kept = {group: plan.mask[group].double().mean() for group in plan.graph.groups}
    ranks = {group for group in kept if plan.graph.groups[group].kind == "rank"}
    assert len(ranks) == 2 * len(LAYERS)
    assert {float(kept[group]) for group in ranks} == {0.5 if asked else 1.0}
    if name != "expression":
        assert min(kept[group] for group in kept.keys() - ranks) < 1


def test_a_budget_that_needs_the_ranks_says_how_to_ask_for_them(traced: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = traced
    kept = sk.plan(model, EXAMPLE, budget="params=90%", graph=graph).report.minimum["params"]
    with pytest.raises(sk.BudgetError, match=r"8 of 8 ranks of an adapter, which stay unless limits=\{'rank': \(0, 1\)\}"):
        sk.plan(model, EXAMPLE, budget={"params": 0.99 * kept}, graph=graph)
    sk.plan(model, EXAMPLE, budget={"params": 0.99 * kept}, limits={"rank": (0, 1)}, graph=graph)


def test_the_norm_of_dora_is_named_by_its_line_and_merging_ends_it() -> None:
    model = _adapted(_llama(), use_dora=True)
    graph = sk.trace_units(model, EXAMPLE)
    assert {group.kind for group in graph.groups.values()} == {"rank"}
    reasons = [item.reason for item in graph.unprunable if item.module.endswith(("q_proj.base_layer", "gate_proj.base_layer"))]
    assert len(reasons) == 4
    assert all(re.search(r" at dora\.py:\d+ \(.*lora_A", reason) for reason in reasons)
    merged = sk.trace_units(model.merge_and_unload(), EXAMPLE)
    assert {group.kind for group in merged.groups.values()} == {"head", "feature"}


def test_a_mask_over_adapters_trains_them_alone_and_follows() -> None:
    model = _adapted(_llama())
    masked = sk.LearnableMask(model, EXAMPLE, ratio=0.5)
    optimizer = torch.optim.AdamW([p for p in masked.parameters() if p.requires_grad], 1e-2)
    before = masked.dense_state()
    for ratio in (0.5, 1.0, 0.25):
        masked.ratio = ratio
        masked(**EXAMPLE, labels=EXAMPLE["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, value in masked.dense_state().items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    small = masked.compact()
    expected = _logits(small)
    torch.testing.assert_close(_logits(small.merge_and_unload()), expected, rtol=1e-4, atol=1e-5)
