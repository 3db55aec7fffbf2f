"""The loops of others, with their defaults: a mask and a pruned model train as a plain module does, and nothing is lost."""

import contextlib
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk

IDS = torch.randint(50, (32, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (32,), generator=torch.Generator().manual_seed(1))
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(4, (64,), generator=torch.Generator().manual_seed(1))
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"ratio": 0.5},
    "narrowing": {"ratio": 0.5, "learning": sk.LearnedNarrowing(steps=16)},
    "gradients": {"ratio": 0.5, "learning": sk.GradientImportance()},
}


def _bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def _gpt() -> nn.Module:
    """A model with a tied weight, whose forward pass takes the number of items in a batch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16))


def _rows(model: nn.Module) -> list[dict[str, Any]]:
    """Examples with a column that no model takes, as data sets have them."""
    causal = "LMHead" in type(model).__name__
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids if causal else label, "row": number}
        for number, (ids, label) in enumerate(zip(IDS, LABELS, strict=True))
    ]


def _example(ids: Tensor = IDS[:2]) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _trainer(model: nn.Module, rows: Any, folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "use_cpu": True, "report_to": "none"} | options
    arguments = transformers.TrainingArguments(str(folder), disable_tqdm=True, **settings)
    return transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])


EPOCHS: dict[str, Any] = {
    "save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True, "logging_strategy": "epoch",
}  # fmt: skip


def _history(trainer: Any) -> list[float]:
    return [each[name] for each in trainer.state.log_history for name in ("loss", "eval_loss", "train_loss") if name in each]


@pytest.mark.parametrize("make", [_bert, _gpt])
def test_trainer_with_its_defaults_trains_a_mask_as_the_plain_model(make: Any, tmp_path: Path) -> None:
    """Columns, labels, and the scale of the loss over accumulated batches are found as for the wrapped model."""
    plain = make().eval()
    found = []
    for which, model in (("plain", sk.LearnableMask(plain, _example(), ratio=0.5).compact()), ("mask", None)):
        model = sk.LearnableMask(plain, _example(), ratio=0.5) if model is None else model
        trainer = _trainer(model, _rows(plain), tmp_path / which, gradient_accumulation_steps=2, **EPOCHS)
        trainer.train()
        assert list((tmp_path / which).glob("checkpoint-*"))
        found.append((_history(trainer), trainer.evaluate()["eval_loss"]))
    assert len(found[0][0]) == 5
    torch.testing.assert_close(torch.tensor([*found[0][0], found[0][1]]), torch.tensor([*found[1][0], found[1][1]]))


@pytest.mark.parametrize("rule", RULES)
def test_trainer_saves_and_resumes_a_mask_in_the_middle_of_its_training(rule: str, tmp_path: Path) -> None:
    runs = {}
    for which in ("whole", "resumed"):
        masked = sk.LearnableMask(_bert(), _example(), **RULES[rule])
        options = {"save_steps": 3, "save_strategy": "steps", "logging_steps": 1}
        trainer = _trainer(masked, _rows(masked.model), tmp_path / "run", **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-3") if which == "resumed" else None)
        runs[which] = masked
    assert runs["whole"].unit_mask() == runs["resumed"].unit_mask()
    torch.testing.assert_close(runs["whole"].dense_state(), runs["resumed"].dense_state(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [_bert, _gpt])
@pytest.mark.parametrize("options", [{}, EPOCHS], ids=["defaults", "each epoch"])
def test_trainer_saves_a_pruned_model_which_loads_and_resumes(make: Any, options: Any, tmp_path: Path) -> None:
    model = make().eval()
    rows = _rows(model)
    batches = [
        {name: torch.stack([row[name] for row in rows[at : at + 8]]) for name in ("input_ids", "labels")} for at in (0, 8)
    ]
    pruned = sk.prune(model, _example(), budget="flops=70%", batches=batches, multiple_of=1).model
    trainer = _trainer(pruned, rows, tmp_path, **options)
    trainer.train()
    last = max(tmp_path.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    loaded = sk.load_pretrained(trainer.state.best_model_checkpoint or last)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**_example()).logits, pruned.eval()(**_example()).logits)
    again = _trainer(copy.deepcopy(pruned), rows, tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    torch.testing.assert_close(again.model.state_dict(), dict(pruned.state_dict()))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def _loader() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)


def _plain_loop(module: nn.Module, epochs: int = 2) -> list[float]:
    optimizer, losses = torch.optim.AdamW(module.parameters(), 1e-2), []
    for _ in range(epochs):
        for x, y in _loader():
            loss = F.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("rule", RULES)
def test_accelerate_trains_and_saves_a_mask(rule: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    masked, twin = (sk.LearnableMask(_net(), (X[:2],), **RULES[rule]) for _ in range(2))
    expected = _plain_loop(twin)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(masked, torch.optim.AdamW(masked.parameters(), 1e-2), _loader())
    losses = []
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
        if epoch == 0:
            accelerator.save_state(str(tmp_path / "state"))
    assert losses == expected
    assert masked.unit_mask() == twin.unit_mask()
    after = masked.dense_state()
    accelerator.load_state(str(tmp_path / "state"))
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    torch.testing.assert_close(masked.dense_state(), after, rtol=0, atol=0)
    accelerator.save_model(model, str(tmp_path / "model"))
    from safetensors.torch import load_file

    loaded = sk.LearnableMask(_net(), (X[:2],), **RULES[rule])
    loaded.load_state_dict(load_file(tmp_path / "model/model.safetensors"))
    torch.testing.assert_close(loaded.dense_state(), after, rtol=0, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_lightning_with_its_defaults_trains_saves_and_resumes_a_mask_as_a_plain_loop(rule: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = sk.LearnableMask(_net(), (X[:2],), **RULES[rule]), []

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), 1e-2)

    def fit(epochs: int, resumed: str | None = None) -> Any:
        module = Module()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_epochs=epochs, default_root_dir=tmp_path, **quiet)
        trainer.fit(module, _loader(), ckpt_path=resumed)
        return module, trainer

    twin = sk.LearnableMask(_net(), (X[:2],), **RULES[rule])
    expected = _plain_loop(twin)
    module, _ = fit(2)
    assert module.losses == expected
    assert module.net.unit_mask() == twin.unit_mask()
    first, trainer = fit(1)
    again, _ = fit(2, trainer.checkpoint_callback.best_model_path)
    assert first.losses + again.losses == expected
    torch.testing.assert_close(again.net.dense_state(), twin.dense_state(), rtol=0, atol=0)


@pytest.mark.slow
def test_ultralytics_trains_a_pruned_detector_and_its_moving_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own trainer, average of weights and checkpoints, on eight drawn images."""
    ultralytics = pytest.importorskip("ultralytics")
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("polars", reason="ultralytics writes its results with it")
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (tmp_path / "data" / kind / split).mkdir(parents=True)
        for number in range(4):
            pixels = (torch.rand(64, 64, 3, generator=torch.Generator().manual_seed(number)) * 255).byte().numpy()
            image.fromarray(pixels).save(tmp_path / f"data/images/{split}/{number}.png")
            (tmp_path / f"data/labels/{split}/{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path / 'data'}\ntrain: images/train\nval: images/val\nnames: [thing]\n")
    torch.manual_seed(0)
    yolo = ultralytics.YOLO("yolov8n.yaml")
    x = torch.zeros(1, 3, 64, 64)
    with contextlib.redirect_stdout(None):
        pruned = sk.prune(yolo.model.eval(), (x,), budget="flops=60%", multiple_of=1).model
    before = copy.deepcopy(pruned.state_dict())

    class Trainer(ultralytics.models.yolo.detect.DetectionTrainer):  # type: ignore[misc, name-defined]
        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
            return pruned.float().train()

    options = {
        "data": "data.yaml",
        "model": "yolov8n.yaml",
        "epochs": 1,
        "imgsz": 64,
        "batch": 2,
        "workers": 0,
        "device": "cpu",
    }
    trainer = Trainer(overrides={**options, "plots": False, "verbose": False, "project": str(tmp_path / "runs")})
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in pruned.state_dict().items())
    mean = trainer.ema.ema
    assert {name: value.shape for name, value in mean.state_dict().items()} == {n: v.shape for n, v in before.items()}
    assert mean.eval()(x) is not None
