"""Criteria that read the weights alone: exact numbers, the contract, what is missing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.criteria import BatchNormScale, Criterion, GeometricMedian, Lamp, Magnitude, Normalised, View
from sparsekit.errors import InvalidValueError, MissingImportanceError
from sparsekit.testing.criteria import CriterionContract


class TestWeightsAlone(CriterionContract):
    @pytest.fixture(
        params=[
            Magnitude(order=2),
            Magnitude(order=2, coupled=True),
            Lamp(),
            GeometricMedian(),
            BatchNormScale(otherwise=Magnitude()),
        ],
        ids=repr,
    )
    def criterion(self, request: pytest.FixtureRequest) -> Criterion:
        found: Criterion = request.param
        return found


@pytest.fixture
def chain() -> tuple[nn.Module, sk.UnitGraph, View]:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]))
        model[1].weight.copy_(torch.tensor([[0.0, 1.0, 2.0], [0.0, 2.0, 2.0]]))
    return model, sk.trace_units(model, torch.randn(1, 2)), View(weights=model.state_dict())


def test_squares_and_coupled_layers(chain: tuple[nn.Module, sk.UnitGraph, View]) -> None:
    _, graph, view = chain
    assert Magnitude(order=2).scores(graph, view)["0"].tolist() == [5.0, 1.0, 2.0]
    assert Magnitude(coupled=True).scores(graph, view)["0"].tolist() == [7.0, 4.0, 6.0]
    squares = torch.tensor([25.0, 1 + 5.0, 4 + 8.0])
    assert torch.allclose(Magnitude(order=2, coupled=True).scores(graph, view)["0"], squares.sqrt())


def test_lamp_divides_by_what_is_at_least_as_large(chain: tuple[nn.Module, sk.UnitGraph, View]) -> None:
    _, graph, view = chain
    assert torch.allclose(Lamp().scores(graph, view)["0"], torch.tensor([1.0, 1 / 30, 4 / 29], dtype=torch.float64))


def test_the_unit_in_the_middle_is_worth_least(chain: tuple[nn.Module, sk.UnitGraph, View]) -> None:
    model, graph, view = chain
    distances = torch.cdist(model[0].weight, model[0].weight).sum(1).detach()
    assert torch.allclose(GeometricMedian().scores(graph, view)["0"], distances)
    assert int(GeometricMedian().scores(graph, view)["0"].argmin()) == 2


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(self.norm(self.conv(x)).mean((2, 3)))))


def test_batch_norm_scales_are_read_and_groups_without_them_are_named() -> None:
    model = Normed()
    with torch.no_grad():
        model.norm.weight.copy_(torch.tensor([0.5, -2.0, 1.0, 0.0]))
    graph = sk.trace_units(model, torch.randn(2, 3, 4, 4))
    view = View(weights=model.state_dict())
    with pytest.raises(MissingImportanceError, match="no batch norm acts on the units of 'hidden'; pass otherwise="):
        BatchNormScale().scores(graph, view)
    scores = BatchNormScale(otherwise=Normalised(Magnitude())).scores(graph, view)
    assert scores["conv"].tolist() == [0.5, 2.0, 1.0, 0.0]
    assert float(scores["hidden"].mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("criterion", [Lamp(), GeometricMedian(), BatchNormScale()], ids=repr)
def test_missing_weights_say_what_to_pass(criterion: Criterion, chain: tuple[nn.Module, sk.UnitGraph, View]) -> None:
    with pytest.raises(MissingImportanceError, match=r"needs the weights; pass View\(weights="):
        criterion.scores(chain[1], View())


def test_an_order_is_1_or_2() -> None:
    with pytest.raises(InvalidValueError, match="order must be 1"):
        Magnitude(order=3)  # type: ignore[arg-type]
