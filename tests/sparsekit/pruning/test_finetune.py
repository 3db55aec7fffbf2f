"""finetune(): the same bits after a resumption, the best epoch, distillation, half precision, schedulers, bad input."""

import copy
import warnings
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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit.finetuning import EpochRecord


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
    resumed = train(make_model(), 6, tmp_path / "run")
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert whole.model[0].weight.dtype == torch.float32
    assert whole.history[-1].loss < whole.history[0].loss
    assert resumed.best_epoch == whole.best_epoch
    assert [(r.loss, r.score, r.learning_rate) for r in resumed.history] == [
        (r.loss, r.score, r.learning_rate) for r in whole.history
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 1.5}, "epochs must be a whole number"),
    ({"epochs": None}, "pass epochs= or steps="),
    ({"steps": 3}, "pass epochs= or steps="),
    ({"epochs": None, "steps": 0}, "steps must be a whole number"),
    ({"accumulate": 0}, "accumulate must be a whole number"),
    ({"average": 1.0}, "average must be in"),
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


@pytest.mark.parametrize("average", [None, 0.9])
def test_a_training_is_resumed_by_the_model_that_began_it_or_that_it_left_behind_and_by_no_other(
    average: float | None, tmp_path: Path
) -> None:
    def train(model: nn.Module, epochs: int = 2, rate: float = 0.1, **more: Any) -> Any:
        options = {"optimizer": lambda p: SGD(p, rate), "average": average, "checkpoint": tmp_path / "run", **more}
        return _tuned(model, epochs=epochs, **options)

    first = train(make_model()).model
    before = (tmp_path / "run").read_bytes()
    for model, more, told in [
        (make_model(seed=9), {}, "What differs: starting weights. Pass what it had"),
        (make_model(), {"rate": 1e-4, "epochs": 3}, r"optimizer lr is 0.0001, was 0.1"),
        (make_model(), {"seed": 4}, "seed is 4, was 0"),
        (make_model(), {"optimizer": lambda p: Adam(p, 0.1)}, "optimizer is Adam, was SGD"),
        (make_model(), {"clip_norm": 1.0}, "clip_norm is 1.0, was None"),
        (make_model(), {"accumulate": 2}, "accumulate is 2, was 1"),
    ]:
        given = copy.deepcopy(model.state_dict())
        with pytest.raises(InvalidValueError, match=told):
            train(model, **more)
        torch.testing.assert_close(model.state_dict(), given, rtol=0, atol=0)
        assert (tmp_path / "run").read_bytes() == before
    on = train(first, 3)
    (tmp_path / "run").write_bytes(before)
    again = train(make_model(), 3)
    assert len(on.history) == 3
    torch.testing.assert_close(again.model.state_dict(), on.model.state_dict(), rtol=0, atol=0)
    assert len(train(make_model(seed=9), 1, resume=False).history) == 1
    assert len(train(make_model(seed=9), 2).history) == 2


def test_a_scheduler_is_fingerprinted_by_its_settings(tmp_path: Path) -> None:
    for gamma in (0.5, 0.9):
        with nullcontext() if gamma == 0.5 else pytest.raises(InvalidValueError, match=r"scheduler gamma is 0.9, was 0.5"):
            _tuned(make_model(), epochs=1, checkpoint=tmp_path / "run", scheduler=lambda o, g=gamma: MultiStepLR(o, [1], g))


@pytest.mark.same_bits
def test_so_many_steps_are_those_of_so_many_epochs_and_end_within_one() -> None:
    whole, steps = (_tuned(make_model(), **how) for how in ({"epochs": 3}, {"steps": 12}))
    torch.testing.assert_close(whole.model.state_dict(), steps.model.state_dict(), rtol=0, atol=0)
    counted: list[int] = []

    class Counting(SGD):
        def step(self, closure: Any = None) -> Any:
            counted.append(1)
            return super().step(closure)

    found = _tuned(make_model(), steps=6, optimizer=lambda p: Counting(p, 0.1))
    assert (len(counted), len(found.history)) == (6, 2)


def test_accumulated_batches_are_one_batch_also_where_their_sizes_differ() -> None:
    x, y = _data(36).tensors
    parts = (
        [(x[:24], y[:24]), (x[24:], y[24:])],
        [(x[:10], y[:10]), (x[10:24], y[10:24]), (x[24:29], y[24:29]), (x[29:], y[29:])],
    )
    found = []
    for batches, accumulate in zip(parts, (1, 2), strict=True):
        model = _plain()
        _tuned(model, batches, epochs=2, accumulate=accumulate, optimizer=lambda p: SGD(p, 0.1))
        found.append(model.state_dict())
    torch.testing.assert_close(*found)


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def test_the_average_of_the_weights_is_torchs_and_is_what_is_validated_and_kept() -> None:
    model, by_hand, seen = _plain(), _plain(), []
    mean = AveragedModel(by_hand, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = SGD(by_hand.parameters(), 0.1)
    batches = [(x, y) for x, y in zip(_data().tensors[0].split(12), _data().tensors[1].split(12))]
    by_hand.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(by_hand(x), y).backward()
        optimizer.step()
        mean.update_parameters(by_hand)

    def metric(module: nn.Module) -> float:
        seen.append(copy.deepcopy(module.state_dict()))
        return 1.0

    _tuned(model, batches, epochs=1, average=0.5, optimizer=lambda p: SGD(p, 0.1), validation=metric)
    torch.testing.assert_close(model.state_dict(), mean.module.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), dict(seen[0]), rtol=0, atol=0)


def test_validation_weighs_batches_by_their_examples() -> None:
    x, y = _data(20).tensors
    scores = [
        _tuned(make_model(), epochs=1, validation=batches, optimizer=lambda p: SGD(p, 0.0)).history[0].score
        for batches in ([(x, y)], [(x[:19], y[:19]), (x[19:], y[19:])])
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_a_scheduler_for_other_steps_and_a_loss_that_is_not_trained_are_said() -> None:
    with pytest.warns(UserWarning, match="OneCycleLR is made for 8 steps and will make 2"):
        _tuned(make_model(), epochs=2, scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=8))
    for by, epochs in (("epoch", 8), ("batch", 2)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            options = {"scheduler_step": by, "scheduler": lambda o: OneCycleLR(o, 0.1, total_steps=8)}
            _tuned(make_model(), epochs=epochs, **options)
    scale = nn.Parameter(torch.ones(()))
    model, loss = make_model(), Lambda(lambda m, outputs, target: F.cross_entropy(m.scale * outputs, target), scale=scale)
    with pytest.warns(UserWarning, match="1 parameters of Lambda are in no optimizer"):
        _tuned(model, loss=loss, epochs=1, optimizer=SGD(model.parameters(), 0.1))
    assert float(scale) == 1
    for optimizer in (None, lambda p: SGD(p, 0.1)):
        _tuned(make_model(), loss=loss, epochs=1, optimizer=optimizer)
    assert float(scale) != 1


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
