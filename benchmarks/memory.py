"""Peak memory and processor time of tracing and pruning a random transformer in bfloat16.

    python -W ignore benchmarks/memory.py 1.1 > rows.jsonl     0.1, 0.4 or 1.1 billion parameters; "tiny" for a try
    python -W ignore benchmarks/memory.py 1.1 --in-place       prune the dense model in place, without a second model

Memory is the peak resident set of a step in GiB, weights included, without the memory of the process before the model is made.
Linux only: the peak is read from /proc, and reset before each step. On a core without bfloat16 instructions, use
`--examples 3 --tokens 2`.
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

SIZES = {
    "tiny": {"blocks": 4, "width": 128, "inner": 512, "heads": 4, "words": 4_000},
    "0.1": {"blocks": 12, "width": 768, "inner": 2048, "heads": 12, "words": 32_000},
    "0.4": {"blocks": 24, "width": 1024, "inner": 3584, "heads": 16, "words": 32_000},
    "1.1": {"blocks": 16, "width": 2048, "inner": 8192, "heads": 16, "words": 32_000},
}


class Block(nn.Module):
    """Attention and a gated feed-forward layer, as in Llama, without position embeddings."""

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
    """Return the resident bytes: now ("RSS"), or the peak since the last reset ("HWM")."""
    found = re.search(rf"Vm{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return 1024 * int(found[1])


def main() -> None:
    options = options_of(__doc__, "size", choices={"size": SIZES}, examples=8, tokens=16, criterion="fisher", in_place=False)
    sizes = SIZES[options.size]
    torch.manual_seed(0)
    tokens = torch.randint(sizes["words"], (options.examples, 1, options.tokens))
    batches = [(each, each.flatten()) for each in tokens]
    base = resident("RSS")
    torch.set_default_dtype(torch.bfloat16)
    model = Transformer(**sizes).eval()
    torch.set_default_dtype(torch.float32)
    about = {"size": options.size, "parameters": sum(entry.numel() for entry in model.parameters())}
    about["weights"] = sum(entry.nbytes for entry in model.parameters()) / 2**30

    def step(name: str, call: Callable[[], Any]) -> Any:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
        start = time.process_time()
        result = call()
        row = {"step": name, "peak": (resident("HWM") - base) / 2**30, "seconds": time.process_time() - start}
        print(
            json.dumps(about | {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}),
            flush=True,
        )
        return result

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), target)

    graph = step("trace", lambda: sk.trace_units(model, tokens[0]))
    settings: dict[str, Any] = {"budget": "flops=50%", "batches": batches, "loss": loss, "criterion": options.criterion}
    settings |= {"allocation": "by_loss", "graph": graph}
    if not options.in_place:
        step("prune", lambda: sk.prune(model, (tokens[0],), **settings) and None)
        return
    decided = step("score", lambda: sk.plan(model, (tokens[0],), **settings))
    step("reconstruct in place", lambda: sk.reconstruct(model, model, graph, decided.mask, batches))


if __name__ == "__main__":
    main()
