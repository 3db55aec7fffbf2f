"""Experts with the kernels that they come with: every family's features are units, in widths that the kernel takes."""

from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn

import sparsekit as sk

transformers: Any = None  # importing it takes seconds, also where these tests are not run


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    globals()["transformers"] = pytest.importorskip("transformers", minversion="5", reason="pip install transformers")


_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "moe_intermediate_size": 64, "num_key_value_heads": 4,
}  # fmt: skip
_RULED: dict[str, dict[str, Any]] = {
    "Mixtral": _MIXTURE,
    "GptOss": {**_MIXTURE, "head_dim": 8, "sliding_window": 8},
    "Olmoe": {**_MIXTURE, "num_key_value_heads": 4},
    "MiniMax": {**_MIXTURE, "head_dim": 8, "block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
}
_OTHERS: dict[str, dict[str, Any]] = {
    "Phimoe": _MIXTURE,
    "DeepseekV3": _LATENT,
    "Glm4Moe": {**_LATENT, "head_dim": 8, "num_key_value_heads": 2, "n_shared_experts": 1},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
    "HunYuanMoEV1": {**_MIXTURE, "head_dim": 8, "moe_topk": 2},
}
_FAMILIES = _RULED | _OTHERS


def _model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    model: nn.Module = kind(kind.config_class(**{**_SIZES, **_FAMILIES[name]})).eval()
    for entry in model.parameters():
        entry.data += 0.1 * torch.randn(entry.shape)
    return model, {"input_ids": torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("name", _FAMILIES)
def test_features_of_experts_are_units_in_multiples_of_the_kernel(name: str) -> None:
    model, inputs = _model(name)
    graph, told = trace(model, inputs)
    inner = [
        group for group in graph.groups.values() if group.kind == "feature" and "experts" in group.name and group.size == 64
    ]
    assert len([group for group in inner if "shared" not in group.name]) == (1 if name == "Ernie4_5_Moe" else 2), told
    assert {group.multiple for group in inner if "shared" not in group.name} == {8}
    mask = random_mask(graph, 0.6, 0)
    check_masked_equals_compact(model, (), inputs, graph, mask, dtype=torch.float32, tolerance=1e-4)
    if name in (*_RULED, "Phimoe"):
        report = sk.prune(model, inputs, graph=graph, budget="flops=60%").report
        assert report.after["flops"] <= 0.6 * report.before["flops"]


def test_the_products_of_other_machines_are_followed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    model, inputs = _model("DeepseekV3")
    graph, _ = trace(model, inputs)
    assert any("experts" in name and group.multiple == 8 for name, group in graph.groups.items())
    check_masked_equals_compact(model, (), inputs, graph, random_mask(graph, 0.6, 0), dtype=torch.float32, tolerance=1e-4)


def test_other_numbers_are_refused_and_a_budget_says_what_is_the_least() -> None:
    model, inputs = _model("Mixtral")
    graph, _ = trace(model, inputs)
    name = next(name for name, group in graph.groups.items() if group.multiple == 8)
    mask = sk.UnitMask({**sk.UnitMask.full(graph), name: torch.arange(64) < 12})
    with pytest.raises(
        sk.errors.InvalidValueError, match="all of its 64 units or a multiple of 8, which its kernel takes, got 12"
    ):
        sk.compact(model, graph, mask)
    with pytest.raises(sk.BudgetError, match=r"each token takes 2 of 4 experts") as caught:
        sk.prune(model, inputs, graph=graph, budget={"params": "1%"})
    assert "its kernel takes multiples of 8" in str(caught.value)
    assert "lower" not in str(caught.value)
    assert sk.allocation.ratio_counts(graph, 0.3)[name] == 24
