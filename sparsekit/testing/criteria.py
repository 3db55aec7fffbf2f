"""CriterionContract: inherit it and supply one fixture to test a criterion that was written elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from sparsekit.allocation.choose import choose, select
from sparsekit.allocation.uniform import Uniform
from sparsekit.criteria.base import Criterion, Need, View, score_units
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice
from sparsekit.graph.mask import UnitMask

__all__ = ["CriterionContract", "ExampleModel", "example_batches", "example_graph", "example_loss", "example_view"]

_SIZES = {"first": 7, "second": 1, "third": 16}


def example_graph() -> UnitGraph:
    """Three groups of 7, 1 and 16 units, each the rows of one matrix."""
    groups = {
        name: UnitGroup(
            name, size, "feature", (UnitSlice(f"{name}.weight", 0, torch.arange(size).reshape(-1, 1), "out", gated=True),)
        )
        for name, size in _SIZES.items()
    }
    return UnitGraph(groups, {f"{name}.weight": torch.Size((size, 3)) for name, size in _SIZES.items()})


class ExampleModel(nn.Module):
    """Three layers side by side, whose rows are the units of `example_graph()`; its outputs are their squares, summed up."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, size in _SIZES.items():
            layer = nn.utils.skip_init(nn.Linear, 3, size, bias=False)
            layer.weight = nn.Parameter(weights[f"{name}.weight"].clone())
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map float (examples, 3) to float (examples, 3)."""
        return torch.stack([layer(x).square().sum(1) for layer in self.children()], 1)


def example_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean square of the differences."""
    return (outputs - targets).square().mean()


def example_batches() -> list[tuple[Tensor, Tensor]]:
    """Two batches of four examples for `ExampleModel`."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.rand(4, 3, generator=generator)) for _ in range(2)]


def example_view(seed: int = 0) -> View:
    """Everything that a criterion may look at, drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    graph = example_graph()
    importance = {name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in graph.shapes.items()}
    return View(
        importance=importance,
        weights=weights,
        previous=UnitMask.full(graph),
        generator=generator,
        model=ExampleModel(weights),
    )


def _equal(first: Mapping[str, Tensor] | None, second: Mapping[str, Tensor] | None) -> bool:
    if first is None or second is None:
        return first is second
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


class CriterionContract:
    """What holds for every `Criterion`.

    Supply the fixture `criterion`::

        class TestMyCriterion(CriterionContract):
            @pytest.fixture
            def criterion(self):
                return MyCriterion()

    Override `graph` and `view` where the criterion needs other units than three layers side by side.
    """

    @pytest.fixture
    def criterion(self) -> Criterion:
        """To be supplied: the criterion."""
        pytest.fail("a CriterionContract needs a fixture `criterion` that returns the criterion to test")

    def graph(self) -> UnitGraph:
        """The units to score."""
        return example_graph()

    def view(self, seed: int = 0) -> View:
        """A view of `graph()`; equal seeds give equal views."""
        return example_view(seed)

    def test_it_is_a_criterion(self, criterion: Criterion) -> None:
        assert isinstance(criterion, Criterion)
        assert isinstance(criterion.learned, bool)
        assert criterion.needs <= set(get_args(Need))

    def test_every_unit_has_a_score_that_is_a_number(self, criterion: Criterion) -> None:
        scores = score_units(criterion, self.graph(), self.view())
        assert not any(bool(torch.isnan(values).any()) for values in scores.values())

    def test_exactly_the_count_stays_for_every_count(self, criterion: Criterion) -> None:
        graph = self.graph()
        scores = score_units(criterion, graph, self.view())
        sizes = {name: group.size for name, group in graph.groups.items()}
        for count in range(1, max(sizes.values()) + 1):
            counts = {name: min(count, size) for name, size in sizes.items()}
            assert choose(graph, scores, counts).counts() == counts

    @pytest.mark.parametrize("ratio", [1e-6, 0.0625, 0.5, 0.99, 1.0])
    def test_select_makes_a_mask_of_the_right_counts(self, criterion: Criterion, ratio: float) -> None:
        graph = self.graph()
        mask = select(criterion, graph, ratio, self.view())
        mask.check(graph)
        assert mask.counts() == Uniform(ratio).counts(graph, {})

    def test_equal_views_give_equal_scores(self, criterion: Criterion) -> None:
        first, second = (score_units(criterion, self.graph(), self.view(seed=5)) for _ in range(2))
        assert _equal(first, second)

    def test_the_view_is_not_changed(self, criterion: Criterion) -> None:
        view, untouched = self.view(), self.view()
        select(criterion, self.graph(), 0.5, view)
        assert _equal(view.importance, untouched.importance)
        assert _equal(view.weights, untouched.weights)
        assert view.previous == untouched.previous
        assert view.model is not None
        assert untouched.model is not None
        assert _equal(view.model.state_dict(), untouched.model.state_dict())
        assert all(parameter.grad is None and parameter.requires_grad for parameter in view.model.parameters())
        assert view.model.training

    def test_no_state_is_kept_between_calls(self, criterion: Criterion) -> None:
        before = copy.deepcopy(criterion)
        score_units(criterion, self.graph(), self.view(seed=9))
        assert criterion == before
        after, fresh = (score_units(each, self.graph(), self.view()) for each in (criterion, before))
        assert _equal(after, fresh)

    def test_the_global_generator_is_left_alone(self, criterion: Criterion) -> None:
        graph, view = self.graph(), self.view()
        before = torch.random.get_rng_state()
        score_units(criterion, graph, view)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_it_can_be_sent_to_another_process(self, criterion: Criterion) -> None:
        assert pickle.loads(pickle.dumps(criterion)) == criterion
