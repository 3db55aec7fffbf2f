"""A mask stands still while an optimizer steps, or while it is told to, and every optimizer is met."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import learnable_mask, shake
from optimizers import Sam, SamOver
from torch import Tensor, nn

from sparsekit import LearnableMask
from sparsekit.training import GradientImportance


def _task() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    return model, torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))


def _train(masked: LearnableMask, optimizer: Any, x: Tensor, y: Tensor, *, parts: bool, seeds: range) -> None:
    for seed in seeds:
        masked.ratio = 0.25 if seed % 4 == 3 else 0.5
        shake(masked, seed)

        def loss(seed: int = seed) -> Tensor:
            shake(masked, 100 + seed)
            return F.cross_entropy(masked(x), y)

        optimizer.zero_grad()
        F.cross_entropy(masked(x), y).backward()
        if parts:
            with masked.freeze_mask():
                optimizer.first_step()
                loss().backward()
                optimizer.second_step()
        else:
            optimizer.step(loss)


@pytest.mark.parametrize("make", [Sam, SamOver])
@pytest.mark.parametrize("parts", [True, False], ids=["two calls", "one call"])
def test_sam_in_compact_execution_equals_masked_execution(make: Any, parts: bool) -> None:
    found = []
    for execution in ("compact", "masked"):
        model, x, y = _task()
        masked = learnable_mask(model, (x,), ratio=0.5, execution=execution, learning=GradientImportance())  # type: ignore[arg-type]
        _train(masked, make(masked.parameters()), x, y, parts=parts, seeds=range(9))
        found.append(masked.dense_state())
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-10, msg=name)
    norms = found[0]["0.weight"].norm(dim=1) / _task()[0].state_dict()["0.weight"].norm(dim=1)
    assert norms.min() > 0.5  # no unit has lost its weights


def test_a_held_mask_stands_still_and_moves_after_it() -> None:
    model, x, y = _task()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
    optimizer = Sam(masked.parameters())
    F.cross_entropy(masked(x), y).backward()
    before = masked.unit_mask()
    with masked.freeze_mask():
        optimizer.first_step()
        shake(masked, 3)
        F.cross_entropy(masked(x), y).backward()
        assert masked.unit_mask() == before
        optimizer.second_step()
    shake(masked, 4)
    assert masked.unit_mask() != before


def test_a_step_that_fails_does_not_hold_the_mask() -> None:
    model, x, _ = _task()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)

    def fail() -> float:
        shake(masked, 5)
        masked(x)
        raise RuntimeError("out of memory")

    before = masked.unit_mask()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    assert masked.unit_mask() != before
