"""Targets of importance are exact, and everything of it is float32 at least, whatever the dtype of the weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from masked import learnable_mask
from torch import nn

from sparsekit import GradientImportance, LearnableMask, trace_units
from sparsekit.criteria.weights import unit_magnitudes
from sparsekit.training.importance import ImportanceRegularizer, standardize

HALVES = [torch.bfloat16, torch.float16]


def _classifier(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    return model.to(dtype), torch.randn(12, 6).to(dtype), torch.randint(3, (12,))


def _masked(dtype: torch.dtype) -> LearnableMask:
    model, x, _ = _classifier(dtype)
    return LearnableMask(model, (x,), prune_hidden_size=True, ratio=0.5, learning=GradientImportance(lr=1e-4, refresh_every=1))


@pytest.mark.parametrize("dtype", HALVES)
def test_importance_is_float32_and_small_updates_of_it_last(dtype: torch.dtype) -> None:
    masked = _masked(dtype)
    _, x, y = _classifier(dtype)
    optimizer = torch.optim.SGD(masked.parameters(), lr=1e-4)
    assert masked.scores.dtype == torch.float32
    before = masked.scores.detach().clone()
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(masked(x), y).backward()
        optimizer.step()
    kept = torch.cat(list(masked.unit_mask().values()))
    moved = (masked.scores.detach() != before)[kept]
    assert moved.float().mean() > 0.8
    assert all(p.dtype == dtype for p in masked.model.parameters())


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: nn.Sequential(m).bfloat16()[0]])
def test_importance_stays_float32_when_the_mask_moves_to_a_shorter_dtype(move) -> None:
    masked = _masked(torch.float32)
    before = masked.scores.detach().clone()
    masked = move(masked)
    assert masked.scores.dtype == torch.float32
    assert torch.equal(masked.scores, before)
    dtype = masked.model[0].weight.dtype
    assert dtype.itemsize == 2
    masked.load_importance({name: -values for name, values in masked.importance().items()})  # dropped units enter
    masked(_classifier(dtype)[1])
    weights = masked.dense_state()
    expected = torch.cat([unit_magnitudes(group, weights) for group in masked.graph.groups.values()])
    assert expected.dtype == torch.float32
    torch.testing.assert_close(masked.vectors.magnitudes(), expected, rtol=1e-6, atol=1e-6)
    assert masked.double().scores.dtype == torch.float64
    assert masked.half().scores.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_gates_are_those_of_the_same_weights_in_float32(dtype: torch.dtype) -> None:
    """One linear layer after the gates, so that the gradient of its weights is exact in both but for their rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 256)).to(dtype)
    x = torch.ones(1, 2)
    found = {}
    for name, module in (("short", model), ("float32", copy.deepcopy(model).float())):
        for execution in ("compact", "masked"):
            graph = trace_units(module, x.to(module[0].weight))
            masked = learnable_mask(module, graph=graph, ratio=0.5, execution=execution, learning=GradientImportance())
            masked(x.to(module[0].weight)).float().sum().backward()
            found[name, execution] = masked.vectors.gate_gradient()
    for execution in ("compact", "masked"):
        expected = found["float32", execution]
        short = found["short", execution]
        assert (short - expected).norm() / expected.norm() < 0.004
    torch.testing.assert_close(found["short", "compact"], found["short", "masked"], rtol=1e-5, atol=1e-5)


def test_targets_are_the_sigmoid_of_standardized_or_plain_sums() -> None:
    sums = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0])
    plain = ImportanceRegularizer(target="absolute").targets(sums, [3, 2])
    assert torch.equal(plain, torch.sigmoid(sums))
    deviation = (2 / 3) ** 0.5
    ours = ImportanceRegularizer().targets(sums, [3, 2])
    assert torch.allclose(ours, torch.sigmoid(torch.tensor([-1 / deviation, 0.0, 1 / deviation, 0.0, 0.0])))
    assert standardize(sums, torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3, 2]))[3:].tolist() == [0.0, 0.0]
    assert ImportanceRegularizer().targets(torch.empty(0), []).shape == (0,)  # of a model without units
