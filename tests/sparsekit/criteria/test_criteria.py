"""Every criterion: the contract, exact numbers, missing inputs, and criteria of other packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation.by_cost import share_of_remaining
from sparsekit.criteria import Criterion, Fisher, Magnitude, Ordered, Random, Scored, ScoringContext, Taylor, Wanda
from sparsekit.criteria.base import score_units
from sparsekit.errors import InvalidValueError, MissingImportanceError
from sparsekit.testing import CriterionContract, example_context, example_graph

DATA = [
    (torch.randn(4, 3, generator=generator), torch.rand(4, 3, generator=generator))
    for generator in (torch.Generator().manual_seed(seed) for seed in range(2))
]


@dataclass(frozen=True)
class Neighbors:
    def scores(self, graph: sk.UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        own = Magnitude().scores(graph, context)
        return {name: F.avg_pool1d(own[name].double()[None, None], 3, 1, 1)[0, 0] for name in graph.groups}


ALL: list[Any] = [
    Neighbors(),
    Ordered(),
    Random(),
    Magnitude(),
    Magnitude(order=2),
    Taylor(DATA, F.mse_loss),
    Fisher(DATA, F.mse_loss),
    Fisher(DATA, F.mse_loss, per_position=True),
    Scored(Magnitude().scores(example_graph(), example_context())),
]


@pytest.mark.parametrize("criterion", ALL, ids=lambda each: type(each).__name__)
class TestCriteria(CriterionContract):
    pass


class TestActivation(CriterionContract):
    @pytest.fixture
    def criterion(self) -> Wanda:
        return Wanda(DATA)

    def context(self, seed: int = 0) -> ScoringContext:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1), nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 3))
        return ScoringContext(model=model, weights=model.state_dict())

    def graph(self) -> sk.UnitGraph:
        model = self.context().model
        assert model is not None
        return sk.trace_units(model, torch.ones(2, 3))


def _scores(*values: float) -> dict[str, Tensor]:
    return {**{name: torch.ones(group.size) for name, group in example_graph().groups.items()}, "first": torch.tensor(values)}


def test_in_order_a_prefix_stays_so_that_submodels_nest() -> None:
    small, large = (sk.make_mask(Ordered(), example_graph(), ratio, ScoringContext()) for ratio in (0.4, 0.7))
    assert small["first"].tolist() == [True] * 3 + [False] * 4
    assert all(bool((large[name] | ~small[name]).all()) for name in large)


def test_at_random_every_unit_is_equally_likely_and_one_permutation_a_group_is_drawn() -> None:
    generator, again = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    mask = sk.make_mask(Random(), example_graph(), 0.5, ScoringContext(generator=generator))
    for name, keep in mask.items():
        drawn = torch.randperm(keep.numel(), generator=again)
        assert set(drawn[: int(keep.sum())].tolist()) == set(keep.nonzero().flatten().tolist()), name
    assert torch.equal(generator.get_state(), again.get_state())
    context = ScoringContext(generator=generator)
    hits = sum(sk.make_mask(Random(), example_graph(), 3 / 7, context)["first"].float() for _ in range(2000)) / 2000
    assert torch.allclose(hits, torch.full((7,), 3 / 7), atol=0.05)


def test_numbers_that_were_worked_out_by_hand() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    first, second = model.parameters()
    with torch.no_grad():
        first.copy_(torch.tensor([[3.0, -4.0], [1.0, 0.0], [0.0, 2.0]]))
        second.copy_(torch.tensor([[0.0, 1.0, 2.0], [0.0, 2.0, 2.0]]))
    graph, context = sk.trace_units(model, torch.randn(1, 2)), ScoringContext(weights=model.state_dict())

    def of(criterion: Criterion) -> Tensor:
        return criterion.scores(graph, context)["0"].double()

    expected: dict[Criterion, list[float]] = {
        Magnitude(): [7, 1, 2],
        Magnitude(order=2): [5, 1, 2],
    }
    for criterion, numbers in expected.items():
        assert torch.allclose(of(criterion), torch.tensor(numbers, dtype=torch.float64)), criterion
    assert torch.allclose(share_of_remaining(of(Magnitude(order=2))), torch.tensor([1, 1 / 30, 4 / 29], dtype=torch.float64))


def test_weights_are_multiplied_by_the_root_mean_square_of_what_they_read() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 3))
    graph = sk.trace_units(model, torch.randn(1, 2, 4, 4))
    batches = [(torch.randn(3, 2, 4, 4), None), (torch.randn(5, 2, 4, 4), None)]
    inputs = model[:3](torch.cat([x for x, _ in batches])).detach()
    terms = model[3].weight.detach().abs() * inputs.square().mean(0).sqrt()
    found = Wanda(batches).scores(graph, ScoringContext(model=model))["0"]
    assert torch.allclose(found, terms.sum(0).reshape(4, 4).sum(1).double(), rtol=1e-5)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: Magnitude(order=3), "order must be 1"),
        (
            lambda: Wanda([torch.randn(2, 3)]).scores(example_graph(), example_context()),
            "the units of group 'first' are not the input of a linear layer",
        ),
        (lambda: Random().scores(example_graph(), ScoringContext()), r"pass ScoringContext\(generator="),
        (lambda: Magnitude().scores(example_graph(), ScoringContext()), r"pass ScoringContext\(weights="),
        (
            lambda: sk.make_mask(Scored(_scores(0.1, float("nan"), 0, 0, 0, 0, 0)), example_graph(), 0.5, ScoringContext()),
            r"Scored scores of group 'first' hold NaN, for unit 1 first; .*learning rate",
        ),
        (
            lambda: score_units(Scored({"first": torch.ones(7, 1)}), example_graph(), ScoringContext()),
            r"scores of group 'first' must be a float tensor of shape \(7,\), one score a unit, got torch.float32 of shape",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_said(made: Callable[[], object], told: str) -> None:
    with pytest.raises(MissingImportanceError if "pass " in told else InvalidValueError, match=told):
        made()
