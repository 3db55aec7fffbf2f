"""Code of a user that prune() and finetune() call: its mode, and the state that it cannot change."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import make_batches, make_model
from torch import nn
from torch.utils.data import TensorDataset

import sparsekit as sk

BATCHES = make_batches()


def _prune(model: nn.Module, metric: Any) -> None:
    sk.prune(model, BATCHES[0][0], budget="flops=60%", batches=BATCHES, loss=F.cross_entropy, metric=metric)


def _finetune(model: nn.Module, metric: Any) -> None:
    sk.finetune(model, BATCHES, F.cross_entropy, epochs=2, optimizer=lambda p: torch.optim.SGD(p, 0.0), validation=metric)


@pytest.mark.parametrize("call", [_prune, _finetune])
@pytest.mark.parametrize("training", [True, False])
def test_a_metric_is_called_in_eval_mode_and_moves_neither_modes_nor_draws(
    call: Callable[[nn.Module, Any], None], training: bool
) -> None:
    calls = 0

    def metric(model: nn.Module) -> float:
        nonlocal calls
        calls += 1
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        np.random.rand()  # noqa: NPY002
        score = float((model(torch.randn(8, 6)).argmax(1) == 0).float().mean())
        model[3].train()
        return score

    model = make_model().train(training)
    model[1].eval()
    modes = [module.training for module in model.modules()]
    before, draws = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    call(model, metric)
    assert calls >= 2
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), draws)
    if call is _prune:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


X, Y = (torch.cat(part) for part in zip(*BATCHES))
WRONG: list[tuple[Any, str]] = [
    (X, r"got one tensor of shape \(96, 6\)"),
    ((X, Y), r"got one batch, tensors of shapes \(96, 6\) and \(96,\)"),
    ([X, torch.randn(96, 3)], "got one batch, tensors of shapes"),
    ({"input": X, "labels": Y}, "got one mapping with 'input', 'labels', which is one batch"),
    (TensorDataset(X, Y), r"got a data set \(TensorDataset\), which gives single examples"),
    (X.numpy(), "got one ndarray of shape"),
    ([(x.numpy(), y.numpy()) for x, y in BATCHES], "batch 0 has arrays of numpy as inputs"),
    (make_batches, r"got a function \(make_batches\); call it"),
    (5, "got 5"),
    ("data", "got 'data'"),
]


@pytest.mark.parametrize(("batches", "told"), WRONG)
@pytest.mark.parametrize("call", [0, 1, 2])
def test_what_is_no_loader_is_named_with_what_to_pass(batches: Any, told: str, call: int) -> None:
    model = make_model()
    with pytest.raises(sk.errors.DataError, match=told):
        [
            lambda: sk.prune(model, X[:2], budget="flops=60%", batches=batches, loss=F.cross_entropy),
            lambda: sk.finetune(model, batches, F.cross_entropy, epochs=1),
            lambda: sk.recalibrate_batchnorm(model, batches),
        ][call]()


def test_batches_of_several_sizes_and_split_tensors_are_loaders() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    images = torch.randn(8, 3, 9, 9)
    assert sk.recalibrate_batchnorm(model, [images, torch.randn(8, 3, 7, 6)]) == 1
    assert sk.recalibrate_batchnorm(model, images.split(2)) == 1


def test_an_exception_of_the_user_keeps_its_type_and_says_what_was_called() -> None:
    with pytest.raises(RuntimeError) as caught:
        sk.finetune(make_model(), [(X[:, :4], Y)], F.cross_entropy, epochs=1)
    assert caught.value.__notes__ == ["raised while sparsekit called the model on a batch of float32 (96, 4)"]


def test_inference_mode_changes_nothing() -> None:
    def run(make: Callable[[], Any]) -> tuple[Any, list[float]]:
        batches = make()
        pruned = sk.prune(model, batches[0][0], budget="flops=60%", batches=batches, loss=F.cross_entropy)
        done = sk.finetune(pruned.model, batches, F.cross_entropy, epochs=1)
        return pruned.mask, [record.loss for record in done.history]

    model = make_model().eval()
    with torch.inference_mode():
        inside = run(make_batches)
    assert inside == run(make_batches)


def test_a_learnable_mask_is_compacted_before_it_is_pruned() -> None:
    masked = sk.LearnableMask(make_model(), (X[:2],), ratio=0.5)
    with pytest.raises(sk.errors.UnsupportedModelError, match=r"pass masked\.compact\(\)"):
        sk.prune(masked, X[:2], budget="flops=50%")


INPUTS = BATCHES[0][0]
GRAPH = sk.trace_units(make_model(), INPUTS)
MASK = sk.make_mask(sk.criteria.Ordered(), GRAPH, 0.5, sk.ScoringContext())
ENTRIES: dict[str, Callable[[nn.Module], object]] = {
    "trace_units": lambda model: sk.trace_units(model, INPUTS),
    "prune": lambda model: sk.prune(model, INPUTS, budget="flops=50%"),
    "prune with a graph": lambda model: sk.prune(model, INPUTS, budget="flops=50%", graph=GRAPH),
    "LearnableMask": lambda model: sk.LearnableMask(model, INPUTS, ratio=0.5),
    "LearnableMask with a graph": lambda model: sk.LearnableMask(model, graph=GRAPH, ratio=0.5),
    "finetune": lambda model: sk.finetune(model, BATCHES, F.cross_entropy, epochs=1),
    "recalibrate_batchnorm": lambda model: sk.recalibrate_batchnorm(model, BATCHES),
    "reconstruct": lambda model: sk.reconstruct(model, sk.compact(model, GRAPH, MASK), GRAPH, MASK, BATCHES),
    "a criterion": lambda model: sk.criteria.Fisher(BATCHES, F.cross_entropy).scores(GRAPH, sk.ScoringContext(model=model)),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_made_in_inference_mode_is_refused_in_our_words_and_its_copy_works(entry: str) -> None:
    with torch.inference_mode():
        model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(sk.errors.UnsupportedModelError, match=r"'0.weight' of this Sequential .*inference_mode.*deepcopy"):
        ENTRIES[entry](model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ENTRIES[entry](copy.deepcopy(model))


def test_a_small_model_made_in_inference_mode_is_not_refitted() -> None:
    model = make_model()
    with torch.inference_mode():
        small = sk.compact(model, GRAPH, MASK)
    with pytest.raises(sk.errors.UnsupportedModelError, match="inference_mode"):
        sk.reconstruct(model, small, GRAPH, MASK, BATCHES)
