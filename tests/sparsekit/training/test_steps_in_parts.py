"""Between two steps and within one: a mask stands still, steps are skipped, layers are frozen, memory is not filled."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import Sam, SamOver, classifier, convolutions, learnable_mask, shake
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.training import GradientImportance


def _task() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    return model, torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))


def _train(masked: sk.LearnableMask, optimizer: Any, x: Tensor, y: Tensor, *, parts: bool, seeds: range) -> None:
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
        masked = learnable_mask(model, (x,), ratio=0.5, execution=execution, learning=GradientImportance())
        _train(masked, make(masked.parameters()), x, y, parts=parts, seeds=range(9))
        found.append(masked.dense_state())
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-10, msg=name)
    norms = found[0]["0.weight"].norm(dim=1) / _task()[0].state_dict()["0.weight"].norm(dim=1)
    assert norms.min() > 0.5  # no unit has lost its weights


def test_a_held_mask_stands_still_and_moves_after_it() -> None:
    model, x, y = _task()
    masked = sk.LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
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
    masked = sk.LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)

    def fail() -> float:
        shake(masked, 5)
        masked(x)
        raise RuntimeError("out of memory")

    before = masked.unit_mask()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    assert masked.unit_mask() != before


EAGER = sk.GradientImportance(lr=0.1)


def _step(masked: sk.LearnableMask, optimizer: Any, x: Tensor, y: Tensor, *, zero_late: bool, parts: int = 1) -> None:
    if not zero_late:
        optimizer.zero_grad()
    for number, (images, classes) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        loss = F.cross_entropy(masked(images), classes) / parts
        if zero_late and number == 0:
            optimizer.zero_grad()
        loss.backward()


@pytest.mark.parametrize("zero_late", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [1.0, torch.inf])
def test_steps_that_are_skipped_teach_nothing(size: float, parts: int, zero_late: bool) -> None:
    """By a GradScaler after an overflow, or by a loop whose gradient is too large, in steps of one pass or of several."""
    found = []
    for skips in (False, True):
        model, x, _ = classifier()
        masked = sk.LearnableMask(model, (x,), ratio=0.5, learning=EAGER)
        optimizer = torch.optim.SGD(masked.parameters(), lr=0.05, momentum=0.9)
        generator, masks = torch.Generator().manual_seed(3), []
        for at in range(60):
            x = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            y = torch.randint(3, (12,), generator=generator)
            if skips and at % 3:
                _step(masked, optimizer, size * x.flip(0), y, zero_late=zero_late, parts=parts)
            _step(masked, optimizer, x, y, zero_late=zero_late, parts=parts)
            optimizer.step()
            masks.append(masked.unit_mask())
        found.append((masks, masked.importance_vector()))
    assert any(mask != found[0][0][0] for mask in found[0][0])
    assert found[1][0] == found[0][0]
    assert torch.equal(found[1][1], found[0][1])


@pytest.mark.parametrize("learning", [None, sk.GradientImportance(lr=0.0)])
def test_no_optimizer_steps_importance(learning: sk.GradientImportance | None) -> None:
    """Neither by gradients, which nobody then pays for, nor by decay; also after all was frozen and set free."""
    model, x, y = convolutions()
    masked = sk.LearnableMask(model, (x,), ratio=0.5, learning=learning)
    masked.requires_grad_(False)
    masked.requires_grad_(True)
    optimizer = torch.optim.AdamW(masked.parameters(), lr=0.1, weight_decay=0.5)
    before = masked.importance_vector()
    for _ in range(3):
        _step(masked, optimizer, x, y, zero_late=False)
        assert masked.scores.grad is None
        optimizer.step()
    assert torch.equal(masked.importance_vector(), before)
    assert list(masked.parameters()) == masked.weights()


def _live_bytes() -> int:
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu":
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_memory_does_not_grow_with_the_widths_that_were_tried() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(48, 40, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(160, 4)),
    )
    x, y = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
    dense = sum(value.numel() * 4 for value in model.parameters())
    before = _live_bytes()
    masked = sk.LearnableMask(model, (x,), ratio=0.5, learning=EAGER)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05)
    widths = set()
    for at in range(150):
        if at % 10 == 0:
            masked.ratio = 0.3 + at / 400
        _step(masked, optimizer, x, y, zero_late=False)
        optimizer.step()
        widths.add(tuple(masked.unit_mask().counts().values()))
    assert len(widths) > 3
    del optimizer
    assert _live_bytes() - before < 5 * dense
