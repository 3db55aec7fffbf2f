"""PatternContract: inherit it and supply one fixture to test a pattern that was written elsewhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from sparsekit.criteria.base import Pattern, PatternView, keep_count, select
from sparsekit.graph.graph import UnitGraph, UnitGroup, UnitSlice
from sparsekit.graph.mask import UnitMask

__all__ = ["PatternContract", "example_graph", "example_view"]

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


def example_view(round: int = 0, seed: int = 0) -> PatternView:
    """Everything that a pattern may look at, drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    graph = example_graph()
    return PatternView(
        round=round,
        importance={name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()},
        weights={name: torch.randn(shape, generator=generator) for name, shape in graph.shapes.items()},
        previous=UnitMask.full(graph),
        generator=generator,
    )


class PatternContract:
    """What holds for every `Pattern`.

    Supply the fixture `pattern`::

        class TestMyPattern(PatternContract):
            @pytest.fixture
            def pattern(self):
                return MyPattern()
    """

    @pytest.fixture
    def pattern(self) -> Pattern:
        """To be supplied: the pattern."""
        pytest.fail("a PatternContract needs a fixture `pattern` that returns the pattern to test")

    def test_it_is_a_pattern(self, pattern: Pattern) -> None:
        assert isinstance(pattern, Pattern)

    @pytest.mark.parametrize("round", [0, 1, 50])
    def test_exactly_the_count_is_kept_for_every_count(self, pattern: Pattern, round: int) -> None:
        view = example_view(round)
        for group in example_graph().groups.values():
            for count in range(1, group.size + 1):
                keep = pattern.keep(group, count, view)
                assert keep.dtype == torch.bool
                assert keep.shape == (group.size,)
                assert int(keep.sum()) == count

    @pytest.mark.parametrize("ratio", [1e-6, 0.0625, 0.5, 0.99, 1.0])
    def test_select_makes_a_mask_of_the_right_counts(self, pattern: Pattern, ratio: float) -> None:
        graph = example_graph()
        mask = select(pattern, graph, ratio, example_view())
        mask.check(graph)
        assert mask.counts() == {name: keep_count(ratio, size) for name, size in _SIZES.items()}

    def test_equal_views_give_equal_masks(self, pattern: Pattern) -> None:
        first, second = (select(pattern, example_graph(), 0.5, example_view(3, seed=5)) for _ in range(2))
        assert first == second

    def test_the_view_is_not_changed(self, pattern: Pattern) -> None:
        view, untouched = example_view(2), example_view(2)
        select(pattern, example_graph(), 0.5, view)
        assert view.importance is not None
        assert untouched.importance is not None
        assert view.weights is not None
        assert untouched.weights is not None
        assert all(torch.equal(view.importance[name], untouched.importance[name]) for name in view.importance)
        assert all(torch.equal(view.weights[name], untouched.weights[name]) for name in view.weights)
        assert view.previous == untouched.previous

    def test_no_state_is_kept_between_calls(self, pattern: Pattern) -> None:
        before = copy.deepcopy(pattern)
        select(pattern, example_graph(), 0.25, example_view(9, seed=9))
        assert pattern == before
        assert select(pattern, example_graph(), 0.5, example_view()) == select(before, example_graph(), 0.5, example_view())

    def test_the_global_generator_is_left_alone(self, pattern: Pattern) -> None:
        before = torch.random.get_rng_state()
        select(pattern, example_graph(), 0.5, example_view())
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_it_can_be_sent_to_another_process(self, pattern: Pattern) -> None:
        assert pickle.loads(pickle.dumps(pattern)) == pattern
