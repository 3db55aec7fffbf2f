"""CS: the complement rule on three numbers, what travels, the costs of Table I, and where it becomes something else."""

from __future__ import annotations

import dataclasses

import torch
from personal import STATE, combine, equals, server_context, update, watched

from sparsekit.graph import WeightMask
from sparsekit_fl.methods import cs, fedavg
from sparsekit_fl.methods.cs import ChangeMean, ComplementMean, LargestOnServer
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_config, tiny_problem


def test_the_server_sends_the_largest_weights_from_the_second_round_on() -> None:
    assert LargestOnServer().propose(server_context(round=1), 0, 1 / 3) is None
    mask = LargestOnServer().propose(server_context(round=2), 0, 1 / 3)
    assert mask == WeightMask({"w": torch.tensor([[False, False, True]])})


def test_complements_are_added_at_the_rate_and_the_sum_is_pruned() -> None:
    # The server sent 3 and kept it; both clients fill the other two places, weights 1 and 3.
    state = {**STATE, "w": torch.tensor([[0.0, 0.0, 3.0]])}
    first = update(0, [4.0, 8.0, 0.0], keep=[True, True, False], examples=1, b=1.0)
    second = update(1, [0.0, -4.0, 0.0], keep=[True, True, False], examples=3, b=5.0)
    # Means 1 and -1, times 1.5; the smaller of two equal magnitudes' places wins the second seat.
    found = combine(ComplementMean(ratio=2 / 3), first, second, state=state)
    assert found["w"].tolist() == [[1.5, 0.0, 3.0]]
    # Biases are a plain mean, the output layer is neither pruned nor sped up.
    assert found["b"].tolist() == [14.0]
    assert found["out"].tolist() == [[5.0]]


def test_the_first_round_is_a_plain_mean_and_then_pruned() -> None:
    found = combine(ComplementMean(ratio=1 / 3), update(0, [1.0, 0.0, 4.0]), update(1, [5.0, 4.0, 0.0]))
    assert found["w"].tolist() == [[0.0, 0.0, 5.0]]


def test_the_released_variant_adds_the_mean_change_to_what_was_sent() -> None:
    first, second = update(0, [0.0, 4.0, 0.0], keep=[False, True, False]), update(1, [2.0, 0.0, 0.0], keep=[True, False, False])
    found = combine(ChangeMean(ratio=1 / 3), first, second)
    assert found["w"].tolist() == [[1.0, 2.0, 3.0]]


def test_what_comes_down_and_what_goes_up_are_complements() -> None:
    result, updates = watched(cs(ratio=0.25))
    assert all(item.mask is None for item in updates if item.round == 1)
    later = [item for item in updates if item.round > 1]
    assert all(item.mask.counts() == {"first.weight": 36} for item in later)
    # The global model is the sparse one.
    assert int((result.state["first.weight"] != 0).sum()) == 12
    assert result.state["last.weight"].count_nonzero() == 24


def test_a_run_counts_one_dense_round_and_then_sparse_ones_while_it_computes_densely() -> None:
    config = dataclasses.replace(tiny_config(rounds=3), cohort=4)
    clients = equals()
    result, plain = run(cs(), tiny_problem(), clients, config), run(fedavg(), tiny_problem(), clients, config)
    # 2 · 48 of the hidden matrix, half of them in two rounds out of three; the rest is 8 + 48 + 3.
    assert result.cost.flops_rowmask * 3 * (96 + 59) == plain.cost.flops_rowmask * (3 * 155 - 2 * 48)
    assert result.cost.flops_compact == plain.cost.flops_compact
    assert "no time" in result.note
