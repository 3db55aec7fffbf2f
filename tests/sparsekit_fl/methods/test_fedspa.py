"""FedSpa: masks of constant size that move by magnitude and gradient, one initial mask for all."""

from __future__ import annotations

import math

import torch
from personal import combine, deep_problem, update, watched

from sparsekit.graph import WeightMask
from sparsekit_fl.methods import fedspa, with_settings
from sparsekit_fl.methods.fedspa import move_mask
from sparsekit_fl.policies.aggregate import Mean
from sparsekit_fl.testing import tiny_config


def test_an_entry_moves_by_the_sum_of_changes_over_all_clients() -> None:
    first = update(0, [1.0, 0.0, 4.0], keep=[True, False, True], examples=1)
    second = update(1, [5.0, 0.0, 0.0], keep=[True, False, False], examples=9)
    assert combine(Mean("uniform", over="all"), first, second)["w"].tolist() == [[4.0, 2.0, 5.0]]


def test_a_move_by_hand() -> None:
    mask = WeightMask({"w": torch.tensor([True, True, True, True, False, False])})
    weights = {"w": torch.tensor([0.1, -0.4, 0.3, -0.2, 0.0, 0.0])}
    gradients = {"w": torch.tensor([0.0, 9.0, 9.0, 1.0, 3.0, -2.0])}
    # Two of four go, the smallest; of the four that are out, those of largest gradient come.
    assert move_mask(mask, weights, gradients, 0.5)["w"].tolist() == [False, True, True, False, True, True]
    # One that went comes back where its gradient is large.
    gradients = {"w": torch.tensor([7.0, 0.0, 0.0, 1.0, 3.0, -2.0])}
    assert move_mask(mask, weights, gradients, 0.5)["w"].tolist() == [True, True, True, False, True, False]
    assert move_mask(mask, weights, gradients, 0.0) == mask


def test_masks_keep_their_size_per_layer_and_move_less_and_less() -> None:
    config = tiny_config(rounds=12)
    _, updates = watched(fedspa(), problem=deep_problem(), config=config)
    sizes = {name: int(keep.sum()) for name, keep in updates[0].mask.items()}
    assert set(sizes) == {"0.weight", "2.weight"}
    # Half of 48 + 64 weights, rounded up in each layer.
    assert 56 <= sum(sizes.values()) <= 58
    assert all({name: int(keep.sum()) for name, keep in item.mask.items()} == sizes for item in updates)
    first = updates[0].mask
    assert all(item.mask == first for item in updates if item.round == 1)
    last = {}
    for item in updates:
        if item.client_id in last:
            before, round = last[item.client_id]
            share = 0.25 * (1 + math.cos(math.pi * (round - 1) / 12))
            for name, keep in item.mask.items():
                changed = int((keep & ~before[name]).sum())
                assert changed <= math.ceil(share * sizes[name])
        last[item.client_id] = (item.mask, item.round)
    assert any(mask != first for mask, _ in last.values())


def test_static_masks_stay_as_they_were_drawn() -> None:
    _, updates = watched(with_settings(fedspa(), {"local.anneal": 0.0}))
    assert all(item.mask == updates[0].mask for item in updates)
    assert all("next_mask" not in item.extra for item in updates)


def test_dropped_entries_are_zero_while_training_and_in_personal_models() -> None:
    _, updates = watched(with_settings(fedspa(), {"local.anneal": 0.0}), problem=deep_problem())
    kept = {name: int(keep.sum()) for name, keep in updates[0].mask.items()}
    assert all(item.delta[name].shape == (size,) for item in updates for name, size in kept.items())
