"""Folders of pruned models: transformers loads them alone, and sparsekit without running code of the folder."""

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import random_mask
from safetensors.torch import load_file, save_file
from torch import nn

import sparsekit as sk
from sparsekit.errors import CompactFileError, InvalidValueError, UnsupportedModelError

transformers: Any = None  # importing it takes seconds, also where these tests are not run


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    globals()["transformers"] = pytest.importorskip("transformers", reason="pip install transformers")


_SIZES = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12}
_TEXT = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FALCON_H1 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {**_TEXT, "tie_word_embeddings": True},
    "Phi3": {
        **_TEXT,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "Mixtral": {**_TEXT, **_EXPERTS},
    "FalconH1": {**_TEXT, **_FALCON_H1},
    "GPTNeoX": _TEXT,  # its weights are stored under other names
    "GPT2": {"vocab_size": 17, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
}
IDS = torch.arange(10).reshape(2, 5)


def _pruned(family: str) -> nn.Module:
    """Return a model whose first and second layer have kept different numbers of units."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    model = kind(getattr(transformers, f"{family}Config")(**MODELS[family])).eval()
    graph = sk.trace_units(model, {"input_ids": IDS, "use_cache": False})
    mask = random_mask(graph, 0.6, 0)
    first = next(iter(graph.groups))
    return sk.compact(model, graph, sk.UnitMask({name: keep | (name == first) for name, keep in mask.items()}))


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def _through_file(small: nn.Module, path: Path) -> nn.Module:
    path.mkdir(parents=True)
    sk.save_compact(small, path / "small.safetensors")
    return sk.load_compact(path / "small.safetensors", lambda: type(small)(copy.deepcopy(small.config)))


def _through_folder(small: Any, path: Path) -> nn.Module:
    small.save_pretrained(path / "first")
    loaded: nn.Module = sk.load_pretrained(path / "first")
    return loaded


def _through_transformers(small: Any, path: Path) -> nn.Module:
    small.save_pretrained(path / "first")
    loaded: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path / "first", trust_remote_code=True)
    return loaded


WAYS: Mapping[str, Callable[[nn.Module, Path], nn.Module]] = {
    "compact": lambda small, _: small,
    "copied": lambda small, _: copy.deepcopy(small),
    "pickled": lambda small, _: pickle.loads(pickle.dumps(small)),
    "load_compact": _through_file,
    "load_pretrained": _through_folder,
    "AutoModel": _through_transformers,
}
_ELSEWHERE = """
import sys
sys.modules["sparsekit"] = None  # importing it fails
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    expected = load_file(folder + "/expected")
    with torch.no_grad():
        assert torch.equal(model(input_ids=expected["ids"]).logits, expected["logits"]), folder
"""


def _env(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}


def test_every_pruned_model_from_wherever_is_saved_and_loaded_with_and_without_sparsekit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folders = []
    for family in MODELS:
        small: Any = _pruned(family)
        for way, make in WAYS.items() if family == "Llama" else [("compact", WAYS["compact"])]:
            held: Any = make(small, tmp_path / family / way)
            folder = tmp_path / family / way / "last"
            held.save_pretrained(folder)
            again = sk.load_pretrained(folder)
            assert type(again) is type(small), (family, way)
            assert torch.equal(_logits(again), _logits(small)), (family, way)
            prompt = {"input_ids": IDS, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(again.generate(**prompt), small.generate(**prompt)), (family, way)
            save_file({"ids": IDS, "logits": _logits(small)}, folder / "expected")
            folders.append(folder)
    program = [sys.executable, "-c", _ELSEWHERE, *map(str, folders)]
    done = subprocess.run(program, env=_env(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("family", ["Llama", "Phi3", "GPTNeoX"])
def test_a_folder_with_all_heads_has_what_vllm_asks_of_code_in_a_folder(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM builds the part without a head with `AutoModel.from_config`, and takes heads from the configuration."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**MODELS[family])).eval()
    graph = sk.trace_units(model, {"input_ids": IDS, "use_cache": False})
    mask = random_mask(graph, 0.6, 0)
    heads = [name for name, group in graph.groups.items() if group.kind == "head"]
    small: Any = sk.compact(model, graph, sk.UnitMask({name: keep | (name in heads) for name, keep in mask.items()}))
    small.save_pretrained(tmp_path / "small")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "small")
    assert not hasattr(transformers, config.architectures[0])  # else vLLM takes the class of the dense model
    with torch.device("meta"):
        built = transformers.AutoModel.from_config(config, trust_remote_code=True)
    assert built.is_backend_compatible()
    own = dict(small.base_model.named_parameters())
    assert {name: entry.shape for name, entry in built.named_parameters()} == {name: each.shape for name, each in own.items()}
    sizes = {
        (each.out_features, each.in_features) == each.weight.shape for each in built.modules() if hasattr(each, "in_features")
    }
    assert sizes == {True}
    assert sum(own[name].shape != entry.shape for name, entry in model.base_model.named_parameters()) >= 4
    again = transformers.AutoModel.from_pretrained(tmp_path / "small", trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(again(IDS).last_hidden_state, small.base_model(IDS).last_hidden_state)


def test_attention_of_torch_is_saved_with_fewer_heads(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=8, patch_size=4)).eval()
    pixels = {"pixel_values": torch.randn(2, 3, 8, 8)}
    graph = sk.trace_units(model, pixels)
    small: Any = sk.compact(model, graph, random_mask(graph, 0.5, 0))
    assert small.head.attention.num_heads == 2
    small.save_pretrained(tmp_path)
    for again in (sk.load_pretrained(tmp_path), transformers.AutoModel.from_pretrained(tmp_path, trust_remote_code=True)):
        with torch.no_grad():
            assert torch.equal(again(**pixels).pooler_output, small(**pixels).pooler_output)


def test_options_of_transformers_are_kept_and_shards_are_loaded(tmp_path: Path) -> None:
    small: Any = _pruned("Llama").to(torch.bfloat16)
    small.save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = sk.load_pretrained(tmp_path, attn_implementation="eager")
    assert (again.dtype, again.config._attn_implementation) == (torch.bfloat16, "eager")
    assert sk.load_pretrained(tmp_path, dtype=torch.float32).dtype is torch.float32
    with pytest.raises(InvalidValueError, match="push_to_hub"):
        small.save_pretrained(tmp_path, push_to_hub=True)


def test_the_tokenizer_of_the_dense_folder_comes_along(tmp_path: Path) -> None:
    small: Any = _pruned("Llama")
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    small.config._name_or_path = str(tmp_path / "dense")
    small.save_pretrained(tmp_path / "small")
    assert (tmp_path / "small" / "tokenizer.json").read_text() == "{}"


def test_a_dense_model_of_transformers_is_saved_and_loaded_as_ever(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODELS["Llama"]))
    sk.save_pretrained(model, tmp_path)
    assert not (tmp_path / "modeling_pruned.py").exists()
    assert torch.equal(_logits(sk.load_pretrained(tmp_path)), _logits(model))


def test_what_no_folder_can_describe_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    small: Any = _pruned("Llama")

    class Own(type(small)):  # type: ignore[misc]
        pass

    with pytest.raises(UnsupportedModelError, match="Own is not a class of transformers"):
        sk.save_pretrained(Own(small.config), tmp_path)
    with pytest.raises(UnsupportedModelError, match="Linear is not a class of transformers"):
        sk.save_pretrained(nn.Linear(2, 2), tmp_path)
    adapted = peft.get_peft_model(small, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedModelError, match=r"merge_and_unload"):
        adapted.base_model.model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_adapter_of_a_pruned_model_is_saved_and_loaded_by_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    small: Any = _pruned("Llama")
    small.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(small, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(sk.load_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(_logits(again), _logits(adapted.eval()))
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(_logits(sk.load_pretrained(tmp_path / "merged")), _logits(merged))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"architectures": ["Strange"], "pruned_widths": None}, "Strange"),
        ({"pruned_widths": {"class": "LlamaForCausalLM", "shapes": {}, "numbers": {}}}, "cannot be loaded"),
        ({"pruned_widths": {"class": "LlamaForCausalLM", "shapes": {"model.x": [2]}, "numbers": {}}}, "model.x|has no"),
        ({"pruned_widths": {"class": "os"}}, "'os', which is not a model"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: dict[str, Any], message: str) -> None:
    small: Any = _pruned("Llama")
    small.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: v for key, v in (config | damage).items() if v is not None}))
    with pytest.raises(CompactFileError, match=message):
        sk.load_pretrained(tmp_path)


def test_weights_that_are_missing_or_cut_off_are_refused(tmp_path: Path) -> None:
    small: Any = _pruned("Llama")
    small.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CompactFileError, match=r"model\.norm\.weight"):
        sk.load_pretrained(tmp_path)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CompactFileError, match="cannot be loaded"):
        sk.load_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(OSError, match="safetensors"):
        sk.load_pretrained(tmp_path)
