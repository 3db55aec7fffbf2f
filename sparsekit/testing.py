"""Contract suites for pytest: to test a plug-in, inherit a class and supply its fixtures."""

import copy
import json
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsekit._torch import tree_map_only
from sparsekit.allocation import Allocation, allocate, make_mask, mask_from_scores, ratio_counts
from sparsekit.bandit import Bandit, Interval, Pull
from sparsekit.criteria import Criterion, Random, ScoringContext
from sparsekit.criteria.base import score_units
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph, UnitGroup, UnitMask, UnitSlice
from sparsekit.layers import LayerRule, Rules, resize
from sparsekit.measure import Budget, cost_model
from sparsekit.surgery import compact, expand, load_compact, save_compact
from sparsekit.surgery.compaction import compact_state
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.inputs import find_tensors
from sparsekit.tracing.trace import trace_units


def example_graph() -> UnitGraph:
    """Return a graph with groups of 7, 1 and 16 units, which are the rows of three matrices with three columns."""
    sizes = {"first": 7, "second": 1, "third": 16}
    rows = {name: torch.arange(size).reshape(-1, 1) for name, size in sizes.items()}
    groups = {
        name: UnitGroup(name, size, "feature", (UnitSlice(f"{name}.weight", 0, rows[name], "out", gated=True),))
        for name, size in sizes.items()
    }
    return UnitGraph(groups, {f"{name}.weight": torch.Size((size, 3)) for name, size in sizes.items()})


class ExampleModel(nn.Module):
    """Three parallel linear layers, whose rows are the units of `example_graph()`. It returns the sum of squares of each."""

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
    """Return all inputs of a criterion, drawn from `seed`."""
    generator, graph = torch.Generator().manual_seed(seed), example_graph()
    weights = {name: torch.randn(shape, generator=generator) for name, shape in graph.shapes.items()}
    return ScoringContext(weights=weights, generator=generator, model=ExampleModel(weights))


