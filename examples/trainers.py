"""Narrow a network while another library trains it: ten lines for Hugging Face's Trainer, ten for Lightning. Seconds, offline.

python examples/trainers.py [transformers | lightning]

Both callbacks lower the share of units epoch by epoch, and save the small model at the end. A `LearnableMask` drops the units
of the smallest weights. The optimizer's state follows each change of the mask, so the rest of your code stays as it is. Needs
`pip install transformers accelerate` or `pip install lightning`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk

RATIOS = (0.8, 0.6, 0.5)


def with_transformers(folder: Path) -> nn.Module:
    """Train a small Llama with `Trainer`, and return the compact model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Narrow(TrainerCallback):  # type: ignore[misc]
        def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            model.ratio = RATIOS[round(state.epoch)]

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            sk.save_compact(model, Path(args.output_dir) / "small.safetensors")

    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(60, (64, 16))]
    masked = sk.LearnableMask(LlamaForCausalLM(config), {"input_ids": rows[0]["input_ids"][None]})
    options = TrainingArguments(
        str(folder),
        num_train_epochs=len(RATIOS),
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    Trainer(masked, options, train_dataset=rows, callbacks=[Narrow()]).train()
    return sk.load_compact(folder / "small.safetensors", LlamaForCausalLM(config))


def with_lightning(folder: Path) -> nn.Module:
    """Train a small perceptron with Lightning, and return the compact model."""
    import lightning

    class Narrow(lightning.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.masked.ratio = RATIOS[trainer.current_epoch]

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            sk.save_compact(pl_module.masked, folder / "small.safetensors")

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.masked = sk.LearnableMask(make(), torch.zeros(1, 16))

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            return F.cross_entropy(self.masked(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.masked.parameters(), 1e-3)

    x = torch.randn(256, 16)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=len(RATIOS), accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Narrow()],
    )  # fmt: skip
    trainer.fit(Classifier(), loader)
    return sk.load_compact(folder / "small.safetensors", make())


def main(library: str = "transformers") -> nn.Module:
    """Train with one of the libraries, and print the widths."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        small = {"transformers": with_transformers, "lightning": with_lightning}[library](Path(folder))
    print({name: tuple(weight.shape) for name, weight in small.named_parameters() if weight.dim() == 2})
    return small


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", choices=("transformers", "lightning"), default="transformers")
    main(parser.parse_args().library)
