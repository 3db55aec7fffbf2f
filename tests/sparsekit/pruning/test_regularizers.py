"""GroupLasso, GroupSL and GrowingRegularizer: exact gradients on three units, and what they do to training."""

import pytest
import torch
from torch import nn

import sparsekit as sk
from sparsekit.criteria import Magnitude, ScoringContext
from sparsekit.finetuning import GroupLasso, GroupSL, GrowingRegularizer
from sparsekit.pruning.regularizers import UnitRegularizer


@pytest.fixture
def chain() -> tuple[nn.Module, sk.UnitGraph]:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0, 2.0], [1.0, 2.0], [0.0, 0.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 2.0, 1.0]]))
    return model, sk.trace_units(model, torch.randn(1, 2))


def _gradients(regularizer: UnitRegularizer, model: nn.Module) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    regularizer.add_gradients(model)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_group_lasso_is_the_gradient_of_the_sum_of_norms(chain: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = chain
    found = _gradients(GroupLasso(graph, 0.5), model)
    model.zero_grad()
    units = torch.cat([model[0].weight, model[1].weight.t()], 1)
    (0.5 * 3**0.5 * units.norm(dim=1)).sum().backward()
    assert all(torch.allclose(a, b.grad) for a, b in zip(found, model.parameters()))


def test_group_sl_decays_the_smallest_unit_most(chain: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = chain
    first, second = _gradients(GroupSL(graph, 0.1), model)  # norms 3, 3, 1
    assert torch.allclose(first, 0.1 * model[0].weight.detach())
    assert torch.allclose(second, 0.1 * torch.tensor([[1.0, 2.0, 16.0]]))


def test_growing_decay_is_on_units_that_will_go(chain: tuple[nn.Module, sk.UnitGraph]) -> None:
    model, graph = chain
    mask = sk.UnitMask({"0": torch.tensor([True, False, True])})
    regularizer = GrowingRegularizer(graph, mask, increment=0.5, ceiling=0.8)
    assert _gradients(regularizer, model)[0].tolist() == [[0.0, 0.0], [0.5, 1.0], [0.0, 0.0]]
    regularizer.end_epoch()
    assert _gradients(regularizer, model)[1].tolist() == [[0.0, pytest.approx(1.6), 0.0]]
    other = GrowingRegularizer(graph, mask, increment=0.5, ceiling=0.8)
    other.load_state_dict(regularizer.state_dict())
    assert other.decay == regularizer.decay == 0.8


def test_training_with_a_lasso_empties_units_that_the_task_does_not_need() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
    x = torch.randn(128, 4)
    batches = [(x, torch.tanh(x[:, :1] - x[:, 1:2]))]
    graph = sk.trace_units(model, x[:2])
    sk.finetune(
        model, batches, nn.functional.mse_loss, epochs=500,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), regularizer=GroupLasso(graph, 0.01),
    )  # fmt: skip
    norms = Magnitude(order=2, coupled=True).scores(graph, ScoringContext(weights=model.state_dict()))["0"]
    assert int((norms < 0.05).sum()) >= 6
    with torch.no_grad():
        assert float(nn.functional.mse_loss(model(x), batches[0][1])) < 0.05
