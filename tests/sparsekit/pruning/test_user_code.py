"""Code of a user that prune() and finetune() call: in which mode it runs, and what it cannot change."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk


def make_model() -> nn.Module:
    """Make a network whose passes in train mode draw, and change statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
        )


def make_batches(examples: int = 96, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Make batches of a rule that can be learned."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 6, generator=generator)
    y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
    return list(zip(x.split(size), y.split(size)))


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
