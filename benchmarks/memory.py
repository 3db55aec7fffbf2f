"""Peak memory of tracing, scoring, and reconstructing in place a random transformer of a billion parameters in bfloat16.

    python benchmarks/memory.py            one JSON line for each step
    python benchmarks/memory.py --quick    the same on a network of 2 million parameters

Numbers are resident bytes at the peak of a step, as shares of the dense weights, with those weights included and without
what the process needs before they are made. Linux only: the peak is read from /proc, and reset before each step. On a core
without instructions for bfloat16, take `--examples 3 --tokens 2`.
"""

import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import options_of
from torch import Tensor, nn

import sparsekit as sk

FULL = {"blocks": 14, "width": 2048, "inner": 8192, "heads": 16, "words": 32_000}
QUICK = {"blocks": 4, "width": 128, "inner": 512, "heads": 4, "words": 4_000}


class Block(nn.Module):
    """Attention and a gated feed-forward layer, as in Llama, without positions."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Transformer(nn.Module):
    def __init__(self, *, blocks: int, width: int, inner: int, heads: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, inner, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def resident(what: str) -> int:
    """Bytes in memory now, "RSS", or at the peak since the last reset, "HWM"."""
    found = re.search(rf"Vm{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return 1024 * int(found[1])


def main() -> None:
    options = options_of(__doc__, quick=False, examples=8, tokens=16, criterion="fisher")
    sizes = QUICK if options.quick else FULL
    torch.manual_seed(0)
    tokens = torch.randint(sizes["words"], (options.examples, 1, options.tokens))
    batches = [(each, each.flatten()) for each in tokens]
    base = resident("RSS")
    torch.set_default_dtype(torch.bfloat16)
    model = Transformer(**sizes).eval()
    torch.set_default_dtype(torch.float32)
    weights = sum(entry.nbytes for entry in model.parameters())

    def step(name: str, call: Callable[[], Any]) -> Any:
        gc.collect()
        before = resident("RSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
        start = time.perf_counter()
        result = call()
        row = {"step": name, "before": (before - base) / weights, "peak": (resident("HWM") - base) / weights}
        print(json.dumps(row | {"gigabytes": weights / 1e9, "seconds": time.perf_counter() - start}), flush=True)
        return result

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), target)

    graph = step("trace", lambda: sk.trace_units(model, tokens[0]))
    decided = step(
        "score",
        lambda: sk.plan(
            model, (tokens[0],), budget="flops=50%", batches=batches, loss=loss, criterion=options.criterion, graph=graph
        ),
    )
    step("reconstruct", lambda: sk.reconstruct(model, model, graph, decided.mask, batches))


if __name__ == "__main__":
    main()
