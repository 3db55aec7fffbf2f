"""What happens in real loops between two steps: steps are skipped, layers are frozen and set free, memory is not filled."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import classifier, convolutions
from torch import Tensor, nn

import sparsekit as sk

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
