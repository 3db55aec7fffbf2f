"""Pruned decoders as GGUF files: what is in them, what llama.cpp computes, and what cannot be written."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import random_mask
from torch import nn

import sparsekit as sk
from sparsekit.errors import InvalidValueError, UnsupportedModelError

transformers: Any = None  # importing it takes seconds, also where these tests are not run
gguf: Any = None


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    globals()["transformers"] = pytest.importorskip("transformers", reason="pip install transformers")
    globals()["gguf"] = pytest.importorskip("gguf", reason="pip install gguf")


_SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 128}
_SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama3": ("Llama", {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 64}}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("Gemma", {"head_dim": 16}, "'gelu_pytorch_tanh'"),
    "norms": ("Gemma2", {"head_dim": 16}, "pre_feedforward_layernorm"),
    "scales": ("Granite", {"attention_multiplier": 0.5}, "its layers compute otherwise"),
    "window": ("Mistral", {"sliding_window": 16}, "16 of 128 positions"),
    "positions": ("Llama", {"rope_parameters": _YARN}, "'yarn'"),
    "untied": ("Qwen3", {"head_dim": 16}, "untied embeddings"),
    "experts": ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}, r"mlp\.gate\.weight|block_sparse"),
}


def _model(family: str, more: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SIZES | more)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for entry in model.parameters():  # sharp attention, and norms and biases that count
            entry.add_(0.3 * torch.rand_like(entry)) if entry.dim() == 1 else entry.mul_(4)
    return model


IDS = torch.arange(24)[None] * 7 % 93 + 2


def _pruned(name: str) -> Any:
    model = _model(*WRITTEN[name])
    graph = sk.trace_units(model, {"input_ids": IDS})
    return sk.compact(model, graph, random_mask(graph, 0.6, 0))


@pytest.mark.parametrize("name", WRITTEN)
def test_llama_cpp_computes_what_the_pruned_model_does(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("llama") is None:
        pytest.skip("pip install --no-deps llama-cpp-cffi cffi pycparser")
    small, ids = _pruned(name), IDS[0].tolist()
    sk.export_gguf(small, tmp_path / "small.gguf", dtype="float32")
    try:
        model = importlib.import_module("llamacpp").Model(tmp_path / "small.gguf")
    except ImportError as error:  # such as an older libstdc++ than the one of its build
        pytest.skip(str(error))
    except SystemExit as error:
        if not any(key.endswith("proj.bias") for key in small.state_dict()):
            raise
        pytest.skip(f"llama.cpp of early 2025 expects biases of all heads: {error}")
    with torch.no_grad():
        expected = small(input_ids=IDS).logits[0, -1]
    found = torch.tensor(model(ids))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    greedy = small.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(ids) :].tolist()
    for token in greedy:
        assert int(found.argmax()) == token
        found = torch.tensor(model([token]))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_has_the_widths_of_every_layer_and_all_weights(name: str, tmp_path: Path) -> None:
    small = _pruned(name)
    sk.export_gguf(small, tmp_path / "small.gguf", dtype="float32")
    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    kind = reader.fields["general.architecture"].contents()
    layers, head = small.model.layers, small.model.layers[0].self_attn.head_dim
    for key, widths in {
        "attention.head_count": [layer.self_attn.q_proj.out_features // head for layer in layers],
        "attention.head_count_kv": [layer.self_attn.k_proj.out_features // head for layer in layers],
        "feed_forward_length": [layer.mlp.up_proj.out_features for layer in layers],
    }.items():
        assert reader.fields[f"{kind}.{key}"].contents() == widths
    extra = 8 // 2 if name == "llama3" else 0  # factors of the frequencies of a head of 8
    assert sum(tensor.n_elements for tensor in reader.tensors) == sum(p.numel() for p in small.parameters()) + extra


def test_rows_of_other_widths_than_blocks_of_eight_bits_are_kept_in_sixteen(tmp_path: Path) -> None:
    model = _model("Llama", {})
    graph = sk.trace_units(model, {"input_ids": IDS})
    small = sk.prune(model, {"input_ids": IDS}, graph=graph, budget="flops=70%", multiple_of={"feature": 8}).model
    sk.export_gguf(small, tmp_path / "small.gguf", dtype="q8_0")
    for tensor in gguf.GGUFReader(tmp_path / "small.gguf").tensors:
        matrix = len(tensor.shape) > 1
        assert tensor.tensor_type.name == ("F32" if not matrix else "F16" if tensor.shape[0] % 32 else "Q8_0"), tensor.name


def test_the_vocabulary_of_another_file_is_copied_if_it_fits(tmp_path: Path) -> None:
    small = _pruned("llama")
    for count in (96, 95):
        writer = gguf.GGUFWriter(tmp_path / f"{count}.gguf", "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{number}" for number in range(count)])
        writer.add_eos_token_id(2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    sk.export_gguf(small, tmp_path / "small.gguf", vocabulary=tmp_path / "96.gguf")
    fields = gguf.GGUFReader(tmp_path / "small.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[95] == "t95"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 2
    before = (tmp_path / "small.gguf").read_bytes()
    with pytest.raises(InvalidValueError, match="has 95 tokens, and the model 96"):
        sk.export_gguf(small, tmp_path / "small.gguf", vocabulary=tmp_path / "95.gguf")
    assert (tmp_path / "small.gguf").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_format_cannot_say_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    family, more, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        sk.export_gguf(_model(family, more), tmp_path / "small.gguf")
    assert not any(tmp_path.iterdir())


def test_other_models_and_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'weight' has no place"):
        sk.export_gguf(nn.Linear(2, 2), tmp_path / "small.gguf")
    with pytest.raises(InvalidValueError, match="got 'int4'"):
        sk.export_gguf(_model("Llama", {}), tmp_path / "small.gguf", dtype="int4")
