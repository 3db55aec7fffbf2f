"""Every criterion: the contract, exact numbers, missing inputs, and magnitudes of the weights that operators read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.allocation import make_mask
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
        return sk.trace_units(model, torch.ones(2, 3))


def _scores(*values: float) -> dict[str, Tensor]:
    return {**{name: torch.ones(group.size) for name, group in example_graph().groups.items()}, "first": torch.tensor(values)}


def test_in_order_a_prefix_stays_so_that_submodels_nest() -> None:
    small, large = (make_mask(Ordered(), example_graph(), ratio, ScoringContext()) for ratio in (0.4, 0.7))
    assert small["first"].tolist() == [True] * 3 + [False] * 4
    assert all(bool((large[name] | ~small[name]).all()) for name in large)


def test_at_random_every_unit_is_equally_likely_and_one_permutation_a_group_is_drawn() -> None:
    generator, again = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    mask = make_mask(Random(), example_graph(), 0.5, ScoringContext(generator=generator))
    for name, keep in mask.items():
        drawn = torch.randperm(keep.numel(), generator=again)
        assert set(drawn[: int(keep.sum())].tolist()) == set(keep.nonzero().flatten().tolist()), name
    assert torch.equal(generator.get_state(), again.get_state())
    context = ScoringContext(generator=generator)
    hits = sum(make_mask(Random(), example_graph(), 3 / 7, context)["first"].float() for _ in range(2000)) / 2000
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

    assert (of(Magnitude()).tolist(), of(Magnitude(order=2)).tolist()) == ([7, 1, 2], [5, 1, 2])
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
            lambda: make_mask(Scored(_scores(0.1, float("nan"), 0, 0, 0, 0, 0)), example_graph(), 0.5, ScoringContext()),
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


DEAD = torch.randperm(16, generator=torch.Generator().manual_seed(3))[:8]
"""Units whose used weights are 0, and whose stored ones are large."""


def gate(*shape: int) -> nn.Module:
    return Lambda(lambda m, weight: weight * m.gate, gate=torch.ones(shape).index_fill(0, DEAD, 0))


class Computed(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(6, 16)
        self.how, self.gate = how, gate(16, 1)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(16, 2))
        if how == "low rank":
            with torch.no_grad():
                self.weight[DEAD] = -(self.b @ self.a)[DEAD]

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "low rank":
            return F.linear(x, self.weight + self.b @ self.a, self.bias)
        if self.how == "transposed":
            return x @ self.gate(self.weight).t() + self.bias
        return F.linear(x, self.gate(self.weight), self.bias)


def _grown(layer: nn.Module, name: str) -> None:
    layer.get_parameter(name).data[DEAD] *= 50


def _zero(layer: nn.Module, name: str) -> None:
    layer.get_parameter(name).data[DEAD] = 0


def _pruned(layer: nn.Module) -> None:
    mask = torch.ones_like(layer.weight).index_fill(0, DEAD, 0)
    prune.custom_from_mask(layer, "weight", mask)
    _grown(layer, "weight_orig")


def _weight_norm(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)
    _grown(layer, "parametrizations.weight.original1")
    _zero(layer, "parametrizations.weight.original0")


def _old_weight_norm(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer)
    _grown(layer, "weight_v")
    _zero(layer, "weight_g")


def _gated(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", gate(16, *[1] * (layer.weight.dim() - 1)))
    _grown(layer, "parametrizations.weight.original")


WAYS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"{kind}, {change.__name__}": lambda make=make, change=change: (layer := make(), change(layer))[0]
        for kind, make in (("linear", lambda: nn.Linear(6, 16)), ("conv", lambda: nn.Conv1d(6, 16, 3)))
        for change in (_pruned, _weight_norm, _old_weight_norm, _gated)
    },
    **{how: lambda how=how: Computed(how) for how in ("low rank", "transposed", "product")},
}


@pytest.mark.parametrize("way", WAYS)
def test_units_whose_used_weights_are_zero_go_first(way: str) -> None:
    torch.manual_seed(0)
    first = WAYS[way]()
    _zero(first, "bias")
    image = isinstance(first, nn.Conv1d)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv1d(16, 3, 1) if image else nn.Linear(16, 3)).eval()
    x = torch.randn(4, 6, 5) if image else torch.randn(4, 6)
    pruned = sk.prune(model, x, criterion="magnitude", allocation=lambda problem: dict.fromkeys(problem.graph.groups, 8))
    for mask in (pruned.mask, sk.LearnableMask(model, (x,), ratio=0.5).unit_mask()):
        [kept] = mask.values()
        assert not kept[DEAD].any()
    torch.testing.assert_close(pruned.model(x), model(x))
    made = first.weight  # after a pass, that of the hooks
    if isinstance(first, Computed):
        made = first.weight + first.b @ first.a if way == "low rank" else first.gate(first.weight)
    [scores] = pruned.scores["Magnitude"].values.values()
    torch.testing.assert_close(scores, made.detach().flatten(1).abs().sum(1) + first.bias.abs().detach())
    graph = sk.trace_units(model, x)
    context = sk.criteria.ScoringContext(weights=model.state_dict(), model=model, call=((x,), {}))
    [norms] = sk.criteria.Magnitude(order=2).scores(graph, context).values()
    torch.testing.assert_close(norms, (made.detach().flatten(1).square().sum(1) + first.bias.detach() ** 2).sqrt())


def test_the_state_of_a_plain_model_is_what_counts() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    graph, call = sk.trace_units(model, torch.randn(2, 6)), ((torch.randn(2, 6),), {})
    weights = {name: 2 * value for name, value in model.state_dict().items()}
    plain, other = (sk.criteria.ScoringContext(weights=weights, model=given, call=call) for given in (None, model))
    [a], [b] = (sk.criteria.Magnitude().scores(graph, context).values() for context in (plain, other))
    assert torch.equal(a, b)
