"""Tables of language models: on disk, in llama.cpp, larger than memory, and with adapters."""

from collections.abc import Mapping
from typing import Any

from cells import Lines, rows, table, values
from common import spread


@table("docs/tutorials/language-model.md", "step", "perplexity", "parameters", "seconds", "peak memory")
def language_model() -> Lines:
    for row in rows("examples.jsonl", example="language model"):
        yield [
            row["row"],
            f"{row['perplexity']}",
            f"{row['parameters']} M",
            f"{row.get('seconds', '')}",
            f"{row['gibibytes']} GiB",
        ]


GGUF = "docs/howto/llama-cpp.md"


def of_layers(row: Mapping[str, Any]) -> str:
    share = "dense" if row["share"] == 1 else f"{100 * row['share']:.0f} %"
    return share if row["multiple"] != 16 else f"{share}, widths in multiples of 16"


@table(
    GGUF, "SmolLM2-135M, FLOPs of its layers", "type", "megabytes", "perplexity", "tokens/s read", "tokens/s written"
)  # fmt: skip
def gguf_speeds() -> Lines:
    for row in rows("llamacpp.jsonl"):
        if row["type"] != "float32":
            refitted = row["multiple"] != 16
            perplexity = row["perplexity"] or row["in PyTorch"]
            speeds = [f"{row[name]:.0f} ({row[f'{name} ÷ dense'][1]:.2f} ×)" for name in ("read", "written")]
            size = f"{row['bytes'] / 1e6:.0f}"
            yield [of_layers(row), row["type"], size, f"{perplexity:.1f}" if refitted else "", *speeds]


@table(GGUF, "SmolLM2-135M in float32", "largest difference of a logit", "largest logit", "16 greedy tokens")
def gguf_logits() -> Lines:
    for row in rows("llamacpp.jsonl", type="float32"):
        alike = "equal" if row["greedy tokens alike"] else "differ"
        yield [of_layers(row), f"{row['largest difference']:.1e}", f"{row['largest logit']:.1f}", alike]


@table("docs/howto/compatibility.md", "SmolLM2-135M with LoRA, perplexity", "plays", "all text")
def merged() -> Lines:
    for way in dict.fromkeys(row["way"] for row in rows("merged.jsonl")):
        yield [way, *(spread(values("merged.jsonl", column, way=way)) for column in ("plays", "all"))]


@table("docs/howto/memory.md", "parameters", "weights", "trace", "`prune`, dense model kept", "score", "reconstruct in place")
def memory() -> Lines:
    for size in dict.fromkeys(row["size"] for row in rows("memory.jsonl")):
        found = {row["step"]: row for row in rows("memory.jsonl", size=size)}
        made = [found[step] for step in ("trace", "prune", "score", "reconstruct in place")]
        yield [f"{size} billion", f"{made[0]['weights']:.1f}", *(f"{row['peak']:.1f} ({row['seconds']:.0f} s)" for row in made)]


_PACE = "minutes per billion"


@table("docs/howto/larger-than-memory.md", "parameters", "weights", "embedding + 3 blocks", "data", "peak", "time", _PACE)
def folders() -> Lines:
    for row in rows("folder.jsonl"):
        fixed = f"{row['embedding'] + 3 * row['block']:.2f}"
        data = f"{row['examples']} × {row['tokens']} tokens" if row["step"].endswith("data") else "none"
        pace = row["seconds"] / 60 / (row["parameters"] / 1e9)
        taken = [f"{row['peak']:.2f}", f"{row['seconds']:.0f} s", "" if row["blocks"] else f"{pace:.1f}"]
        size = f"{row['size']} billion" + f", {row['blocks']} blocks of it" * bool(row["blocks"])
        yield [size, f"{row['weights']:.2f}", fixed, data, *taken]
