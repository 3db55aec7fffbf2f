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


@table("docs/evidence/real.md", "SmolLM2-135M, perplexity (dense 24.4)", "80 % of the FLOPs", "65 %", "50 %")
def smollm2() -> Lines:
    """As pruned, and after an arrow as trained. More than one draw has a mean and a standard deviation."""
    for label, arm, how in (
        ("**Fisher per position, by loss**, a candidate of the default", "position_fisher/by_loss", "reconstructed"),
        ("LLM-Pruner's units, refitted by sparsekit", "llm-pruner", "reconstructed"),
        ("LLM-Pruner's units", "llm-pruner", "as cut"),
        ("Wanda-sp's units, refitted by sparsekit", "wanda-sp", "reconstructed"),
        ("Wanda-sp's units, with its own bias", "wanda-sp", "bias"),
        ("FLAP's units, refitted by sparsekit", "flap", "reconstructed"),
        ("FLAP's units, with its own bias", "flap", "bias"),
        ("random units, uniform, refitted by sparsekit", "random", "reconstructed"),
        ("ShortGPT: whole layers", "shortgpt", "as cut"),
    ):
        cells = []
        for share in (0.8, 0.65, 0.5):
            key = {"network": "smollm2", "share": share}
            pruned = values("real.csv", "perplexity", arm=arm, how=how, **key)
            own = "fixed" if arm == "position_fisher/by_loss" else arm
            tuned = values("real.csv", "perplexity", arm=own, how="trained seed 0", **key) if how == "reconstructed" else []
            cells.append(" → ".join(_perplexity(each) for each in (pruned, tuned) if each))
        yield [label, *cells]


def _perplexity(values: list[float]) -> str:
    return spread(values) if max(values) < 1000 else f"{sum(values) / len(values):,.0f}"
