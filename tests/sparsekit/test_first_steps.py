"""What new users met in their first hour: summaries in place of tables of numbers, and errors that say what to do."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.bandit import EUCB
from sparsekit.errors import InvalidValueError, UnsupportedModelError
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


def test_a_printed_graph_is_one_line_and_names_its_groups(model: nn.Module, inputs: Tensor) -> None:
    graph = sk.trace_units(model, inputs)
    text = repr(graph)
    assert "\n" not in text
    assert "12 units in 2 groups" in text
    assert "0: 8 channels, 3: 4 channels" in text
    assert "1 kept whole" in text
    assert repr(graph.groups["0"]) == "UnitGroup(0: 8 channels, ties 0, 1, 3)"
    assert "0.weight axis 0" in repr(graph.groups["0"].slices)


@pytest.mark.parametrize("kind", [sk.PUCBV, sk.SplitUCBV, EUCB])
def test_a_printed_bandit_says_where_it_searches_and_how_far_it_is(kind: type) -> None:
    bandit = kind(sk.Interval(0.0, 1.0), rng=np.random.default_rng(0))
    assert "Interval(low=0.0, high=1.0" in repr(bandit)
    assert "0 told" in repr(bandit)
    pull = bandit.ask()
    assert "1 open" in repr(bandit)
    bandit.tell(pull, 1.0)
    assert f"best {pull.value}" in repr(bandit)


@pytest.mark.parametrize("kind", [sk.PUCBV, sk.SplitUCBV])
def test_a_number_in_place_of_a_pull_is_refused_in_words(kind: type) -> None:
    bandit = kind(sk.Interval(0.0, 1.0), rng=np.random.default_rng(0))
    bandit.ask()
    with pytest.raises(InvalidValueError, match=r"must be what ask\(\) gave, got int 3; write pull = bandit.ask\(\)"):
        bandit.tell(3, 1.0)
    with pytest.raises(InvalidValueError, match="must be what ask"):
        bandit.forget(0)


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


def test_no_warning_where_the_mode_is_train_or_makes_no_difference(model: nn.Module, inputs: Tensor) -> None:
    assert _steps(sk.LearnableMask(model, (inputs,), ratio=0.5), inputs) == []
    frozen = sk.LearnableMask(model, (inputs,), ratio=0.5)
    frozen.model[1].eval()
    assert _steps(frozen, inputs) == [], "batch norms alone in eval mode are somebody's decision"
    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    assert _steps(sk.LearnableMask(plain, (inputs,), ratio=0.5), inputs) == []


@pytest.mark.parametrize("export", [torch.export.export, torch.jit.trace])
def test_an_exporter_of_a_learnable_mask_is_told_of_compact(export: object, model: nn.Module, inputs: Tensor) -> None:
    masked = sk.LearnableMask(model, (inputs,), ratio=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedModelError, match=r"masked.compact\(\)"):
            export(masked, (inputs,))  # type: ignore[operator]
