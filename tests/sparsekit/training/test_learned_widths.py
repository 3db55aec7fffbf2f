"""A learnable mask with a budget: widths of all groups, one cost."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import sparsekit as sk
from sparsekit.errors import InvalidValueError


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 20), nn.ReLU(), nn.Linear(20, 4),
    ).double()  # fmt: skip


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 3, 8, 8, dtype=torch.float64, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0].std((1, 2)) > 1).long()


@pytest.mark.parametrize("share", [60, 30, 12])
@pytest.mark.parametrize("metric", ["flops", "params"])
@pytest.mark.same_bits
def test_widths_move_and_the_budget_holds_at_every_step(metric: str, share: int) -> None:
    model, (x, y) = _model(), _data()
    learning = sk.LossImportance(explore=1.0, samples_per_unit=4, num_std_errors=0.0)
    budget = sk.Budget(**{metric: f"{share}%"})
    masked = sk.LearnableMask(model, (x,), budget=budget, learning=learning)
    costs = sk.cost_model(model, x, graph=masked.graph)
    limit = budget.limits(costs.costs({name: group.size for name, group in masked.graph.groups.items()}))[metric]
    optimizer = torch.optim.Adam(masked.parameters(), lr=0.01)
    first = masked.unit_mask().counts()
    moved = False
    for _ in range(60):
        loss = F.cross_entropy(masked(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert costs.costs(masked.unit_mask().counts())[metric] <= limit
        moved = moved or masked.unit_mask().counts() != first
    # On smaller shares of the FLOPs the first widths of this model are also the last.
    assert moved == (share == 60 or (metric, share) == ("params", 30))
    twin = sk.LearnableMask(model, (x,), budget=budget, learning=learning)
    twin.load_state_dict(masked.state_dict())
    assert twin.unit_mask() == masked.unit_mask()
    assert torch.equal(twin(x), masked(x))
    small = masked.eval().compact()
    torch.testing.assert_close(small(x), masked(x))


def test_inputs_may_have_the_names_of_options_of_the_cost_model() -> None:
    model = zoo.Lambda(lambda m, graph, rules: m.b(m.a(graph + rules).relu()), a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    inputs = {"graph": torch.randn(2, 4), "rules": torch.randn(2, 4)}
    assert sum(sk.LearnableMask(model, inputs, budget="params=50%").unit_mask()["a"]) == 3
    assert sum(sk.prune(model, inputs, budget="params=50%").mask["a"]) == 3


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ("together with explore", {"learning": sk.LossImportance(), "explore": 0.1}),
        ("together with explore, steps", {"learning": sk.GradientImportance(), "explore": 0.0, "steps": 100}),
        ("learning must be LossImportance", {"learning": sk.LossImportance}),
        ("not both", {"ratio": 0.5, "budget": "flops=50%"}),
        ("widths would never move; use learning=Loss", {"budget": "flops=50%", "learning": sk.GradientImportance()}),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(told: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=told):
        sk.LearnableMask(_model(), (_data()[0],), **options)
