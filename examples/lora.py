"""Federated fine-tuning of a transformer by LoRA: only the adapters and the head are trained, sent, and stored per client.

python examples/lora.py [--rounds N]

Needs `pip install peft transformers`. The transformer is made from a configuration, so nothing is downloaded; for pretrained
weights pass their file to `sparsekit_fl.run(..., init=FILE)`.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import sparsekit_fl as fl

VOCABULARY, LENGTH, CLASSES = 60, 12, 3


class Classifier(nn.Module):
    """A two-layer BERT with frozen weights, except for rank-4 adapters of queries and values, and the head."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=["classifier"])
        self.body = get_peft_model(BertForSequenceClassification(config), adapters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids, int64 (batch, length), to logits, float (batch, classes)."""
        logits: Tensor = self.body(input_ids=tokens).logits
        return logits


def clients(count: int = 4, examples: int = 60) -> list[fl.Client]:
    """Return clients with token sequences, whose class is the third of the vocabulary that their tokens come from."""
    generator = torch.Generator().manual_seed(0)

    def split(size: int) -> fl.TensorData:
        labels = torch.randint(CLASSES, (size,), generator=generator)
        tokens = torch.randint(VOCABULARY // CLASSES, (size, LENGTH), generator=generator)
        return fl.TensorData((tokens + (labels * (VOCABULARY // CLASSES))[:, None],), labels)

    return [fl.Client(id=id, data=fl.ClientData(split(examples), split(12), split(24))) for id in range(count)]


def main(rounds: int = 6) -> fl.RunResult:
    """Run FedAvg with AdamW, and print the size of an update."""
    problem = fl.Problem(model=Classifier, example_inputs=(torch.zeros(1, LENGTH, dtype=torch.int64),))
    training = fl.TrainingConfig(optimizer="adamw", lr=0.02, local_epochs=2)
    config = fl.RunConfig(rounds=rounds, cohort=4, training=training, eval_every=rounds)
    result = fl.run(fl.methods.fedavg(), problem, clients(), config)
    whole = sum(parameter.numel() for parameter in Classifier().parameters())
    trained = sum(parameter.numel() for parameter in Classifier().parameters() if parameter.requires_grad)
    sent = result.cost.uplink_bytes / rounds / 4
    print(f"{trained:,} of {whole:,} parameters train; an update has {sent:,.0f} bytes, the whole model {4 * whole:,}")
    print(f"accuracy {result.final.personal['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    main(parser.parse_args().rounds)
