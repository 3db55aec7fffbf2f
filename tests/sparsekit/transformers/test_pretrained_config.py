"""Models of Hugging Face's transformers, tiny and with random weights: cut exactly, saved by their own `save_pretrained`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask, trace
from torch import nn

import sparsekit as sk
from sparsekit.criteria import Magnitude, ScoringContext
from sparsekit.errors import UnsupportedModelError
from sparsekit.graph.edit import only, tie_layers

transformers: Any = None  # importing it takes seconds, also where these tests are not run


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    globals()["transformers"] = pytest.importorskip("transformers", reason="pip install transformers")


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

_FALCON = {**{k: v for k, v in _SIZES.items() if k != "intermediate_size"}, "num_kv_heads": 2}


def _ids(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": torch.randint(17, (2, 5)), **more}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 8, 8)}


# name → (class, configuration class, its arguments, inputs, groups of heads by the end of their names, heads in each)
MODELS: dict[str, tuple[str, str, Mapping[str, Any], Callable[[], dict[str, Any]], int, int]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, _ids(), 2, 2),
    "llama-without-cache": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, _ids(use_cache=False), 2, 2),  # the other branch
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _ids(), 2, 2),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 17, "n_embd": 16, "n_layer": 2, "n_head": 4}, _ids(), 2, 4),
    "falcon": ("FalconForCausalLM", "FalconConfig", _FALCON | {"new_decoder_architecture": True}, _ids(), 2, 2),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES, _ids(), 2, 4),
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


def _built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    kind, configuration, sizes, inputs, _, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, configuration)(**sizes)).eval(), inputs()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_heads_and_feed_forward_units_are_found_and_exact(name: str) -> None:
    model, kwargs = _built(name)
    graph, _ = trace(model, kwargs)
    heads = [group.size for group in graph.groups.values() if group.kind == "head"]
    assert heads == [MODELS[name][5]] * MODELS[name][4]
    assert sum(group.kind == "feature" for group in graph.groups.values()) >= 2
    for seed, ratio in enumerate((0.3, 0.6)):
        mask = random_mask(graph, ratio, seed)
        check_masked_equals_compact(model, (), kwargs, graph, mask)
        check_nothing_is_lost(model, graph, mask)


@pytest.mark.slow
def test_the_bias_that_all_layers_of_t5_share_ties_their_heads() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=17, d_model=16, d_kv=4, d_ff=12, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(17, (2, 5))
    kwargs = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    graph, _ = trace(model, kwargs)
    own = {piece.name for piece in graph.groups["encoder.block.0.layer.0.SelfAttention.q"].slices}
    assert "encoder.block.1.layer.0.SelfAttention.q.weight" in own
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in own
    check_masked_equals_compact(model, (), kwargs, graph, random_mask(graph, 0.5, 0))


def _cut(name: str) -> tuple[nn.Module, sk.UnitGraph, sk.UnitMask, dict[str, Any]]:
    model, inputs = _built(name)
    graph, _ = trace(model, inputs)
    heads = "num_key_value_heads" in MODELS[name][2]  # other configurations have no number of heads apart from the width
    chosen = [n for n, g in graph.groups.items() if ".layer" in n and (heads or g.kind != "head")]
    graph = tie_layers(only(graph, chosen))
    mask = sk.allocation.make_mask(Magnitude(), graph, 0.5, ScoringContext(weights=model.state_dict()))
    return sk.compact(model, graph, mask), graph, mask, inputs


@pytest.mark.parametrize(("name", "heads"), [("llama", 2), ("vit", 4)])
def test_equal_widths_are_written_into_a_configuration_that_needs_no_modeling_file(
    name: str, heads: int, tmp_path: Path
) -> None:
    small, graph, mask, inputs = _cut(name)
    assert sk.fit_config(small, graph, mask)["intermediate_size"] == 6
    small.save_pretrained(tmp_path)
    again = getattr(transformers, MODELS[name][0]).from_pretrained(tmp_path)
    assert (again.config.intermediate_size, again.config.num_attention_heads) == (6, heads)
    for loaded in (again, sk.load_pretrained(tmp_path)):
        with torch.no_grad():
            torch.testing.assert_close(loaded(**inputs).logits, small(**inputs).logits, rtol=0, atol=1e-5)


def test_heads_that_share_one_key_in_a_fused_layer_stay_and_the_reason_has_the_line() -> None:
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**_FALCON, new_decoder_architecture=False)).eval()
    graph, _ = trace(model, _ids()())
    assert {group.kind for group in graph.groups.values()} == {"feature"}
    assert any("rearranged by 'index'" in each.reason and "modeling_falcon.py:" in each.reason for each in graph.unprunable)


def test_heads_that_a_configuration_cannot_count_are_named() -> None:
    model, inputs = _built("bert")
    graph = tie_layers(trace(model, inputs)[0])
    graph = only(graph, [name for name in graph.groups if ".layer" in name])
    mask = sk.allocation.make_mask(Magnitude(), graph, 0.5, ScoringContext(weights=model.state_dict()))
    with pytest.raises(UnsupportedModelError, match=r"bert\.encoder\.layer\.#\.attention\.self\.query"):
        sk.fit_config(sk.compact(model, graph, mask), graph, mask)


def test_like_layers_are_tied_and_others_are_not() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 6), nn.Linear(6, 2))
    graph = sk.trace_units(model, torch.randn(1, 4))
    tied = tie_layers(graph)
    assert tied.ties == (("0", "1", "2", "3"),)
    assert tie_layers(tied).ties == tied.ties
