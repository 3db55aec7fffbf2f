"""Time ÷ against FLOPs ÷: nine networks cut to equal FLOPs by sparsekit and by Torch-Pruning, timed in turns.

    python benchmarks/faster.py --out faster.jsonl                  what is not in the file yet, then the tables
    python benchmarks/faster.py --out faster.jsonl --models resnet50 --arms 1 auto --shares 0.5 --batches 8
    python benchmarks/faster.py --out faster.jsonl --latency        a budget of half of the milliseconds, measured afterwards
    python benchmarks/faster.py --out faster.jsonl --picture docs/pictures/time.svg
    python benchmarks/faster.py --out faster.jsonl --table
    python benchmarks/faster.py --out depth.jsonl --models resnet50 vit-b16 llama --arms 1 16 depth both --shares 0.5

Arms are what `multiple_of` is, and Torch-Pruning at three values of its `round_to`. "depth" removes residual branches alone,
and "both" a quarter of them, where widths in multiples of 16 do the rest. In each turn every model runs once, in a fresh
order, in eval mode on one thread; what counts is the median over the turns of time dense ÷ time pruned, in processor time on
a CPU. All networks have random weights: times do not depend on them. Torch-Pruning takes the same share of every layer, as it
does by default, and that share is bisected until the FLOPs are met.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nets import DenseNet121, ResNet50, VisionTransformer, mobilenet_v2, vgg16
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.measure.latency_cache import device_name

TOKENS = 128
ARMS = ("1", "auto", "16", "torch-pruning 1", "torch-pruning 8", "torch-pruning 16")


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(num_labels=1000))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig())


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 10_000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False))


def _lstm() -> nn.Module:
    from sparsekit_fl.problem.models.lstm import NextWordLstm

    return NextWordLstm()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": ResNet50,
    "vgg16": vgg16,
    "mobilenetv2": mobilenet_v2,
    "densenet121": DenseNet121,
    "convnext-tiny": _convnext,
    "vit-b16": lambda: VisionTransformer(width=768, heads=12, tokens=196),
    "bert-base": _bert,
    "gpt2-small": _gpt2,
    "lstm": _lstm,
    "llama": _llama,
}
DEPTH: dict[str, dict[str, Any]] = {
    "depth": {"keep": ["channel", "feature", "head"], "limits": {"block": (0.0, 1.0)}},
    "both": {"multiple_of": 16, "limits": {"block": (0.0, 0.75)}},
}
CONVOLUTIONAL = ("resnet50", "vgg16", "mobilenetv2", "densenet121", "convnext-tiny")


def example(name: str, batch: int, device: str) -> Tensor:
    """Images of 224 pixels, or tokens."""
    generator = torch.Generator().manual_seed(0)
    if name in ("bert-base", "gpt2-small", "lstm", "llama"):
        return torch.randint(0, 10_000, (batch, TOKENS), generator=generator).to(device)
    return torch.randn(batch, 3, 224, 224, generator=generator).to(device)


def flops_of(model: nn.Module, x: Tensor) -> int:
    """FLOPs of the inputs."""
    return sk.count_cost(model, x).flops_compact


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError when it takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def torch_pruning(dense: nn.Module, x: Tensor, share: float, round_to: int) -> nn.Module:
    """Its cut with the most FLOPs that are no more than was asked, 1 % above allowed."""
    import torch_pruning as tp

    def cut(ratio: float) -> nn.Module:
        model = copy.deepcopy(dense)
        heads: dict[nn.Module, int] = {}
        for module in model.modules():
            if hasattr(module, "qkv"):
                heads[module.qkv] = module.num_heads
            elif hasattr(module, "query"):
                heads |= dict.fromkeys((module.query, module.key, module.value), module.num_attention_heads)
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        pruner = tp.pruner.BasePruner(
            model,
            x,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=ratio,
            round_to=round_to if round_to > 1 else None,
            num_heads=heads,
            ignored_layers=last,
            output_transform=lambda out: getattr(out, "logits", out).sum(),
        )
        pruner.step()
        for module in model.modules():
            if hasattr(module, "qkv"):
                module.head_dim = module.qkv.out_features // (3 * module.num_heads)
            elif hasattr(module, "query"):
                module.all_head_size = module.query.out_features
                module.attention_head_size = module.all_head_size // module.num_attention_heads
        return model

    asked = share * flops_of(dense, x)
    low, high, best, got = 0.0, 1.0, None, 0.0
    ratio = 1 - math.sqrt(share)
    for _ in range(8):
        model = cut(ratio)
        flops = flops_of(model, x)
        if flops > 1.01 * asked:
            low = ratio
        else:
            high = ratio
            if flops > got:
                best, got = model, flops
            if flops > 0.99 * asked:
                break
        ratio = (low + high) / 2
    if best is None:
        raise RuntimeError("no ratio meets the FLOPs")
    return best


def cut(arm: str, dense: nn.Module, x: Tensor, share: float) -> nn.Module:
    """The model of an arm."""
    budget = sk.Budget(flops=f"{100 * share:g}%")
    if arm in DEPTH:
        return sk.prune(dense, (x,), budget=budget, **DEPTH[arm]).model
    name, _, number = arm.rpartition(" ")
    if name:
        return torch_pruning(dense, x, share, int(number))
    multiple: Any = arm if arm == "auto" else int(arm)
    return sk.prune(dense, (x,), budget=budget, multiple_of=multiple).model


def in_turns(models: dict[str, nn.Module], x: Tensor, seconds: float) -> dict[str, dict[str, float]]:
    """Name → median milliseconds, and median and quartiles of the time of "dense" ÷ its own in the same turn."""
    order = np.random.default_rng(0)
    synchronize = torch.get_device_module(x.device).synchronize
    clock = time.process_time if x.device.type == "cpu" else time.perf_counter
    names, rows = list(models), []
    with torch.no_grad():
        begun = time.perf_counter()
        while len(rows) < 7 or (len(rows) < 102 and time.perf_counter() - begun < seconds):
            row = np.zeros(len(names))
            for place in order.permutation(len(names)):
                synchronize()
                start = clock()
                models[names[place]](x)
                synchronize()
                row[place] = 1000 * (clock() - start)
            rows.append(row)
    times = np.array(rows[2:])
    dense = times[:, names.index("dense")]
    found = {}
    for place, name in enumerate(names):
        low, middle, high = (float(q) for q in np.quantile(dense / times[:, place], [0.25, 0.5, 0.75]))
        milliseconds = float(np.median(times[:, place]))
        found[name] = {"ms": milliseconds, "faster": middle, "low": low, "high": high, "turns": len(times)}
    return found


def measure(options: argparse.Namespace) -> None:
    """Cut and time what is not in the file yet."""
    done = {(row["model"], row["share"], row["arm"], row["batch"]) for row in read(options.out) if row["part"] == "flops"}
    about = {"device": device_name(torch.device(options.device))}
    for name in options.models:
        dense = None
        for share in options.shares:
            missing = [arm for arm in options.arms if any((name, share, arm, batch) not in done for batch in options.batches)]
            if not missing:
                continue
            if dense is None:
                torch.manual_seed(0)
                dense = MODELS[name]().eval().to(options.device)
                x = example(name, 1, options.device)
                flops = flops_of(dense, x)
            models, facts = {"dense": dense}, {}
            for arm in missing:
                begun = time.process_time()
                try:
                    with at_most(options.limit):
                        models[arm] = cut(arm, dense, x, share).eval()
                        facts[arm] = {"fewer": flops / flops_of(models[arm], x), "cut_seconds": time.process_time() - begun}
                except Exception as error:  # noqa: BLE001 - that a library cannot is a result
                    facts[arm] = {"error": f"{type(error).__name__}: {error}"[:200]}
                    models.pop(arm, None)
            for batch in options.batches:
                timed = in_turns(models, example(name, batch, options.device), options.seconds)
                for arm in missing:
                    row = {"part": "flops", "model": name, "share": share, "arm": arm, "batch": batch, **facts[arm]}
                    row |= timed.get(arm, {}) | {"dense_ms": timed["dense"]["ms"], "load": os.getloadavg()[0]} | about
                    write(options.out, row)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, row: dict[str, Any]) -> None:
    """Add a line, and show it."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("faster.jsonl"))
    parser.add_argument("--models", nargs="+", default=[name for name in MODELS if name != "llama"], choices=list(MODELS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.25])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seconds", type=float, default=5.0, help="for the turns of one model, share and batch; 7 at least")
    parser.add_argument("--limit", type=int, default=300, help="seconds that an arm may take to cut a model")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    measure(options)


if __name__ == "__main__":
    main()
