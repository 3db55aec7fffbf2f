"""Which public models can be pruned: implementations with random weights, traced, cut and compared.

    python benchmarks/models.py                # every model whose package is installed: the table, and models.json
    python benchmarks/models.py levit gpt-oss  # some of them; the others keep their rows in models.json
    python benchmarks/models.py --page         # write docs/evidence/models.md from models.json
    python benchmarks/models.py --against ../other  # traces here and in another checkout in turns: seconds, and their ratio

A name selects all models whose names contain it. The packages are the dependency group `models`; install them with --no-deps if
torch is already installed. Each model runs in a separate process. Seconds are processor time of `trace_units` on one thread.
Sizes are small if the class allows it.
"""

import contextlib
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from common import in_process, in_turns, options_of, processor_seconds
from laws import run_gated
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import SparsekitError
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.inputs import ModelInputs, find_tensors

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "evidence" / "models.md"
LIMIT = 300  # seconds of processor time for one model
TURNS = 5  # of a comparison, after a warm one; the smallest time counts, since other work on the machine only adds to it


def image(size: int, channels: int = 3, batch: int = 1) -> tuple[Tensor, ...]:
    return (torch.randn(batch, channels, size, size),)


def ids(length: int = 12, words: int = 96) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(2 * length).reshape(2, length) * 7 % words}


def timm(name: str, size: int = 64, **options: Any) -> Any:
    return importlib.import_module("timm").create_model(name, num_classes=10, **options), image(size)


def vision(name: str, size: int = 64) -> Any:
    return importlib.import_module("torchvision.models").get_model(name, num_classes=10, weights=None), image(size)


def yolo(file: str, size: int = 64) -> Any:
    return importlib.import_module("ultralytics.nn.tasks").DetectionModel(file, verbose=False), image(size)


def smp(name: str, encoder: str = "resnet18", size: int = 64) -> Any:
    package = importlib.import_module("segmentation_models_pytorch")
    return getattr(package, name)(encoder, encoder_weights=None, classes=3), image(size, batch=2)


def graph(name: str, **options: Any) -> Any:
    model = getattr(importlib.import_module("torch_geometric.nn"), name)(8, 32, 2, 4, **options)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 5, 0]])
    return model, (torch.randn(10, 8), edges)


def hugging(kind: str, inputs: Any, config: str = "", **options: Any) -> Any:
    package = importlib.import_module("transformers")
    model = getattr(package, kind)
    settings = getattr(package, config)(**options) if config else model.config_class(**options)
    return model(settings), inputs


def language(kind: str, **options: Any) -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    return hugging(kind, ids(), **sizes | options)


def diffusers(kind: str, inputs: Any, **options: Any) -> Any:
    return getattr(importlib.import_module("diffusers"), kind)(**options), inputs


def unet(*blocks: int, attention: int, context: int, samples: int = 16) -> Any:
    inputs = {"sample": image(samples, 4)[0], "timestep": torch.tensor(3), "encoder_hidden_states": torch.randn(1, 7, context)}
    down = (*("CrossAttnDownBlock2D",) * (len(blocks) - 1), "DownBlock2D")
    up = ("UpBlock2D", *("CrossAttnUpBlock2D",) * (len(blocks) - 1))
    return diffusers("UNet2DConditionModel", inputs, block_out_channels=blocks, down_block_types=down, up_block_types=up,
                     cross_attention_dim=context, attention_head_dim=attention, norm_num_groups=8)  # fmt: skip


def vae() -> Any:
    blocks = {"block_out_channels": (32, 64), "latent_channels": 4, "norm_num_groups": 8, "layers_per_block": 1}
    blocks |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return diffusers("AutoencoderKL", image(32), **blocks)


def dit() -> Any:
    inputs = {"hidden_states": image(8, 4)[0], "timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    return diffusers("DiTTransformer2DModel", inputs, num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2,
                     sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10)  # fmt: skip


