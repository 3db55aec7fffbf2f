"""What new users met in their first hour: summaries in place of tables of numbers, and errors that say what to do."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.bandit import EUCB
from sparsekit.training.wrappers import EvalModeWarning


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 10)
    )


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [sk.PUCBV, sk.SplitUCBV, EUCB])
def test_a_printed_bandit_says_where_it_searches_and_how_far_it_is(kind: type) -> None:
    bandit = kind(sk.Interval(0.0, 1.0), rng=np.random.default_rng(0))
    assert "Interval(low=0.0, high=1.0" in repr(bandit)
    assert "0 told" in repr(bandit)
    pull = bandit.ask()
    assert "1 open" in repr(bandit)
    bandit.tell(pull, 1.0)
    assert f"best {pull.value}" in repr(bandit)


def _steps(masked: sk.LearnableMask, inputs: Tensor, count: int = 2) -> list[warnings.WarningMessage]:
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            optimizer.zero_grad()
            masked(inputs).square().mean().backward()
            optimizer.step()
    return [item for item in caught if item.category is EvalModeWarning]


def test_training_a_model_that_was_left_in_eval_mode_warns_once(model: nn.Module, inputs: Tensor) -> None:
    masked = sk.LearnableMask(model.eval(), (inputs,), ratio=0.5)
    (warning,) = _steps(masked, inputs)
    assert "call masked.train() before you train" in str(warning.message)
    assert _steps(masked.train(), inputs) == []
