"""MovingAverage averages each unit with itself."""

import copy

import pytest
import torch
from masked import convolutions, shake, train_step

from sparsekit import GradientImportance, LearnableMask, MovingAverage
from sparsekit.graph.mask import to_weights


def masked_model(dtype: torch.dtype = torch.float64) -> tuple[LearnableMask, torch.Tensor]:
    model, x, _ = convolutions(dtype)
    return LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance()), x


def test_each_unit_is_averaged_since_it_entered() -> None:
    masked, x = masked_model()
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05)
    average = MovingAverage(masked, decay=0.7)
    expected, before = masked.dense_state(), to_weights(masked.graph, masked.unit_mask())
    for seed in range(12):
        masked.ratio = 0.25 if 4 <= seed < 8 else 0.5
        if seed % 4 == 0:  # the mask stands for some updates
            shake(masked, seed)
        if seed == 6:
            masked.load({name: tensor + 1.0 for name, tensor in masked.dense_state().items()})
        train_step(masked, optimizer, x, None)
        if seed == 9:  # a program that ends here goes on from what was saved
            saved, average = average.state_dict(), MovingAverage(masked, decay=0.7)
            average.load_state_dict(saved)
        average.update()
        now = to_weights(masked.graph, masked.narrow_model.mask)
        for name, tensor in masked.dense_state().items():
            is_weight, stays = "running" not in name and "num" not in name, before[name] & now[name] if name in now else True
            averaged = 0.7 * expected[name] + 0.3 * tensor if is_weight else tensor
            expected[name] = torch.where(torch.as_tensor(stays), averaged, tensor)
        before = now
    for name, tensor in average.dense_state().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)


def test_the_compact_average_computes_what_a_copy_of_the_mask_with_the_average_does() -> None:
    masked, x = masked_model()
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05)
    average = MovingAverage(masked, decay=0.5)
    for seed in range(3):
        shake(masked, seed)
        train_step(masked, optimizer, x, None)
        average.update()
    shake(masked, 3)  # the average follows a change of the mask without another update
    masked.unit_mask()
    trained = masked.dense_state()
    twin = copy.deepcopy(masked)
    average.copy_to(twin)
    small = average.compact()
    torch.testing.assert_close(small.eval()(x), twin.eval()(x), rtol=0, atol=1e-12)
    assert twin.unit_mask() == masked.unit_mask()
    assert not torch.equal(trained["9.weight"], twin.dense_state()["9.weight"])
    assert all(torch.equal(tensor, trained[name]) for name, tensor in masked.dense_state().items())


def test_small_steps_count_in_bfloat16() -> None:
    masked, _ = masked_model(torch.bfloat16)
    average = MovingAverage(masked, decay=0.999)
    before = average.state_dict()["9.weight"]
    with torch.no_grad():
        for parameter in masked.model.parameters():
            parameter.mul_(2)
    for _ in range(5):
        average.update()
    assert average.state_dict()["9.weight"].dtype == torch.float32
    kept = masked.unit_mask()["7"]
    moved = (average.state_dict()["9.weight"] / before)[:, kept]
    torch.testing.assert_close(moved, torch.full_like(moved, 1 + (1 - 0.999**5)), rtol=1e-4, atol=0)
    assert average.dense_state()["9.weight"].dtype == torch.bfloat16


def test_an_update_reads_the_narrow_weights_alone_while_the_mask_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    masked, x = masked_model()
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05)
    average = MovingAverage(masked)
    train_step(masked, optimizer, x, None)
    average.update()
    monkeypatch.setattr(type(masked.narrow_model), "dense_state", None)
    train_step(masked, optimizer, x, None)
    average.update()
