"""fit_config(): cut models of transformers are saved by save_pretrained and loaded in another process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.criteria import Magnitude, View
from sparsekit.errors import UnsupportedModelError
from sparsekit.graph.edit import only, tie_layers

transformers: Any = None  # importing it takes seconds, also where these tests are not run

_TEXT: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    globals()["transformers"] = pytest.importorskip("transformers", reason="pip install transformers")


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(0))}


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    found: nn.Module = transformers.ViTForImageClassification(config)
    return found


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]], bool]] = {
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT, **_HEADS)), _tokens, True),
    "qwen2": (lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_TEXT, **_HEADS)), _tokens, True),
    "bert": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_TEXT, num_attention_heads=4)),
        _tokens,
        False,
    ),
    "vit": (_vit, _pixels, False),
}


def _cut(name: str) -> tuple[nn.Module, sk.UnitGraph, sk.UnitMask, dict[str, Tensor]]:
    make, example, heads = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make().eval(), example()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = sk.trace_units(model, example_kwargs=inputs)
    chosen = [n for n, g in graph.groups.items() if ".layer" in n and (heads or g.kind != "head")]
    graph = tie_layers(only(graph, chosen))
    mask = sk.select(Magnitude(), graph, 0.5, View(weights=model.state_dict()))
    return sk.compact(model, graph, mask), graph, mask, inputs


_LOADER = """
import sys, torch, transformers
from safetensors.torch import load_file
for name in sys.argv[2:]:
    folder = f"{sys.argv[1]}/{name}"
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    data = load_file(f"{folder}/example.safetensors")
    expected = data.pop("logits")
    with torch.no_grad():
        assert torch.allclose(model(**data).logits, expected, atol=1e-5), name
    print(name, config.intermediate_size, config.num_attention_heads)
"""


@pytest.mark.slow
def test_what_save_pretrained_writes_is_loaded_in_another_process(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name in MODELS:
        small, graph, mask, inputs = _cut(name)
        with pytest.raises(UnsupportedModelError, match="fit_config"):
            small.save_pretrained(tmp_path / name)
        changed = sk.fit_config(small, graph, mask)
        assert changed["intermediate_size"] == 24
        small.save_pretrained(tmp_path / name)
        with torch.no_grad():
            save_file({**inputs, "logits": small(**inputs).logits}, tmp_path / name / "example.safetensors")
    command = [sys.executable, "-c", _LOADER, str(tmp_path), *MODELS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["llama 24 2", "qwen2 24 2", "bert 24 4", "vit 24 4"]


def test_heads_that_a_configuration_cannot_count_are_named() -> None:
    torch.manual_seed(0)
    model = MODELS["bert"][0]().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = tie_layers(sk.trace_units(model, example_kwargs=_tokens()))
    graph = only(graph, [name for name in graph.groups if ".layer" in name])
    mask = sk.select(Magnitude(), graph, 0.5, View(weights=model.state_dict()))
    with pytest.raises(UnsupportedModelError, match=r"bert\.encoder\.layer\.#\.attention\.self\.query"):
        sk.fit_config(sk.compact(model, graph, mask), graph, mask)


def test_like_layers_are_tied_and_others_are_not() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 6), nn.Linear(6, 2))
    graph = sk.trace_units(model, torch.randn(1, 4))
    tied = tie_layers(graph)
    assert tied.ties == (("0", "1", "2", "3"),)
    assert tie_layers(tied).ties == tied.ties
