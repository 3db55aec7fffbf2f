"""Models of Hugging Face's transformers, tiny and with random weights: heads and feed-forward units are found, exactly."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask, trace
from torch import nn

pytestmark = [
    pytest.mark.slow,  # the import alone takes seconds
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

_SIZES = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_IMAGES = {**{k: v for k, v in _SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}, "image_size": 8}


def _ids(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": torch.randint(17, (2, 5)), **more}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 8, 8)}


# name → (class, configuration class, its arguments, inputs, groups of heads by the end of their names, heads in each)
MODELS: dict[str, tuple[str, str, Mapping[str, Any], Callable[[], dict[str, Any]], int, int]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, _ids(use_cache=False), 2, 2),
    "llama-with-cache": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, _ids(), 2, 2),
    "llama-eager": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "attn_implementation": "eager"}, _ids(), 2, 2),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _ids(use_cache=False), 2, 2),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED, _ids(use_cache=False), 2, 2),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 17, "n_embd": 16, "n_layer": 2, "n_head": 4}, _ids(), 2, 4),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES, _ids(use_cache=False), 2, 4),
    "bert": (
        "BertForSequenceClassification",
        "BertConfig",
        _SIZES,
        _ids(attention_mask=torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])),
        2,
        4,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_IMAGES, "patch_size": 4}, _pixels, 2, 4),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", {**_IMAGES, "patch_size": 4}, _pixels, 2, 4),
}


def hf() -> Any:
    return importlib.import_module("transformers")


def _built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    kind, configuration, sizes, inputs, _, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(hf(), kind)(getattr(hf(), configuration)(**sizes)).eval(), inputs()


@pytest.mark.parametrize("name", MODELS)
def test_heads_and_feed_forward_units_are_found_and_exact(name: str) -> None:
    model, kwargs = _built(name)
    graph, _ = trace(model, example_kwargs=kwargs)
    heads = [group.size for group in graph.groups.values() if group.kind == "head"]
    assert heads == [MODELS[name][5]] * MODELS[name][4]
    assert sum(group.kind == "feature" for group in graph.groups.values()) >= 2
    for seed, ratio in enumerate((0.3, 0.6)):
        mask = random_mask(graph, ratio, seed)
        check_masked_equals_compact(model, (), kwargs, graph, mask)
        check_nothing_is_lost(model, graph, mask)


def test_the_bias_that_all_layers_of_t5_share_ties_their_heads() -> None:
    torch.manual_seed(0)
    config = hf().T5Config(vocab_size=17, d_model=16, d_kv=4, d_ff=12, num_layers=2, num_heads=4)
    model = hf().T5ForConditionalGeneration(config).eval()
    ids = torch.randint(17, (2, 5))
    kwargs = {"input_ids": ids, "decoder_input_ids": ids[:, :3], "use_cache": False}
    graph, _ = trace(model, example_kwargs=kwargs)
    own = {piece.name for piece in graph.groups["encoder.block.0.layer.0.SelfAttention.q"].slices}
    assert "encoder.block.1.layer.0.SelfAttention.q.weight" in own
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in own
    check_masked_equals_compact(model, (), kwargs, graph, random_mask(graph, 0.5, 0))
