"""Width, depth or both: time ÷ at half of the FLOPs, passes in turns with the dense model, on one thread.

    python benchmarks/depth.py
    python benchmarks/depth.py --nets llama --seconds 20 --json depth.json

Magnitudes choose, so that no data are needed: what is compared is time, not accuracy. Processor time counts, so that a busy
machine disturbs little. "both" removes a quarter of the branches, and widths do the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from nets import ResNet50, VisionTransformer
from torch import nn

import sparsekit as sk

WIDTHS = ["channel", "feature", "head"]
ARMS: dict[str, dict[str, Any]] = {
    "width": {},
    "width, multiples of 16": {"multiple_of": 16},
    "depth": {"keep": WIDTHS, "limits": {"block": (0.0, 1.0)}},
    "both": {"limits": {"block": (0.0, 0.75)}, "multiple_of": 16},
}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


NETS: dict[str, tuple[Any, Any]] = {
    "ResNet-50, 224 pixels": (ResNet50, lambda n: (torch.randn(n, 3, 224, 224),)),
    "ViT-S, 224 pixels": (lambda: VisionTransformer(tokens=196), lambda n: (torch.randn(n, 3, 224, 224),)),
    "Llama of 30 million, 128 tokens": (_llama, lambda n: (torch.randint(4096, (n, 128)),)),
}


def measure(before: nn.Module, after: nn.Module, inputs: Any, seconds: float) -> tuple[float, float, float]:
    """Median and quartiles of processor time before ÷ after, over turns."""

    def once(model: nn.Module) -> float:
        start = time.process_time()
        model(*inputs)
        return time.process_time() - start

    ratios: list[float] = []
    with torch.no_grad():
        once(before), once(after)
        begun = time.perf_counter()
        while len(ratios) < 5 or time.perf_counter() - begun < seconds:
            first, second = (before, after) if len(ratios) % 2 else (after, before)
            spent = {id(first): once(first), id(second): once(second)}
            ratios.append(spent[id(before)] / spent[id(after)])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="", help="only nets whose name contains this text")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    print("| network | by | branches gone | FLOPs ÷ | time ÷, batch 1 | time ÷, batch 8 |\n|---|---|---|---|---|---|")
    for name, (make, inputs) in NETS.items():
        if given.nets.lower() not in name.lower():
            continue
        torch.manual_seed(0)
        model = make().eval()
        for arm, options in ARMS.items():
            pruned = sk.prune(model, inputs(1), budget=sk.Budget(flops=given.budget), **options)
            blocks = [group.after for group in pruned.report.groups if group.kind == "block"]
            fewer = pruned.report.before["flops"] / pruned.report.after["flops"]
            times = {n: measure(model, pruned.model.eval(), inputs(n), given.seconds) for n in (1, 8)}
            rows.append({"net": name, "by": arm, "gone": blocks.count(0), "of": len(blocks), "flops": fewer, "times": times})
            told = " | ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in times.values())
            gone = f"{blocks.count(0)} of {len(blocks)}" if blocks else ""
            print(f"| {name} | {arm} | {gone} | {fewer:.2f} | {told} |", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
