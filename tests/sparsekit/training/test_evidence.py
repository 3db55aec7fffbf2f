"""Evidence: what is remembered of units, for how long, and by whom."""

from __future__ import annotations

import torch
from torch import nn

import sparsekit as sk
from sparsekit.training.evidence import Evidence


def _seen() -> Evidence:
    """Evidence about 6 units, of which two samples of kept gates and two of a dropped unit were taken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    graph = sk.trace_units(model, torch.zeros(1, 3))
    evidence = Evidence(graph, torch.zeros(6))
    keep = sk.UnitMask({name: torch.tensor([True, True, True, False, False, False]) for name in graph.groups})
    weights = dict(model.state_dict())
    for sample in range(4):
        evidence.examples(8)
        evidence.add_kept(torch.randn(6))
        for name in graph.groups:
            gradients = {"2.weight": torch.randn(2, 6, generator=torch.Generator().manual_seed(sample))}
            evidence.add_dropped(name, gradients, weights.__getitem__, keep, 1.0)
    return evidence


def test_estimates_stay_while_their_weight_fades() -> None:
    evidence = _seen()
    before = evidence.state()
    evidence.fade(0.5)
    after = evidence.state()
    for kind in ("kept", "as_it_was", "afresh"):
        torch.testing.assert_close(after[kind], 0.5 * before[kind], rtol=0, atol=0)


def test_what_two_ranks_have_seen_together_counts_once_in_the_next_round() -> None:
    evidence = _seen()
    before = evidence.state()
    evidence.ranks = 2  # what pooling leaves: sums over both, in each of them
    evidence.fade(1.0)
    after = evidence.state()
    torch.testing.assert_close(after["kept"], before["kept"], rtol=0, atol=0)
    for kind in ("as_it_was", "afresh"):
        torch.testing.assert_close(2.0 * after[kind], before[kind], rtol=0, atol=0)


def test_units_that_came_or_went_are_forgotten_and_their_neighbours_are_not() -> None:
    evidence = _seen()
    before = evidence.state()["kept"]
    evidence.forget_units(torch.tensor([1, 4]))
    after = evidence.state()["kept"]
    assert not after[:, [1, 4]].any()
    torch.testing.assert_close(after[:, [0, 2, 3, 5]], before[:, [0, 2, 3, 5]], rtol=0, atol=0)