class CriterionContract:
    """Tests that every `Criterion` must pass; supply the fixture `criterion`.

    Override `graph` and `context` if the criterion needs other units than those of three parallel layers. Equal seeds must give
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
        then = self.context(5).weights or {}
        assert all(torch.equal(value, then[name]) for name, value in context.model.state_dict().items())


class AllocationContract:
    """Tests that every `Allocation` must pass; supply the fixture `allocation`."""

    @pytest.mark.parametrize("budget", ["flops=60%", "params=60%"])
    def test_its_counts_meet_the_budget_and_depend_on_nothing_else(self, allocation: Allocation, budget: str) -> None:
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3))
        x = torch.zeros(2, 6)
        graph = trace_units(model, x)
        costs = cost_model(model, x, graph)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            scores = {name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()}
            given = copy.deepcopy(scores)
            counts = allocate(allocation, graph, scores, costs, budget=Budget.of(budget))
            # mask_from_scores refuses counts that are out of range.
            assert mask_from_scores(graph, scores, counts).counts() == dict(counts)
            assert dict(counts) == dict(allocate(allocation, graph, given, costs, budget=Budget.of(budget)))
            assert all(isinstance(count, int) for count in counts.values())
            assert all(torch.equal(values, given[name]) for name, values in scores.items())


MakeBandit = Callable[[Interval, np.random.Generator], Bandit]
"""Builds a fresh bandit over an interval, for about 100 pulls, that draws from the given generator."""


def _play(bandit: Bandit, space: Interval, pulls: int) -> list[Pull]:
    """Pull a number of times, with rewards that are highest at 0.7 of the interval."""
    asked = []
    for _ in range(pulls):
        asked.append(bandit.ask())
        assert asked[-1].value in space
        bandit.tell(asked[-1], -abs(space.to_unit(asked[-1].value) - 0.7))
    return asked


class BanditContract:
    """Tests that every `Bandit` must pass; supply the fixture `make`, a `MakeBandit`."""

    @pytest.fixture(params=[Interval(0.0625, 1.0), Interval(1e-4, 10.0, scale="log")], ids=["linear", "log"])
    def space(self, request: pytest.FixtureRequest) -> Interval:
        return request.param  # type: ignore[no-any-return]

    @pytest.fixture
    def bandit(self, make: MakeBandit, space: Interval) -> Bandit:
        found = make(space, np.random.default_rng(0))
        assert isinstance(found, Bandit)
        return found

    def test_proposals_lie_within_the_space_and_below_upper(self, bandit: Bandit, space: Interval) -> None:
        draw = np.random.default_rng(1)
        for step in range(100):
            upper = space.from_unit(float(draw.random()))
            pull = bandit.ask(upper=upper)
            assert space.low <= pull.value <= upper
            executed = pull.value if step % 3 else space.from_unit(step / 100)
            eliminate = (None, "above", "below")[step % 3]
            bandit.tell(replace(pull, value=executed), -1.0, eliminate=eliminate)  # type: ignore[arg-type]
            assert bandit.ask().value in space
        assert bandit.ask(upper=space.low).value == space.low
        for upper in (math.nan, -math.inf, 0.0):
            with pytest.raises(InvalidValueError, match="upper"):
                bandit.ask(upper=upper)

    def test_pulls_are_told_once_in_any_order_or_forgotten(self, bandit: Bandit, space: Interval) -> None:
        with pytest.raises(InvalidValueError):
            bandit.best()
        pulls = [bandit.ask() for _ in range(10)]
        assert len({pull.id for pull in pulls}) == 10
        bandit.forget(pulls[0])
        for pull in reversed(pulls[1:]):
            bandit.tell(pull, -abs(space.to_unit(pull.value) - 0.7))
        assert bandit.best() in pulls[1:]
        for pull in (*pulls, replace(pulls[0], id=pulls[-1].id + 1)):
            for close in (bandit.forget, lambda pull: bandit.tell(pull, 0.5)):
                with pytest.raises(InvalidValueError):
                    close(pull)

    def test_what_is_refused_changes_nothing(self, make: MakeBandit, bandit: Bandit, space: Interval) -> None:
        pull = bandit.ask()
        before = bandit.state_dict()
        for value, reward in ((pull.value, math.nan), (pull.value, math.inf), (math.nan, 0.5), (-1.0, 0.5), (100.0, 0.5)):
            with pytest.raises(InvalidValueError):
                bandit.tell(replace(pull, value=value), reward)
        for state in (make(Interval(2.0, 3.0), np.random.default_rng(0)).state_dict(), {}):
            with pytest.raises(InvalidValueError):
                bandit.load_state_dict(state)
        assert bandit.state_dict() == before
        executed = replace(pull, value=space.from_unit(0.25))
        bandit.tell(executed, 0.5)
        assert bandit.best() == executed

    def test_it_learns_which_half_pays(self, bandit: Bandit, space: Interval) -> None:
        pays = []
        for _ in range(100):
            pull = bandit.ask()
            pays.append(space.to_unit(pull.value) >= 0.5)
            bandit.tell(pull, 1.0 if pays[-1] else 0.0)
        assert sum(pays[50:]) >= 35
        assert space.to_unit(bandit.best().value) >= 0.5

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_what_fails_is_avoided(self, make: MakeBandit, space: Interval, seed: int) -> None:
        """If all values above the middle fail, each is proposed at most three times, and half of the proposals are below."""
        for rewarded in (lambda share: share, lambda share: 1.0 - share, lambda _: 5.0):
            bandit, asked = make(space, np.random.default_rng(seed)), []
            for _ in range(60):
                pull = bandit.ask()
                asked.append(space.to_unit(pull.value))
                if asked[-1] > 0.5:
                    bandit.forget(pull)
                else:
                    bandit.tell(pull, rewarded(asked[-1]))
            failed = [share for share in asked if share > 0.5]
            assert len(failed) <= 30
            assert max((failed.count(share) for share in failed), default=0) <= 3
            assert space.to_unit(bandit.best().value) <= 0.5
            resumed = make(space, np.random.default_rng(99))
            resumed.load_state_dict(json.loads(json.dumps(bandit.state_dict(), allow_nan=False)))
            assert resumed.ask() == bandit.ask()

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_a_region_with_huge_losses_changes_nothing_outside_of_it(
        self, make: MakeBandit, space: Interval, seed: int
    ) -> None:
        """The size of a loss above 0.75 of the interval changes no proposal, and the best value is near the maximum at 0.5."""
        asked: list[list[float]] = []
        for large in (1e3, 1e6, 1e12):
            bandit, noise = make(space, np.random.default_rng(seed)), np.random.default_rng(seed)
            asked.append([])
            for _ in range(60):
                pull = bandit.ask()
                asked[-1].append(share := space.to_unit(pull.value))
                bandit.tell(pull, -large if share > 0.75 else -abs(share - 0.5) + 0.01 * float(noise.normal()))
            assert abs(space.to_unit(bandit.best().value) - 0.5) < 0.2
        assert asked[0] == asked[1] == asked[2]

    def test_a_search_in_which_all_fails_tries_many_values(self, bandit: Bandit) -> None:
        values = []
        for _ in range(40):
            pull = bandit.ask()
            values.append(pull.value)
            bandit.forget(pull)
        assert len(set(values)) >= 20

    def test_the_state_goes_through_json_and_resumes_to_the_same_bits(
        self, make: MakeBandit, bandit: Bandit, space: Interval
    ) -> None:
        assert _play(bandit, space, 12) != _play(make(space, np.random.default_rng(4)), space, 12)
        pending, state = bandit.ask(), bandit.state_dict()
        text = json.dumps(state, allow_nan=False)
        resumed = make(space, np.random.default_rng(99))
        resumed.load_state_dict(json.loads(text))
        for each in (bandit, resumed):
            each.tell(pending, 0.25)
        assert _play(resumed, space, 30) == _play(bandit, space, 30)
        assert resumed.state_dict() == bandit.state_dict()
        assert json.dumps(state, allow_nan=False) == text, "a state is a snapshot"


def _sizes(model: nn.Module) -> list[dict[str, object]]:
    plain = (int, float, bool, str, tuple)
    return [{key: value for key, value in vars(module).items() if isinstance(value, plain)} for module in model.modules()]


def _mask(graph: UnitGraph, ratio: float, seed: int) -> UnitMask:
    return make_mask(Random(), graph, ratio, ScoringContext(generator=torch.Generator().manual_seed(seed)))


class RuleContract:
    """Tests that every `LayerRule` must pass.

    Supply the fixtures `rule`, `network` and `inputs`. In `network`, prunable layers precede and follow the layer, as in
    `nn.Sequential(nn.Linear(3, 8), MyLayer(8, 6), nn.Linear(6, 2))`, with `inputs` `(torch.randn(4, 3),)`.
    """

    @pytest.fixture
    def rules(self, rule: LayerRule) -> Rules:
        return dict.fromkeys(rule.types, rule)

    @pytest.fixture
    def graph(self, network: nn.Module, inputs: tuple[Any, ...], rules: Rules) -> UnitGraph:
        return trace_units(network, inputs, rules=rules)

    def test_units_reach_the_layer_and_a_whole_one_keeps_its_sizes(
        self, network: nn.Module, rule: LayerRule, rules: Rules, graph: UnitGraph
    ) -> None:
        layers = [name for name, module in network.named_modules() if isinstance(module, rule.types)]
        assert layers, "the network must contain a layer of one of rule.types"
        prefixes = tuple(f"{name}." if name else "" for name in layers)
        assert any(piece.name.startswith(prefixes) for group in graph.groups.values() for piece in group.slices)
        before = _sizes(network)
        resize(network, rules)
        assert _sizes(network) == before

    @pytest.mark.parametrize(("ratio", "train"), [(0.2, True), (0.5, False), (0.8, True)])
    def test_gated_equals_compacted_with_its_gradients(
        self, network: nn.Module, inputs: tuple[Any, ...], rules: Rules, graph: UnitGraph, ratio: float, train: bool
    ) -> None:
        dense = copy.deepcopy(network).double().train(train)
        args = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
        mask = _mask(graph, ratio, 3)
        small = compact(dense, graph, mask, rules=rules)
        gated = graph.gate(named_entries(dense), {name: keep.double() for name, keep in mask.items()})
        gated = {name: value if value.requires_grad else value.clone() for name, value in gated.items()}
        found, expected = find_tensors(small(*args)), find_tensors(functional_call(dense, gated, args, tie_weights=False))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        for outputs in (found, expected):
            torch.stack([t.sin().sum() for t in outputs if t.requires_grad]).sum().backward()
        grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in dense.named_parameters()}
        cut = compact_state({**dense.state_dict(), **grads}, graph, mask)
        for name, own in small.named_parameters():
            torch.testing.assert_close(
                own.grad if own.grad is not None else torch.zeros_like(own), cut[name], rtol=1e-8, atol=1e-9
            )

    def test_a_cut_network_is_saved_expanded_and_traced_again(
        self, network: nn.Module, inputs: tuple[Any, ...], rules: Rules, graph: UnitGraph, tmp_path: Path
    ) -> None:
        mask, state = _mask(graph, 0.6, 0), network.state_dict()
        back = expand(compact_state(state, graph, mask), graph, mask, into=state)
        assert all(torch.equal(back[key], state[key]) for key in state)
        small = compact(network, graph, mask, rules=rules).eval()
        save_compact(small, tmp_path / "small.safetensors")
        again = load_compact(tmp_path / "small.safetensors", copy.deepcopy(network), rules=rules)
        assert _sizes(again) == _sizes(small)
        for a, b in zip(find_tensors(small(*inputs)), find_tensors(again(*inputs)), strict=True):
            assert torch.equal(a, b)
        kept = {name: count for name, count in mask.counts().items() if count > 1}
        assert dict(trace_units(small, inputs, rules=rules).fingerprint()) == kept
