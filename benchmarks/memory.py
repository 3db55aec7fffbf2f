"""Peak memory and processor time of tracing and pruning a random transformer in bfloat16.

    python benchmarks/memory.py 1.1 > rows.jsonl     0.1, 0.4 or 1.1 billion parameters; "tiny" for a try
    python benchmarks/memory.py 1.1 --in-place       prune the dense model in place, without a second model
    python benchmarks/memory.py 3.2 --folder large > rows.jsonl     sk.prune_folder, on a random Llama made there
    python benchmarks/memory.py 3.2 --folder large --data           with data, block by block; --blocks 2 makes two of them,
                                                                    of which --budget params=88% cuts as much

Memory is the peak resident set of a step in GiB, weights included, without the memory of the process before the model is made.
Linux only: the peak is read from /proc, and reset before each step. On a core without bfloat16 instructions, use
`--examples 3 --tokens 2`.
"""

import gc
import json
import re
import shutil
import tempfile
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

LLAMAS = {
    "tiny": (576, 1536, 4, 9, 3, 4_000), "0.1": (576, 1536, 30, 9, 3, 49_152), "1.2": (2048, 8192, 16, 32, 8, 128_256),
    "3.2": (3072, 8192, 28, 24, 8, 128_256),
}  # fmt: skip
"""Width, inner width, blocks, heads, heads for keys and values, and words: of SmolLM2-135M, and of Llama 3.2 of 1B and 3B."""


def write_llama(size: str, folder: Path, blocks: int = 0) -> dict[str, Any]:
    """Write a random Llama in bfloat16, a shard for each block, unless it is there; return numbers and GiB of its parts.

    If `blocks` is not 0, it has so many.
    """
    import transformers
    from safetensors.torch import save_file

    width, inner, every, heads, kv_heads, words = LLAMAS[size]
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=blocks or every, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=words, tie_word_embeddings=True, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        entries = dict(transformers.LlamaForCausalLM(config).named_parameters())
    shards: dict[str, list[str]] = {}
    for name in entries:
        shards.setdefault(".".join(name.split(".")[:3]), []).append(name)
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for shard, names in shards.items():
            shapes = {name: entries[name].shape for name in names}
            made = {
                name: torch.empty(shape, dtype=torch.bfloat16).normal_(len(shape) == 1, 0.02) for name, shape in shapes.items()
            }
            save_file(made, folder / f"{shard}.safetensors", {"format": "pt"})
        where = {name: f"{shard}.safetensors" for shard, names in shards.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": where}), encoding="utf-8"
        )
        config.save_pretrained(folder)
    sizes = {shard: sum(2 * entries[name].numel() for name in names) / 2**30 for shard, names in shards.items()}
    parts = {"embedding": sizes["model.embed_tokens.weight"], "block": sizes["model.layers.0"]}
    return {"parameters": sum(each.numel() for each in entries.values()), "weights": sum(sizes.values()), **parts}


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
    options = options_of(
        __doc__, "size", choices={"size": SIZES | LLAMAS}, examples=8, tokens=16, criterion="fisher", in_place=False,
        folder=str, data=False, blocks=0, budget="params=70%",
    )  # fmt: skip
    torch.manual_seed(0)
    about: dict[str, Any] = {"size": options.size}

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

    if options.folder is not None:
        folder = Path(options.folder, f"{options.size}-{options.blocks or 'all'}")
        about |= write_llama(options.size, folder, options.blocks)
        about |= {name: getattr(options, name) for name in ("blocks", "budget", "examples", "tokens")}
        tokens = torch.randint(1, LLAMAS["tiny"][-1], (options.examples, 1, options.tokens))
        data = {"batches": [{"input_ids": each, "labels": each} for each in tokens]} if options.data else {}
        out = Path(options.folder, f"{options.size}-pruned")
        with tempfile.TemporaryDirectory() as small:  # which imports all modules before memory is measured
            write_llama("tiny", Path(small, "dense"))
            sk.prune_folder(Path(small, "dense"), Path(small, "out"), budget=options.budget, **data)
        gc.collect()
        base = resident("RSS")
        named = f"folder{' with data' * options.data}"
        step(named, lambda: sk.prune_folder(folder, out, budget=options.budget, **data) and None)
        shutil.rmtree(out)
        return
    sizes = SIZES[options.size]
    tokens = torch.randint(sizes["words"], (options.examples, 1, options.tokens))
    batches = [(each, each.flatten()) for each in tokens]
    base = resident("RSS")
    torch.set_default_dtype(torch.bfloat16)
    model = Transformer(**sizes).eval()
    torch.set_default_dtype(torch.float32)
    about["parameters"] = sum(entry.numel() for entry in model.parameters())
    about["weights"] = sum(entry.nbytes for entry in model.parameters()) / 2**30

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
