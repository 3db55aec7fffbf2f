"""Hermes: subnetworks shrink by units and train small, under a lasso whose gradient is autograd's."""

from __future__ import annotations

import itertools

import pytest
import torch
from personal import client_context, watched
from torch import nn

from sparsekit import load_compact, load_mask, trace_units
from sparsekit.allocation import select
from sparsekit.allocation.shares import keep_count
from sparsekit.criteria import Magnitude, Ordered, View
from sparsekit.graph import UnitMask
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.methods import hermes, with_settings
from sparsekit_fl.methods.hermes import GroupLassoSgd
from sparsekit_fl.policies.local import load_leaves
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.testing import TinyNet, tiny_config, tiny_problem


def test_subnetworks_are_monotone_and_stop_at_the_target() -> None:
    _, updates = watched(with_settings(hermes(), {"mask.threshold": 0.0}), config=tiny_config(rounds=20))
    histories = {}
    for item in updates:
        histories.setdefault(item.client_id, []).append(item)
    assert min(item.ratio for item in updates) == pytest.approx(0.9**7)
    for history in histories.values():
        history = [item for item in history if item.mask is not None]
        assert all(isinstance(item.mask, UnitMask) for item in history)
        assert [item.mask.counts() for item in history] == [{"first": keep_count(item.ratio, 8)} for item in history]
        for before, after in itertools.pairwise(history):
            assert not bool((after.mask["first"] & ~before.mask["first"]).any())


def test_the_first_pruning_keeps_the_units_of_largest_norm() -> None:
    _, updates = watched(with_settings(hermes(), {"mask.threshold": 0.0}), config=tiny_config(rounds=1))
    spec = RunSpec.build(hermes(), tiny_problem(), tiny_config())
    expected = select(Magnitude(), spec.graph, 0.9, View(weights=spec.initial))
    pruned = [item for item in updates if item.mask is not None]
    assert pruned
    assert all(item.mask == expected for item in pruned)


def test_personal_models_are_compact_and_hold_global_values(tmp_path) -> None:
    result, updates = watched(with_settings(hermes(), {"mask.threshold": 0.0}), config=tiny_config(rounds=8), out=tmp_path)
    last = {item.client_id: item.mask for item in updates if item.mask is not None}
    assert last
    for client_id, mask in last.items():
        path = tmp_path / "models" / f"client-{client_id}.safetensors"
        small = load_compact(path, TinyNet)
        assert load_mask(path, trace_units(TinyNet(), torch.zeros(2, 6))) == mask
        assert torch.equal(small.first.weight, result.state["first.weight"][mask["first"]])
        assert torch.equal(small.last.weight, result.state["last.weight"][:, mask["first"]])


class Mixed(nn.Module):
    """A convolution, a recurrent layer and a linear one: three kinds of units, one with four gate rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.hidden = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.last(torch.relu(self.hidden(self.lstm(x)[0][:, -1])))


def mixed() -> Problem:
    return Problem(model=Mixed, example_inputs=(torch.zeros(2, 1, 2, 4),))


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_lassos_gradient_is_autograds(ratio) -> None:
    spec, _, ctx = client_context(hermes(), mixed())
    mask = select(Ordered(), spec.graph, ratio, View())
    leaves = load_leaves(ctx, spec.initial, mask)
    lasso = GroupLassoSgd(lasso=0.3)
    (adjust,) = lasso.adjusts(ctx, leaves, mask)
    with torch.no_grad():
        changed = adjust({leaf: torch.zeros_like(leaf) for leaf in leaves.values()})
    found = {name: changed[leaf] for name, leaf in leaves.items()}
    # Against the plain definition on the narrow tensors, unit by unit.
    penalty = torch.zeros(())
    for group, count in mask.counts().items():
        pieces = [p for p in spec.graph.groups[group].slices if p.side == "out" and spec.initial[p.name].dim() > 1]
        for unit in range(count):
            square = torch.zeros(())
            for piece in pieces:
                span = piece.span
                rows = [block * count + unit for block in range(span)]
                square = square + leaves[piece.name].index_select(piece.dim, torch.tensor(rows)).square().sum()
            penalty = penalty + square.sqrt()
    wanted = torch.autograd.grad(0.3 * penalty, list(leaves.values()), allow_unused=True)
    for (name, ours), theirs in zip(found.items(), wanted, strict=True):
        assert torch.allclose(ours, torch.zeros_like(ours) if theirs is None else theirs, atol=1e-6), name
    assert any(theirs is not None for theirs in wanted)
