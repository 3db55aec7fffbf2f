"""What wraps a learnable mask trains and averages the right units, or is refused."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from masked import convolutions, train_step
from ranks import found_by_two_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from sparsekit import GradientImportance, LearnableMask, LearnedNarrowing
from sparsekit.errors import UnsupportedModelError


def masked_model(seed: int = 0) -> LearnableMask:
    model, x, _ = convolutions(torch.float64, seed=seed)
    return LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance(lr=0.5, refresh_every=1))


@pytest.mark.parametrize("inside", [False, True])
def test_an_averaged_model_of_a_mask_that_learns_is_refused_with_what_to_use_instead(inside: bool) -> None:
    masked = masked_model()
    with pytest.raises(UnsupportedModelError, match=r"AveragedModel\(masked\.compact\(\)\)"):
        AveragedModel(nn.Sequential(masked) if inside else masked)
    assert AveragedModel(masked.compact()).module is not None


def test_the_average_of_a_mask_that_does_not_learn_is_that_of_its_compact_model() -> None:
    model, x, y = convolutions(torch.float64)
    masked = LearnableMask(model, (x,), ratio=0.5)
    small = masked.compact()
    averages = [AveragedModel(module) for module in (masked, small)]
    for module, average in zip((masked, small), averages, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            train_step(module, optimizer, x, y)
            average.update_parameters(module)
    state = averages[1].module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in averages[0].module.narrow_state().items())


def _deep(seed: int, learning: Any, **options: Any) -> LearnableMask:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    return LearnableMask(model, (torch.zeros(2, 6, dtype=torch.float64),), learning=learning, **options)


def _step(wrapped: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int], step: int) -> None:
    generators = [torch.Generator().manual_seed(100 * rank + step) for rank in ranks]
    x = torch.cat([torch.randn(8, 6, dtype=torch.float64, generator=generator) for generator in generators])
    train_step(wrapped, optimizer, x, None)


def _train(masked: LearnableMask, ranks: Sequence[int], wrap: Callable[[LearnableMask], nn.Module]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05, momentum=0.5)
    masks, message = [], ""

    def train(wrapped: nn.Module, steps: range) -> None:
        for step in steps:
            _step(wrapped, optimizer, ranks, step)
            masks.append(masked.unit_mask()["0"])

    wrapped = wrap(masked)
    train(wrapped, range(10))
    masked.ratio = 0.25
    if wrapped is not masked:
        try:
            train(wrapped, range(1))
        except UnsupportedModelError as error:
            message = str(error)
    train(wrap(masked), range(10, 13))
    return {"state": masked.state_dict(), "message": message, "masks": masks}


def _learning(seed: int) -> LearnableMask:
    return _deep(seed, GradientImportance(lr=0.5, refresh_every=1), ratio=0.5)


def _train_on_a_rank(rank: int, folder: str) -> dict[str, Any]:
    del folder
    return _train(_learning(seed=rank), [rank], DistributedDataParallel)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.same_bits
def test_ranks_that_start_from_other_weights_train_the_first_ranks_model_as_one_process_does(tmp_path: Path) -> None:
    first, second = found_by_two_ranks(_train_on_a_rank, tmp_path)
    assert any(not torch.equal(a, b) for a, b in zip(first["masks"], first["masks"][1:], strict=False))  # it did change
    alone = _train(_learning(seed=0), [0, 1], lambda masked: masked)
    for name, tensor in first["state"].items():
        assert torch.equal(tensor, second["state"][name]), name
        torch.testing.assert_close(tensor, alone["state"][name], rtol=0, atol=1e-10, msg=name)
    for found in (first, second):
        assert "wrap it again" in found["message"]


def _narrow(masked: LearnableMask, ranks: Sequence[int], wrap: Callable[[LearnableMask], nn.Module]) -> dict[str, Any]:
    optimizer, wrapped, masks = torch.optim.SGD(masked.parameters(), lr=0.05, momentum=0.5), wrap(masked), []
    for step in range(16):
        before = masked.unit_mask()
        _step(wrapped, optimizer, ranks, step)
        masks.append(masked.unit_mask()["0"])
        if masked.unit_mask() != before:
            wrapped = wrap(masked)
    return {"state": masked.dense_state(), "masks": masks}


def _narrowing(seed: int) -> LearnableMask:
    return _deep(seed, LearnedNarrowing(steps=16, least_steps=2), budget="flops=30%")


def _narrow_on_a_rank(rank: int, folder: str) -> dict[str, Any]:
    del folder
    return _narrow(_narrowing(seed=0), [rank], DistributedDataParallel)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
def test_ranks_that_narrow_make_the_cuts_of_one_process_on_the_batches_of_both(tmp_path: Path) -> None:
    first, second = found_by_two_ranks(_narrow_on_a_rank, tmp_path)
    alone = _narrow(_narrowing(seed=0), [0, 1], lambda masked: masked)
    for found in (first, second):
        assert [mask.tolist() for mask in found["masks"]] == [mask.tolist() for mask in alone["masks"]]
        for name, tensor in alone["state"].items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=0, atol=1e-10, msg=name)
