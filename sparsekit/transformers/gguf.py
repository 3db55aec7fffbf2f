"""export_gguf(): a pruned decoder as a GGUF file, which llama.cpp, Ollama and LM Studio run.

llama.cpp has architectures whose layers differ in heads and features: `deci` is a Llama with such layers, `openelm` one with
norms of queries and keys. A model is written only if a reference implementation of that architecture gives the same outputs.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError, UnsupportedModelError, require
from sparsekit.surgery.rebuild import named_entries

_TYPES = {"float32": ("F32", "ALL_F32"), "float16": ("F16", "MOSTLY_F16"), "bfloat16": ("BF16", "MOSTLY_BF16")}
_TYPES["q8_0"] = ("Q8_0", "MOSTLY_Q8_0")
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_LAYER |= {f"self_attn.{name}_proj": f"attn_{to}" for name, to in zip("qkvo", ("q", "k", "v", "output"), strict=True)}
_LAYER |= {f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"}
_LAYER |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
_ROPES = ("default", "linear", "llama3")
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-4, 5e-2  # relative to the largest logit
_ROUNDING = 1e-5  # relative, of a frequency
_PROBE = 16  # tokens


def export_gguf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: str = "float16",
    vocabulary: str | os.PathLike[str] | None = None,
) -> None:
    """Write a decoder of transformers, pruned or not, as a GGUF file for llama.cpp, Ollama and LM Studio.

    Each layer keeps its own number of heads and features. Models built like Llama are supported: Llama, Mistral, SmolLM, Qwen2,
    and Qwen3 with tied embeddings.

    Args:
        model: A decoder, such as from `prune`, `compact` or `load_pretrained`.
        path: Path of the file. An existing file is replaced when the new one is complete.
        dtype: Type of the matrices: float32, float16, bfloat16, or q8_0 (8 bits, for rows of a multiple of 32; others become
            float16). Norms and biases stay float32.
        vocabulary: A GGUF file of the dense model, whose tokenizer is copied. `convert_hf_to_gguf.py --vocab-only` of llama.cpp
            makes one. Without it, the file works on token ids only.

    Raises:
        UnsupportedModelError: GGUF has no architecture with per-layer widths for this model; the message names the part.
        InvalidValueError: an unknown `dtype`, or the vocabulary has another size.
        MissingDependencyError: gguf is not installed.
        OSError: the file cannot be written.
    """
    gguf = require("gguf")
    if dtype not in _TYPES:
        raise InvalidValueError(f"dtype must be one of {', '.join(_TYPES)}, got {dtype!r}")
    config: Any = getattr(model, "config", None)
    tensors = _tensors(model)
    sizes = _sizes(model, config, tensors)
    _compare(model, config, tensors, sizes)
    if bool((sizes["factors"] - 1).abs().max() > _ROUNDING):
        tensors["rope_freqs.weight"] = sizes["factors"].float()
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        writer = gguf.GGUFWriter(temporary, sizes["architecture"])
        _describe(writer, config, sizes)
        writer.add_file_type(getattr(gguf.LlamaFileType, _TYPES[dtype][1]))
        if vocabulary is None:
            writer.add_tokenizer_model("no_vocab")
        else:
            _copy_vocabulary(gguf, writer, vocabulary, config.vocab_size)
        parts = {name: [tensor] for name, tensor in tensors.items()}
        if sizes["architecture"] == "openelm":
            for layer in range(config.num_hidden_layers):
                parts[f"blk.{layer}.attn_qkv.weight"] = [parts.pop(f"blk.{layer}.attn_{name}.weight")[0] for name in "qkv"]
        types = {name: _type_of(gguf, of_name[0], _TYPES[dtype][0]) for name, of_name in parts.items()}
        for name, of_name in parts.items():
            shape = (sum(len(part) for part in of_name), *of_name[0].shape[1:])
            n_bytes = int(np.prod(gguf.quant_shape_to_byte_shape(shape, types[name])))
            writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, raw_dtype=types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, of_name in parts.items():  # one at a time, since all of them may not fit into memory
            values = _ordered(name, torch.cat([part.detach().float().cpu() for part in of_name]), sizes)
            writer.write_tensor_data(gguf.quants.quantize(values.contiguous().numpy(), types[name]))
        writer.close()
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return name in the file → tensor of the model. Tied tensors occur once, under the name of the embedding."""
    found: dict[str, Tensor] = {}
    known: set[int] = set()
    for name, entry in named_entries(model).items():
        if id(entry) in known:
            continue
        known.add(id(entry))
        home, _, kind = name.rpartition(".")
        layer = home.removeprefix("model.layers.").split(".", 1)
        to = _LAYER.get(layer[-1]) if len(layer) == 2 and home.startswith("model.layers.") else None
        to = f"blk.{layer[0]}.{to}" if to else _TOP.get(home)
        if to is None or (kind == "bias" and to in _TOP.values()):
            raise _refusal(model, f"the tensor {name!r} has no place in it")
        found[f"{to}.{kind}"] = entry
    if any(entry.is_meta for entry in found.values()):
        raise UnsupportedModelError(f"this {type(model).__name__} is on the meta device, without weights; load them first")
    return found


