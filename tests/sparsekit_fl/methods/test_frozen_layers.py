"""Layers whose parameters need no gradient: no method trains, prunes or sends them, and each runs to its end."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from personal import tiny_clients, tiny_config, watched
from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit_fl.methods import cs, fedspa, prunefl, registry
from sparsekit_fl.methods.prunefl import Search
from sparsekit_fl.problem.problem import Problem

METHODS = {
    **{name: make for name, make in registry.items() if make.__module__ != "sparsekit_fl.paper.ablations"},
    "cs-released": partial(cs, variant="released"),
    "prunefl-often": lambda: prunefl(Search(every=2)),
}

BY_ENTRY = {"cs", "cs-released", "fedspa", "lotteryfl", "prunefl", "prunefl-often"}


def _net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_leaves_frozen_layers_alone(name) -> None:
    problem = Problem(model=_net, example_inputs=(torch.zeros(2, 6),))
    result, updates = watched(METHODS[name](), problem=problem)
    assert not any(record.dropped for record in result.rounds)
    frozen = {key for key in result.state if ".".join(key.split(".")[-2:]) in {"2.weight", "2.bias"}}
    assert updates
    for update in updates:
        assert not frozen & set(update.delta)
        assert name not in BY_ENTRY or not frozen & set(update.mask or ())


@pytest.mark.parametrize("make", [cs, fedspa, prunefl, METHODS["lotteryfl"]])
def test_a_model_whose_hidden_layers_are_all_frozen_has_nothing_to_prune(make) -> None:
    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        model[0].requires_grad_(False)
        return model

    problem = Problem(model=frozen, example_inputs=(torch.zeros(2, 6),))
    with pytest.raises(InvalidValueError, match="no weight matrix besides its output layer that trains"):
        watched(make(), problem=problem, clients=tiny_clients(), config=tiny_config())
