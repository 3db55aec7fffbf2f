"""What wraps a learnable mask trains and averages the right units, or is refused."""

import pickle
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

from sparsekit import GradientImportance, LearnableMask
from sparsekit.errors import UnsupportedModelError
from sparsekit.training import optimizers


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


def test_a_mask_that_comes_to_another_process_is_guarded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(masked_model())
    hooks: list[object] = []
    optimizers._install_hooks.cache_clear()  # as in a process that has made no mask
    for name in ("register_module_module_registration_hook", "register_optimizer_step_pre_hook"):
        monkeypatch.setattr(optimizers, name, hooks.append)
    assert isinstance(pickle.loads(pickled), LearnableMask)
    assert len(hooks) == 2


def _train_on_a_rank(rank: int, folder: str) -> dict[str, Any]:
    masked = masked_model(seed=rank)
    ddp = DistributedDataParallel(masked)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05, momentum=0.5)
    masks = []

    def train(ddp: nn.Module, steps: int) -> None:
        for step in range(steps):
            torch.manual_seed(100 * rank + step)
            optimizer.zero_grad()
            ddp(torch.randn(8, 2, 6, 6, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            masks.append(masked.unit_mask()["0"])

    train(ddp, 10)
    masked.ratio = 0.25
    message = ""
    try:
        train(ddp, 1)
    except UnsupportedModelError as error:
        message = str(error)
    train(DistributedDataParallel(masked), 3)
    state = masked.state_dict()
    buffers = {name for name in state if "running" in name}  # each rank's own, until the next pass
    return {"state": {name: state[name] for name in state if name not in buffers}, "message": message, "masks": masks}


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.same_bits
def test_ranks_that_start_from_other_weights_train_the_same_units_of_the_first_ranks_model(tmp_path: Path) -> None:
    first, second = found_by_two_ranks(_train_on_a_rank, tmp_path)
    assert any(not torch.equal(a, b) for a, b in zip(first["masks"], first["masks"][1:], strict=False))  # it did change
    for name, tensor in first["state"].items():
        assert torch.equal(tensor, second["state"][name]), name
    for found in (first, second):
        assert "wrap it again" in found["message"]