def _refusal(model: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be written as GGUF with its own widths in each layer: {why}. llama.cpp has such"
        " layers for models built like Llama. With equal widths (sparsekit.graph.edit.tie_layers, sparsekit.fit_config),"
        " save_pretrained writes a folder for convert_hf_to_gguf.py of llama.cpp"
    )


def _sizes(model: nn.Module, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the header fields: sizes of every layer, and the rotary position embedding."""
    count = getattr(config, "num_hidden_layers", 0)
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    needed = [f"blk.{layer}.{part}.weight" for layer in range(count) for part in parts]
    if lacking := next((name for name in ("token_embd.weight", "output_norm.weight", *needed) if name not in tensors), None):
        raise _refusal(model, f"it has nothing to write as {lacking!r}")
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings and set(getattr(config, "layer_types", ())) != {"full_attention"}:
        raise _refusal(model, f"it attends to {window} of {config.max_position_embeddings} positions, and the format to all")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta, factors = _rope(model, config, head)
    normed = "blk.0.attn_q_norm.weight" in tensors
    if normed and ("output.weight" in tensors or any(name.endswith(".bias") for name in tensors) or bool((factors != 1).any())):
        raise _refusal(model, "norms of queries and keys beside untied embeddings, biases or stretched positions")
    widths = {
        part: [tensors[f"blk.{layer}.{part}.weight"].shape[0] for layer in range(count)]
        for part in ("attn_q", "attn_k", "ffn_up")
    }
    if any(wide % narrow for wide, narrow in zip(widths["attn_q"], widths["attn_k"], strict=True)):
        raise _refusal(model, "its keys serve unequal numbers of heads")
    return {
        "architecture": "openelm" if normed else "deci",
        "head": head,
        "heads": [width // head for width in widths["attn_q"]],
        "kv_heads": [width // head for width in widths["attn_k"]],
        "features": widths["ffn_up"],
        "theta": theta,
        "factors": factors,
    }


def _rope(model: Any, config: Any, head: int) -> tuple[float, Tensor]:
    """Return the base of the rotary position embedding, and the divisor of each frequency."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "none")
    if kind not in _ROPES:
        raise _refusal(model, f"its position embedding is {kind!r}, and the format has {', '.join(_ROPES)}")
    theta, own = float(rope["rope_theta"]), model.model.rotary_emb.inv_freq.detach().double().cpu()
    plain = theta ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    if own.shape != plain.shape:
        raise _refusal(model, "its position embedding rotates only some dimensions of each head")
    factors = plain / own
    return theta, torch.where((factors - 1).abs() < _ROUNDING, 1.0, factors)


def _describe(writer: Any, config: Any, sizes: Mapping[str, Any]) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_feed_forward_length(sizes["features"])
    writer.add_key_length(sizes["head"])
    writer.add_value_length(sizes["head"])
    writer.add_rope_dimension_count(sizes["head"])
    writer.add_rope_freq_base(sizes["theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _copy_vocabulary(gguf: Any, writer: Any, path: str | os.PathLike[str], size: int) -> None:
    fields = {name: field for name, field in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer.")}
    tokens = fields.get("tokenizer.ggml.tokens")
    found = 0 if tokens is None else len(tokens.data)
    if found != size:
        raise InvalidValueError(
            f"the vocabulary in {path} has {found} tokens, and the model {size}; pass a GGUF file of this model"
        )
    for name, field in fields.items():
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)


def _type_of(gguf: Any, tensor: Tensor, wanted: str) -> Any:
    if tensor.dim() == 1:
        wanted = "F32"
    elif wanted == "Q8_0" and tensor.shape[-1] % 32:
        wanted = "F16"
    return getattr(gguf.GGMLQuantizationType, wanted)


def _ordered(name: str, values: Tensor, sizes: Mapping[str, Any]) -> Tensor:
    """Return the values in the row order of the file: `deci` rotates adjacent rows of a head, transformers distant ones."""
    part = name.split(".")[-2]
    if sizes["architecture"] != "deci" or part not in ("attn_q", "attn_k"):
        return values
    return values.reshape(-1, 2, sizes["head"] // 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _compare(model: nn.Module, config: Any, tensors: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
    """Raise if the outputs of the exported architecture differ from the model's; comparing class names would not show it."""
    ids = torch.randint(config.vocab_size, (_PROBE,), generator=torch.Generator().manual_seed(0))
    training = model.training
    try:
        with torch.no_grad():
            found = model.eval()(input_ids=ids.to(tensors["token_embd.weight"].device)[None]).logits[0].float()
            expected = _computed(config, tensors, sizes, ids.to(found.device))
    finally:
        model.train(training)
    difference = float((found - expected).abs().max() / found.abs().max())
    exact = all(tensor.dtype.itemsize >= 4 for tensor in tensors.values())
    if not difference <= (_TOLERANCE if exact else _TOLERANCE_OF_HALVES):
        activation = getattr(config, "hidden_act", "silu")
        why = (
            f"its features are {activation!r}, and the format has 'silu'"
            if activation != "silu"
            else "its layers compute otherwise"
        )
        raise _refusal(model, f"{why} (logits would differ by {difference:.2g} of the largest)")


def _computed(config: Any, tensors: Mapping[str, Tensor], sizes: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Return the logits that llama.cpp computes from the tensors, in float32."""
    head, eps = sizes["head"], config.rms_norm_eps
    even = torch.arange(0, head, 2, dtype=torch.float64, device=ids.device) / head
    turns = torch.outer(
        torch.arange(len(ids), device=ids.device).double(), sizes["theta"] ** -even / sizes["factors"].to(ids.device)
    )
    cos, sin = turns.cos().float().repeat(1, 2), turns.sin().float().repeat(1, 2)

    def product(x: Tensor, name: str) -> Tensor:
        bias = tensors.get(f"{name}.bias")
        return F.linear(x, tensors[f"{name}.weight"].float(), None if bias is None else bias.float())

    def norm(x: Tensor, name: str) -> Tensor:
        weight = tensors.get(f"{name}.weight")
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight.float(), eps)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    x = F.embedding(ids, tensors["token_embd.weight"]).float()
    for layer in range(config.num_hidden_layers):
        part = f"blk.{layer}."
        h = norm(x, f"{part}attn_norm")
        q, k, v = (product(h, f"{part}attn_{name}").view(len(ids), -1, head).transpose(0, 1) for name in "qkv")
        q, k = turned(norm(q, f"{part}attn_q_norm")), turned(norm(k, f"{part}attn_k_norm"))
        k, v = (each.repeat_interleave(len(q) // len(each), 0) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + product(mixed.transpose(0, 1).reshape(len(ids), -1), f"{part}attn_output")
        h = norm(x, f"{part}ffn_norm")
        x = x + product(F.silu(product(h, f"{part}ffn_gate")) * product(h, f"{part}ffn_up"), f"{part}ffn_down")
    return product(norm(x, "output_norm"), "output" if "output.weight" in tensors else "token_embd")