def whisper() -> Any:
    inputs = {"input_features": torch.randn(1, 16, 60), "decoder_input_ids": ids()["input_ids"][:1]}
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 16, "max_source_positions": 30}
    sizes |= {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return hugging("WhisperForConditionalGeneration", inputs, **sizes)


def clip() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = sizes | {"vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 95, "bos_token_id": 1, "pad_token_id": 0}
    inputs = ids() | {"pixel_values": image(32, batch=2)[0]}
    return hugging("CLIPModel", inputs, text_config=words, vision_config=sizes | {"image_size": 32, "patch_size": 8})


def detr(kind: str, **options: Any) -> Any:
    package = importlib.import_module("transformers")
    stages = ["stage2", "stage3", "stage4"][-options.get("num_feature_levels", 1) :]
    backbone = package.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], out_features=stages)
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 10, "use_timm_backbone": False}
    sizes |= {"use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone, "num_labels": 5}
    return hugging(kind, {"pixel_values": image(64)[0]}, **sizes | options)


def rt_detr() -> Any:
    package = importlib.import_module("transformers")
    backbone = package.RTDetrResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
                                          layer_type="basic", out_features=["stage2", "stage3", "stage4"])  # fmt: skip
    sizes = {"encoder_hidden_dim": 64, "encoder_in_channels": [32, 48, 64], "d_model": 64, "decoder_in_channels": [64, 64, 64]}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    sizes |= {"decoder_layers": 2, "num_queries": 10, "num_labels": 5, "backbone_config": backbone, "num_denoising": 0}
    return hugging("RTDetrForObjectDetection", {"pixel_values": image(64)[0]}, **sizes)


def sam() -> Any:
    vision = {"hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64}
    vision |= {"patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 128, "num_pos_feats": 16}
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 8}
    mask = {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
    inputs = {"pixel_values": image(64)[0], "input_points": torch.tensor([[[[10.0, 20.0]]]])}
    return hugging("SamModel", inputs, vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)


def segformer() -> Any:
    sizes = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 64, "num_labels": 5}
    return hugging(
        "SegformerForSemanticSegmentation", {"pixel_values": image(64)[0]}, **sizes, num_attention_heads=[1, 2, 3, 4]
    )


def dpt() -> Any:
    sizes = _VISION | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 48, 64]}
    sizes |= {"fusion_hidden_size": 32, "image_size": 64, "is_hybrid": False}
    return hugging("DPTForDepthEstimation", {"pixel_values": image(64)[0]}, **sizes)


def video(kind: str, **options: Any) -> Any:
    # The feed-forward width is four times the hidden size, as published.
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32}
    sizes |= {"patch_size": 8, "num_frames": 4, "num_labels": 5}
    return hugging(kind, {"pixel_values": torch.randn(1, 4, 3, 32, 32)}, **sizes | options)


def deepseek() -> Any:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    return language("DeepseekV3ForCausalLM", **sizes, moe_intermediate_size=32, num_key_value_heads=4)


def monai(name: str, *args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module("monai.networks.nets"), name)(*args, **options), (torch.randn(1, 1, 32, 32, 32),)


def vit_pytorch() -> Any:
    model = importlib.import_module("vit_pytorch").SimpleViT(
        image_size=32, patch_size=8, num_classes=5, dim=64, depth=2, heads=4, mlp_dim=128
    )
    return model, image(32)


def mambapy() -> Any:
    package = importlib.import_module("mambapy.mamba")
    return package.Mamba(package.MambaConfig(d_model=32, n_layers=2)), (torch.randn(2, 8, 32),)


_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
           "patch_size": 8}  # fmt: skip
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
           "moe_intermediate_size": 32, "n_shared_experts": 1}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

_TORCHVISION = {"alexnet": 64, "densenet121": 64, "efficientnet_v2_s": 64, "mnasnet0_5": 64, "mobilenet_v2": 64,
                "mobilenet_v3_small": 64, "regnet_y_400mf": 64, "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64,
                "shufflenet_v2_x1_0": 64, "squeezenet1_1": 64, "vgg11_bn": 64, "convnext_tiny": 64, "swin_t": 64,
                "vit_b_16": 224}  # fmt: skip
_TIMM = {"resnet18": 64, "mobilenetv3_small_100": 64, "vit_tiny_patch16_224": 224, "xcit_nano_12_p16_224": 224,
         "vit_small_patch16_dinov3": 64, "eva02_tiny_patch14_224": 224, "gcvit_xxtiny": 224, "focalnet_tiny_srf": 64,
         "shvit_s1": 64, "fasternet_t0": 64, "repvit_m0_9": 64, "mobileone_s0": 64, "tiny_vit_5m_224": 224,
         "mambaout_femto": 64, "starnet_s1": 64, "hgnetv2_b0": 64, "mobilenetv4_conv_small": 64}  # fmt: skip

MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "BERT": ("transformers", lambda: language("BertForSequenceClassification")),
    "GPT-2": ("transformers", lambda: language("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, n_positions=64)),
    "ViT": ("transformers", lambda: hugging("ViTForImageClassification", image(32), **_VISION)),
    "OLMo-2": ("transformers", lambda: language("Olmo2ForCausalLM")),
    "ModernBERT": ("transformers", lambda: language("ModernBertForMaskedLM")),
    "GLM-4 MoE": ("transformers", lambda: language("Glm4MoeForCausalLM", **_ROUTED, head_dim=16)),
    "MiniMax": (
        "transformers",
        lambda: language(
            "MiniMaxForCausalLM", **_EXPERTS, head_dim=16, block_size=8, layer_types=["linear_attention", "full_attention"]
        ),
    ),
    "OLMoE": ("transformers", lambda: language("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2)),
    "Phi-3.5 MoE": ("transformers", lambda: language("PhimoeForCausalLM", **_EXPERTS)),
    **{f"{name}, torchvision": ("torchvision", partial(vision, name, size)) for name, size in _TORCHVISION.items()},
    **{name: ("timm", partial(timm, name, size)) for name, size in _TIMM.items()},
    "YOLOv8n": ("ultralytics", lambda: yolo("yolov8n.yaml")),
    "YOLO11n": ("ultralytics", lambda: yolo("yolo11n.yaml")),
    "UNet2DCondition": ("diffusers", lambda: unet(32, 64, attention=8, context=32)),
    "Stable Diffusion UNet, ¼ width": ("diffusers", lambda: unet(80, 160, 320, 320, attention=8, context=768)),
    "AutoencoderKL": ("diffusers", vae),
    "DiT": ("diffusers", dit),
    "Unet, ResNet-18": ("segmentation-models-pytorch", lambda: smp("Unet")),
    "Unet++, ResNet-18": ("segmentation-models-pytorch", lambda: smp("UnetPlusPlus")),
    "DeepLabV3+, ResNet-18": ("segmentation-models-pytorch", lambda: smp("DeepLabV3Plus")),
    "FPN, EfficientNet-B0": ("segmentation-models-pytorch", lambda: smp("FPN", "efficientnet-b0")),
    "MAnet, ResNet-18": ("segmentation-models-pytorch", lambda: smp("MAnet")),
    "GCN": ("torch-geometric", lambda: graph("GCN")),
    "GraphSAGE": ("torch-geometric", lambda: graph("GraphSAGE")),
    "GIN": ("torch-geometric", lambda: graph("GIN")),
    "GAT": ("torch-geometric", lambda: graph("GAT", heads=4)),
    "res2net50_26w_4s": ("timm", lambda: timm("res2net50_26w_4s")),
    "levit_128s": ("timm", lambda: timm("levit_128s", 224)),
    "crossvit_9_240": ("timm", lambda: timm("crossvit_9_240", 240)),
    "coat_tiny": ("timm", lambda: timm("coat_tiny", img_size=64)),
    "edgenext_xx_small": ("timm", lambda: timm("edgenext_xx_small")),
    "resnetblur50": ("timm", lambda: timm("resnetblur50")),
    "convnextv2_atto": ("timm", lambda: timm("convnextv2_atto")),
    "swin_tiny_patch4_window7_224": ("timm", lambda: timm("swin_tiny_patch4_window7_224", 224)),
    "mobilevit_xxs": ("timm", lambda: timm("mobilevit_xxs")),
    "efficientnet_b0": ("timm", lambda: timm("efficientnet_b0")),
    "Llama": ("transformers", lambda: language("LlamaForCausalLM")),
    "Qwen3": ("transformers", lambda: language("Qwen3ForCausalLM", head_dim=16)),
    "Gemma 3": ("transformers", lambda: language("Gemma3ForCausalLM", head_dim=16, sliding_window=8)),
    "Phi-3": ("transformers", lambda: language("Phi3ForCausalLM")),
    "DeepSeek-V3": ("transformers", deepseek),
    "GPT-OSS": ("transformers", lambda: language("GptOssForCausalLM", **_EXPERTS, head_dim=16)),
    "Mixtral": ("transformers", lambda: language("MixtralForCausalLM", **_EXPERTS)),
    "Mamba-2": (
        "transformers",
        lambda: language("Mamba2ForCausalLM", num_heads=8, head_dim=16, state_size=16, n_groups=1, chunk_size=8),
    ),
    "Whisper": ("transformers", whisper),
    "CLIP": ("transformers", clip),
    "DETR": ("transformers", lambda: detr("DetrForObjectDetection")),
    "Deformable DETR": ("transformers", lambda: detr("DeformableDetrForObjectDetection", num_feature_levels=3)),
    "RT-DETR": ("transformers", rt_detr),
    "SAM": ("transformers", sam),
    "SegFormer": ("transformers", segformer),
    "DPT": ("transformers", dpt),
    "TimeSformer": ("transformers", lambda: video("TimesformerForVideoClassification")),
    "VideoMAE": ("transformers", lambda: video("VideoMAEForVideoClassification")),
    "SegResNet": ("monai", lambda: monai("SegResNet")),
    "UNETR": ("monai", lambda: monai("UNETR", 1, 2, 32, 8, 48, 96, 4)),
    "SimpleViT": ("vit-pytorch", vit_pytorch),
    "Mamba": ("mambapy", mambapy),
}


def randomized(model: nn.Module) -> nn.Module:
    """Give norms and biases random values, as in a trained network, so that none is 0 or 1 because of its initialization."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, entry in named_entries(model).items():
            if entry.is_floating_point() and entry.dim() == 1:
                middle = 1.0 if name.endswith(("weight", "running_var")) else 0.0
                entry.copy_(middle + 0.4 * (torch.rand(entry.shape, generator=rng) - 0.5))
    return model


def difference(model: nn.Module, inputs: ModelInputs, units: sk.UnitGraph) -> float:
    """Return the largest difference between outputs of the pruned and the masked model, as a share of the largest output."""
    rng = torch.Generator().manual_seed(1)
    scores = {name: torch.rand(group.size, generator=rng) for name, group in units.groups.items()}
    mask = sk.mask_from_scores(units, scores, sk.allocation.ratio_counts(units, 0.5))
    small = sk.compact(model, units, mask)
    with torch.no_grad():
        expected = run_gated(model, units, mask, inputs.args, inputs.kwargs)
        pairs = [pair for pair in zip(find_tensors(inputs.call(small)), expected, strict=True) if pair[0].is_floating_point()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs if a.numel())


def examine(build: Callable[[], Any]) -> dict[str, Any]:
    made, given = build()
    model, inputs = randomized(made).eval(), ModelInputs.of(given)
    parameters = sum(p.numel() for p in model.parameters())
    began = time.process_time()
    try:
        units = sk.trace_units(model, given)
    except SparsekitError as error:
        seconds = round(time.process_time() - began, 2)
        return {"params": parameters, "seconds": seconds, "groups": 0, "share": 0.0, "error": str(error).split("\n")[0]}
    seconds = time.process_time() - began
    touched = {piece.name for group in units.groups.values() for piece in group.slices}
    share = sum(p.numel() for name, p in model.named_parameters() if name in touched) / parameters
    costs = sk.cost_model(model, inputs, units)
    least = {name: group.rounded(1) for name, group in units.groups.items()}
    floor = costs.costs(least)["flops"] / costs.dense_costs()["flops"]
    reasons: Counter[str] = Counter()
    for each in units.unprunable:
        reasons[each.reason] += each.size
    return {
        "params": parameters,
        "seconds": round(seconds, 2),
        "groups": len(units.groups),
        "units": sum(group.size for group in units.groups.values()),
        "share": round(share, 4),
        "floor": round(floor, 4),
        "refused": sum(reasons.values()),
        "reasons": reasons.most_common(3),
        "difference": difference(model, inputs, units),
    }


def line(name: str, row: dict[str, Any]) -> str:
    cells = [name, MODELS[name][0], f"{row['seconds']:.1f}" if "seconds" in row else "–"]
    if "failed" in row or "error" in row:
        cells += ["–"] * 4 + [row.get("failed") or _short(row["error"].split("Found: ")[-1])]
        return f"| {' | '.join(cells)} |"
    cells += [str(row["groups"]), f"{row['share']:.0%}", f"{row['floor']:.0%}"]
    cells.append(f"{row['difference']:.0e}" if row["difference"] else "0")
    whole: Counter[str] = Counter()
    for reason, units in row["reasons"]:
        whole[_short(reason)] += units if reason != "model output" else 0
    cells.append("; ".join(f"{reason}: {units}" for reason, units in whole.most_common(2) if units))
    return f"| {' | '.join(cells)} |"


def _short(reason: str) -> str:
    text = reason.split(" at ")[0].split(";")[0].rstrip(",").replace("|", "\\|").replace("<", "\\<")
    return text if len(text) <= 110 else f"{text[:107]}…"


def serve() -> None:
    """Trace each model whose name is read from standard input, and print processor seconds."""
    for name in map(str.rstrip, sys.stdin):
        torch.manual_seed(0)
        made, given = MODELS[name][1]()
        print(processor_seconds(partial(sk.trace_units, randomized(made).eval(), given)), flush=True)


def against(tree: Path, names: list[str]) -> None:
    """Print trace times in another checkout and in this one, in turns, and their ratio."""
    code = "import sys; sys.path[:0] = sys.argv[1:]; import sparsekit, models; models.serve()"
    servers = {
        str(path): subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, path, HERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for path in (tree, HERE.parent)
    }

    def ask(path: str, name: str) -> float:
        print(name, file=servers[path].stdin, flush=True)
        assert servers[path].stdout is not None
        return float(servers[path].stdout.readline())

    ratios = []
    for name in names:
        times = in_turns({path: partial(ask, path, name) for path in servers}, TURNS, warm=1, seconds=lambda call: call())
        other, own = (min(times[path]) for path in servers)
        ratios.append(own / other)
        print(f"{name}: {other:.2f} → {own:.2f} s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"{len(ratios)} models: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")


HEAD = """# Supported models

Public implementations with random weights, traced without any option, cut to half of their units at random, and compared with
the masked model, one run of each. Written by `python benchmarks/models.py` and `--page`, with the dependency group `models`.
Most models are small configurations of their class, so their seconds say little about larger ones. {versions}

- **Seconds**: processor time of `sk.trace_units` on one thread of a busy machine.
- **Groups** of units, and **parameters**: the share that is in tensors with units.
- **Least FLOPs**: the share that is left where every group keeps as few units as it may.
- **Error**: largest difference between the outputs of the cut and of the masked model, in float32, as a share of the largest.
- **Not prunable**: why units stay whole, and how many; outputs of the model, which must stay, are left out.

| Model | Package | Seconds | Groups | Parameters | Least FLOPs | Error | Not prunable |
|---|---|---|---|---|---|---|---|
"""


def versions() -> str:
    names = sorted({"torch", "torchvision", *(name for name, _ in MODELS.values())})
    found = [f"{name} {metadata.version(name)}" for name in names if _has(name)]
    without = ""
    if _has("torchvision"):
        extension: Any = importlib.import_module("torchvision.extension")
        without = "" if extension._has_ops() else " The compiled operators of torchvision were missing."
    return f"Versions: {', '.join(found)}.{without}"


def _has(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


def write_page(rows: dict[str, Any]) -> None:
    lines = [line(name, rows[name]) for name in MODELS if name in rows]
    PAGE.write_text(HEAD.format(versions=rows["versions"]) + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    options = options_of(__doc__, "names*", out=Path("models.json"), page=False, against=Path)
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.page:
        write_page(rows)
        return
    wanted = [name for name in MODELS if not options.names or any(part.lower() in name.lower() for part in options.names)]
    if options.against:
        against(options.against.resolve(), wanted)
        return
    for module in ("transformers.modeling_utils", "diffusers.models.modeling_utils", "timm"):  # once, for all child processes
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for name in wanted:
        rows[name] = in_process(lambda build=MODELS[name][1]: examine(build), LIMIT)  # type: ignore[misc]
        print(line(name, rows[name]), flush=True)
        options.out.write_text(json.dumps(rows | {"versions": versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
