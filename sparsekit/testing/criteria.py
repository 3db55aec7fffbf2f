"""CriterionContract: inherit it and supply one fixture to test a criterion that was written elsewhere."""

import copy
import pickle
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsekit.allocation.masks import make_mask
from sparsekit.allocation.shares import ratio_counts
from sparsekit.criteria.base import Criterion, ScoringContext, score_units
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice


def example_graph(sizes: Mapping[str, int] | None = None, ties: tuple[tuple[str, ...], ...] = ()) -> UnitGraph:
    """Groups of 7, 1 and 16 units, or of other `sizes`, each the rows of a matrix of three columns."""
    sizes = {"first": 7, "second": 1, "third": 16} if sizes is None else sizes
    rows = {name: torch.arange(size).reshape(-1, 1) for name, size in sizes.items()}
    groups = {
        name: UnitGroup(name, size, "feature", (UnitSlice(f"{name}.weight", 0, rows[name], "out", gated=True),))
        for name, size in sizes.items()
    }
    return UnitGraph(groups, {f"{name}.weight": torch.Size((size, 3)) for name, size in sizes.items()}, ties=ties)


class ExampleModel(nn.Module):
    """Three layers side by side, whose rows are the units of `example_graph()`; its outputs are their squares, summed up."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            layer = nn.utils.skip_init(nn.Linear, 3, weight.shape[0], bias=False)
            layer.weight = nn.Parameter(weight.clone())
            self.add_module(name.removesuffix(".weight"), layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map float (examples, 3) to float (examples, 3)."""
        return torch.stack([layer(x).square().sum(1) for layer in self.children()], 1)


def example_context(seed: int = 0) -> ScoringContext:
    """Return everything that a criterion may look at, drawn from `seed`."""
    generator, graph = torch.Generator().manual_seed(seed), example_graph()
    importance = {name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in graph.shapes.items()}
    return ScoringContext(importance=importance, weights=weights, generator=generator, model=ExampleModel(weights))


class CriterionContract:
    """Laws of every `Criterion`; supply the fixture `criterion`.

    Override `graph` and `context` if the criterion needs other units than three layers side by side; equal seeds must give
    equal contexts.
    """

    def graph(self) -> UnitGraph:
        """Return the units to score."""
        return example_graph()

    def context(self, seed: int = 0) -> ScoringContext:
        """Return a context of `graph()`."""
        return example_context(seed)

    def test_every_unit_has_a_score_by_which_any_share_can_be_kept(self, criterion: Criterion) -> None:
        assert isinstance(criterion, Criterion)
        for ratio in (1e-6, 0.5, 1.0):
            assert make_mask(criterion, self.graph(), ratio, self.context()).counts() == ratio_counts(self.graph(), ratio)

    def test_scores_depend_on_the_view_alone_and_leave_it_as_it_was(self, criterion: Criterion) -> None:
        random, before = torch.random.get_rng_state(), pickle.loads(pickle.dumps(criterion))
        score_units(copy.deepcopy(criterion), self.graph(), self.context(9))
        context, untouched = self.context(5), self.context(5)
        first, second = score_units(criterion, self.graph(), context), score_units(before, self.graph(), untouched)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert criterion == before
        assert torch.equal(torch.random.get_rng_state(), random)
        assert context.model is not None
        assert all(parameter.grad is None and parameter.requires_grad for parameter in context.model.parameters())
        assert context.model.training
        for now, then in (
            (context.importance, self.context(5).importance),
            (context.model.state_dict(), self.context(5).weights),
        ):
            assert all(torch.equal(value, (then or {})[name]) for name, value in (now or {}).items())
