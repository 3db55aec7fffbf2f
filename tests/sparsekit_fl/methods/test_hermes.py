"""Hermes: subnetworks shrink by units and train small, under a lasso whose gradient is autograd's."""

import pytest
import torch
from personal import client_context
from torch import nn

from sparsekit.allocation import make_mask
from sparsekit.criteria import Ordered, ScoringContext
from sparsekit_fl.methods import hermes
from sparsekit_fl.methods.client import load_leaves
from sparsekit_fl.methods.personal_masks import _group_lasso
from sparsekit_fl.problem.problem import Problem


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
    mask = make_mask(Ordered(), spec.graph, ratio, ScoringContext())
    leaves = load_leaves(ctx, spec.initial, mask)
    adjust = _group_lasso(ctx, leaves, 0.3)
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
