"""finetune(): the same bits after a resumption, the best epoch, distillation, half precision, schedulers, bad input."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import make_batches, make_model
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit.finetuning import Distillation, EpochRecord


def _data(examples: int = 48) -> TensorDataset:
    return TensorDataset(*map(torch.cat, zip(*make_batches(examples))))


def _loader(generator: bool = False) -> DataLoader[Any]:
    return DataLoader(_data(), 12, shuffle=True, generator=torch.Generator().manual_seed(3) if generator else None)


def _tuned(model: nn.Module, loader: Any = None, loss: Any = F.cross_entropy, **options: Any) -> sk.finetuning.FineTuned:
    return sk.finetune(model, loader or _loader(), loss, **options)


RUNS: list[tuple[Any, Any, str, Callable[[], dict[str, Any]]]] = [
    (lambda p: SGD(p, 0.1, momentum=0.9), lambda o: CosineAnnealingLR(o, 6), "epoch", dict),
    (lambda p: SGD(p, 0.1, momentum=0.9), lambda o: OneCycleLR(o, 0.1, total_steps=24), "batch", dict),
    (lambda p: Adam(p, 0.01, amsgrad=True), lambda o: ReduceLROnPlateau(o, patience=0), "epoch", dict),
    (lambda p: SGD(p, 0.05), None, "epoch", lambda: {"amp": torch.float16}),
    (None, None, "epoch", lambda: {"clip_norm": 1.0}),
]


@pytest.mark.parametrize(("optimizer", "scheduler", "step", "more"), RUNS)
@pytest.mark.same_bits
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    optimizer: Any, scheduler: Any, step: str, more: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    def train(model: nn.Module, epochs: int, checkpoint: Path | None, seed: int = 5) -> sk.finetuning.FineTuned:
        own = {"optimizer": optimizer, "scheduler": scheduler, "scheduler_step": step, "validation": [_data(20).tensors]}
        return _tuned(model, _loader(step == "batch"), epochs=epochs, checkpoint=checkpoint, seed=seed, **own, **more())

    whole = train(make_model(), 6, None)
    train(make_model(), 3, tmp_path / "run")
    resumed = train(make_model(seed=9), 6, tmp_path / "run")  # other weights, which the checkpoint replaces
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert whole.model[0].weight.dtype == torch.float32
    assert whole.history[-1].loss < whole.history[0].loss
    assert resumed.best_epoch == whole.best_epoch
    assert [(r.loss, r.score, r.learning_rate) for r in resumed.history] == [
        (r.loss, r.score, r.learning_rate) for r in whole.history
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 1.5}, "epochs must be a whole number"),
    ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer or make one, got 'adam'"),
    ({"optimizer": lambda p: [*p]}, "optimizer must be"),
    (
        {"optimizer": SGD(make_model().parameters(), 0.1)},
        "8 of the 8 parameters of the optimizer are not those of this Sequential",
    ),
    ({"scheduler": lambda _: None}, "scheduler must be a function"),
    ({"scheduler": MultiStepLR(SGD(make_model().parameters(), 0.1), [1])}, "scheduler must be a function"),
    ({"validation": lambda _: None}, "validation must return a number"),
    ({"checkpoint": "no/such/folder"}, "checkpoint must be a file in a folder that exists"),
    ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "mean over the examples"),
]


@pytest.mark.parametrize(("more", "told"), WRONG)
def test_bad_input_is_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidValueError, match=told):
        _tuned(make_model(), **{"epochs": 1, **more})


def test_an_optimizer_may_train_a_part_of_the_model_and_the_loss() -> None:
    scale = nn.Parameter(torch.ones(()))
    model, loss = make_model(), Lambda(lambda m, outputs, target: F.cross_entropy(m.scale * outputs, target), scale=scale)
    _tuned(model, loss=loss, epochs=1, optimizer=SGD([*model[6].parameters(), *loss.parameters()], 0.1))
    assert float(scale) != 1


def test_a_checkpoint_of_other_parts_or_another_model_is_refused(tmp_path: Path) -> None:
    _tuned(make_model(), epochs=1, checkpoint=tmp_path / "run")
    with pytest.raises(InvalidValueError, match="this one has model, optimizer, scheduler, scaler"):
        _tuned(make_model(), epochs=2, checkpoint=tmp_path / "run", scheduler=lambda o: MultiStepLR(o, [1]))
    with pytest.raises(InvalidValueError, match=r"is of another model: .* differ"):
        _tuned(nn.Sequential(nn.Linear(6, 3)), epochs=2, checkpoint=tmp_path / "run")


@pytest.mark.parametrize(("scores", "stop", "best"), [([0.1, 0.9, 0.9, 0.3], 0, 2), ([0.9, 0.1], 2, 1), (None, 2, 2)])
def test_the_weights_of_the_best_epoch_are_kept_also_after_ctrl_c(scores: list[float] | None, stop: int, best: int) -> None:
    seen: list[dict[str, Tensor]] = []
    records: list[EpochRecord] = []

    def metric(model: nn.Module) -> float:
        assert not model.training
        return scores[len(seen)]

    def on_epoch(record: EpochRecord) -> None:
        records.append(record)
        seen.append(copy.deepcopy(model.state_dict()))
        if record.epoch == stop:
            raise KeyboardInterrupt

    model = make_model()
    with pytest.raises(KeyboardInterrupt) if stop else nullcontext():
        found = _tuned(model, epochs=4, validation=metric if scores else None, on_epoch=on_epoch)
        assert (found.model, found.best_epoch, found.history) == (model, best, tuple(records))
        assert model.training
    torch.testing.assert_close(model.state_dict(), seen[best - 1], rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_each_submodule_trains_in_the_mode_in_which_it_was_given_unless_the_model_is_in_eval_mode(training: bool) -> None:
    model = make_model().train(training)
    model[1].eval()
    before, modes = {name: entry.clone() for name, entry in model.state_dict().items()}, []
    model.register_forward_hook(lambda *_: modes.append((model[1].training, model[3].training)))
    _tuned(model, epochs=2, optimizer=lambda p: SGD(p, 0.0))
    assert set(modes) == {(not training, True)}
    same = {name: torch.equal(entry, before[name]) for name, entry in model.state_dict().items()}
    assert same["1.running_mean"] is training
    assert (model.training, model[1].training) == (training, False)


def test_a_teacher_alone_pulls_its_student_to_it() -> None:
    teacher, student = make_model(1), make_model(2)
    x = _data().tensors[0]

    def distance() -> float:
        with torch.no_grad():
            return float(F.mse_loss(student.eval()(x).softmax(1), teacher.eval()(x).softmax(1)))

    before = distance()
    student.train()
    pulled = {"optimizer": lambda p: SGD(p, 0.1, momentum=0.9), "distillation": Distillation(teacher, share=1.0)}
    _tuned(student, epochs=25, **pulled)
    assert distance() < 0.3 * before


def test_distillation_of_equal_outputs_leaves_the_share_of_the_loss() -> None:
    logits = torch.randn(4, 3)
    mixed = Distillation(nn.Identity(), share=0.25).combine(torch.tensor(2.0), logits, logits)
    assert float(mixed) == pytest.approx(1.5)


def test_a_checkpoint_holds_no_code_and_says_so_when_it_is_first_written(tmp_path: Path) -> None:
    class Strange(SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "x": nn.Linear(1, 1)}

    def train(optimizer: Any, epochs: int = 1) -> Any:
        return _tuned(make_model(), epochs=epochs, optimizer=optimizer, checkpoint=tmp_path / "file")

    with pytest.raises(InvalidValueError, match="holds more than the state"):
        train(lambda p: Strange(p, 0.1))
    assert not list(tmp_path.iterdir())
    train(None)
    whole = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidValueError, match="damaged"):
        train(None, 2)
