"""Merge an adapter before or after pruning: SmolLM2-135M with LoRA, trained on plays, pruned to 65 % of the layers' FLOPs.

    pip install --group real peft
    python benchmarks/merged.py --out merged.jsonl

Up to three draws of calibration text, which is the same for both orders. Nothing is trained after pruning.
"""

import copy
import time
from pathlib import Path
from typing import Any

import peft
import torch
from common import add, options_of
from real_nets import Network, smollm2

import sparsekit as sk

STEPS, SHARE, LENGTH, CALIBRATION = 60, 0.65, 128, 12


def adapted(net: Network) -> Any:
    """Return the model with an adapter that was trained on the plays of the training text."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(copy.deepcopy(net.model), config)
    plays = net.training[-len(net.training) // 3 :]
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-3)
    for step in range(STEPS):
        model(**plays[step % len(plays)]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main() -> None:
    options = options_of(__doc__, out=Path("merged.jsonl"), draws=3)
    model: Any = None
    for draw in range(options.draws):
        net = smollm2(LENGTH, draw)
        head = net.kept_flops  # of the output embedding, which budgets leave out

        def report(way: str, network: Any, began: float, net: Network = net, draw: int = draw, head: float = head) -> None:
            row: dict[str, Any] = {"way": way, "draw": draw, "seconds": round(time.process_time() - began)}
            row["flops"] = sk.count_cost(network, net.example).flops - head
            row |= {
                "plays": net.judge(network, net.test[2::3])["perplexity"],
                "all": net.judge(network, net.test)["perplexity"],
            }
            add(options.out, row)

        if model is None:
            report("dense", net.model, time.process_time())
            began = time.process_time()
            model = adapted(net)
            report("dense, adapted", model, began)
        for way in ("merge, then prune", "prune, then merge"):
            began, start = time.process_time(), copy.deepcopy(model)
            start = start.merge_and_unload() if way.startswith("merge") else start
            budget = sk.Budget(flops=head + SHARE * (sk.count_cost(start, net.example).flops - head))
            given: Any = {"criterion": "position_fisher", "allocation": "by_loss", "batches": net.calibration[:CALIBRATION]}
            small: Any = sk.prune(start, {"input_ids": net.example[0]}, budget=budget, **given).model
            report(way, small.merge_and_unload() if way.startswith("prune") else small, began)


if __name__ == "__main__":
    main()
