"""Submodels that spend the cost of the uniform one where it is worth most: exact numbers, budgets, engines, the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import sparsekit as sk
from sparsekit.allocation.uniform import Uniform
from sparsekit.cli.main import execute
from sparsekit.errors import InvalidValueError
from sparsekit.training.loss_importance import LossImportance
from sparsekit_fl.engines.cohort import Cohort
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.methods.fedlps import fedlps, fedlps_own, fedlps_paper
from sparsekit_fl.policies.allotment import within_uniform
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.ratio import ByCapability
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config


class ThreeLayers(nn.Module):
    """a and b hidden units: 2·(6a + ab + 3b) FLOPs."""

    def __init__(self, a: int = 16, b: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, a), nn.Linear(a, b), nn.Linear(b, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return logits


def traced() -> tuple[sk.UnitGraph, sk.CostModel]:
    model = ThreeLayers(8, 4)
    graph = sk.trace_units(model, torch.zeros(1, 6))
    return graph, sk.cost_model(model, torch.zeros(1, 6), graph=graph)


def flops(a: int, b: int) -> int:
    return 2 * (6 * a + a * b + 3 * b)


def problem() -> Problem:
    return Problem(model=ThreeLayers, example_inputs=(torch.zeros(2, 6),))


def method(**options: object):
    return replace(fedlps(), ratio=ByCapability(), local=LearnableSgd(importance_lr=0.1, **options))


ONE_OF_B = {"a": torch.ones(8), "b": torch.tensor([1.0, 1e-3, 1e-3, 1e-3])}


@pytest.mark.parametrize("allocation", ["by_cost", "global", "isomorphic"])
def test_the_flops_of_the_uniform_submodel_go_where_importance_says(allocation):
    graph, costs = traced()
    assert costs.costs(Uniform(0.5).counts(graph, {}))["flops"] == flops(4, 2) == 76
    found = within_uniform(graph, costs, 0.5, allocation=allocation).counts(graph, ONE_OF_B, costs)
    assert found == {"a": 5, "b": 1}
    assert flops(5, 1) == 76


@pytest.mark.parametrize("allocation", ["by_cost", "global", "isomorphic"])
@pytest.mark.parametrize("metric", ["flops", "flops and bytes"])
def test_no_ratio_and_no_importance_makes_it_dearer_than_the_uniform_submodel(allocation, metric):
    graph, costs = traced()
    generator = torch.Generator().manual_seed(0)
    for ratio in (0.1, 0.25, 0.4, 0.5, 0.75, 0.9, 1.0):
        scores = {name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()}
        limit = costs.costs(Uniform(ratio).counts(graph, {}))
        found = costs.costs(
            within_uniform(graph, costs, ratio, allocation=allocation, metric=metric).counts(graph, scores, costs)
        )
        assert found["flops"] <= limit["flops"]
        if metric == "flops and bytes":
            assert found["bytes"] <= limit["bytes"]


def test_uniform_and_the_whole_model_are_left_as_they_are():
    graph, costs = traced()
    assert within_uniform(graph, costs, 0.5) == Uniform(0.5)
    assert within_uniform(graph, costs, 1.0, allocation="by_cost") == Uniform(1.0)


def test_it_is_off_where_the_paper_is_followed_and_by_default():
    for make in (fedlps, fedlps_own, fedlps_paper):
        assert make().local.allocation == "uniform"


def spied(**options: object):
    """The counts and the ratio of every training of a run."""
    seen = []

    class Spy(LearnableSgd):
        def train(self, ctx, start, mask, ratio):
            result = super().train(ctx, start, mask, ratio)
            seen.append((result.mask.counts(), ratio, ctx.costs, ctx.graph))
            return result

    local = Spy(importance_lr=0.1, **options)
    run(replace(method(), local=local), problem(), tiny_clients(), tiny_config(rounds=2))
    return seen


def test_a_client_never_exceeds_the_flops_of_its_capability_and_uses_other_widths():
    for counts, ratio, costs, graph in (seen := spied(allocation="by_cost")):
        assert costs.costs(counts)["flops"] <= costs.costs(Uniform(ratio).counts(graph, {}))["flops"]
    assert any(counts != Uniform(ratio).counts(graph, {}) for counts, ratio, _, graph in seen)


def test_every_engine_gives_the_same_bits():
    ours = method(allocation="by_cost")
    found = [
        run(ours, problem(), tiny_clients(), tiny_config(rounds=2), engine=engine).final.state_sha256
        for engine in (Embedded(1), Embedded(2), Cohort())
    ]
    assert len(set(found)) == 1
    assert found[0] != run(method(), problem(), tiny_clients(), tiny_config(rounds=2)).final.state_sha256


def test_the_command_reaches_it_and_refuses_other_names(capsys):
    tiny = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--local-epochs", "1", "--workers", "1", "--quiet"]
    assert execute(["run", "fedlps", *tiny, "--set", "local.allocation=by_cost", "--json"]) == 0
    assert "allocation='by_cost'" in json.loads(capsys.readouterr().out)["policies"]["local"]
    with pytest.raises(InvalidValueError, match="allocation must be"):
        LearnableSgd(allocation="knapsack")


def test_it_does_not_go_with_the_other_rule_of_learning():
    with pytest.raises(InvalidValueError, match="goes with the paper's rule alone"):
        run(method(allocation="by_cost", learning=LossImportance()), problem(), tiny_clients(), tiny_config(rounds=1))
