"""LotteryFL: tickets only shrink, rewind exactly when they shrink, and are averaged over their holders."""

from __future__ import annotations

import itertools

import pytest
import torch
from personal import client_context, combine, deep_problem, update, watched

from sparsekit.graph import WeightMask
from sparsekit_fl.methods import lotteryfl, with_settings
from sparsekit_fl.policies.aggregate import Mean
from sparsekit_fl.policies.mask import weight_count
from sparsekit_fl.testing import tiny_config


def test_entries_are_averaged_over_their_holders_alone() -> None:
    first = update(0, [1.0, 0.0, 4.0], keep=[True, False, True], examples=1, b=2.0)
    second = update(1, [5.0, 0.0, 0.0], keep=[True, False, False], examples=9, b=4.0)
    found = combine(Mean("uniform", over="holders"), first, second)
    assert found["w"].tolist() == [[4.0, 2.0, 7.0]]
    assert found["b"].tolist() == [13.0]


def by_client(updates):
    found = {}
    for item in updates:
        found.setdefault(item.client_id, []).append(item)
    return found


def test_tickets_are_monotone_and_stop_at_the_target() -> None:
    _, updates = watched(with_settings(lotteryfl(), {"mask.threshold": 0.0}), config=tiny_config(rounds=20))
    assert min(item.ratio for item in updates) == pytest.approx(0.9**7)
    for history in by_client(updates).values():
        assert [int(item.mask["first.weight"].sum()) for item in history if item.mask] == [
            weight_count(item.ratio, 48) for item in history if item.mask
        ]
        # A participation prunes a tenth of what is left or nothing, and nothing below one half.
        steps = zip([1.0, *(item.ratio for item in history)], (item.ratio for item in history), strict=False)
        assert all(
            after in (before, pytest.approx(0.9 * before)) and (after == before or before > 0.5) for before, after in steps
        )
        history = [item for item in history if item.mask]
        for before, after in itertools.pairwise(history):
            assert not bool((after.mask["first.weight"] & ~before.mask["first.weight"]).any())
        assert all("last.weight" not in item.mask for item in history)


def trained(*, received, mask, state):
    spec, _, ctx = client_context(lotteryfl(), deep_problem(), round=3, received=received)
    return spec, spec.method.local.train(ctx, state(spec), mask, 1.0)


@pytest.mark.same_bits
def test_a_client_that_pruned_starts_from_round_0_and_others_from_the_global_values() -> None:
    keep = torch.arange(48).view(8, 6) % 2 == 0
    mask = WeightMask({"0.weight": keep})

    def doubled(spec):
        return {name: 2 * tensor for name, tensor in spec.initial.items()}

    spec, rewound = trained(received=None, mask=mask, state=doubled)
    _, expected = trained(received=mask, mask=mask, state=lambda spec: spec.initial)
    assert all(torch.equal(rewound.state[name], expected.state[name]) for name in spec.initial)
    _, onward = trained(received=mask, mask=mask, state=doubled)
    assert not torch.equal(onward.state["4.bias"], rewound.state["4.bias"])
    assert not bool(rewound.state["0.weight"][~keep].any())


@pytest.mark.same_bits
def test_without_rewinding_a_client_that_pruned_goes_on_from_the_global_values() -> None:
    mask = WeightMask({"0.weight": torch.arange(48).view(8, 6) % 2 == 0})
    found = []
    for received in (None, mask):
        spec, _, ctx = client_context(
            with_settings(lotteryfl(), {"local.rewind": False}), deep_problem(), round=3, received=received
        )
        state = {name: 2 * tensor for name, tensor in spec.initial.items()}
        found.append(spec.method.local.train(ctx, state, mask, 1.0).state)
    assert all(torch.equal(found[0][name], found[1][name]) for name in state)


def test_the_gate_asks_the_received_model_on_validation_data() -> None:
    for shift, pruned in ((0.0, None), (100.0, True)):
        spec, client, ctx = client_context(with_settings(lotteryfl(), {"mask.threshold": 0.4}), kind="mask")
        label = int(client.data.val.targets.mode().values)
        state = {name: tensor.clone() for name, tensor in spec.initial.items()}
        state["last.bias"] = torch.zeros(3)
        state["last.bias"][label if shift else (label + 1) % 3] = 100.0
        share = float((client.data.val.targets == (label if shift else (label + 1) % 3)).float().mean())
        mask = spec.method.mask.choose(ctx, 1.0, state)
        assert (mask is not None) == (share > 0.4)
        assert pruned is None or share > 0.4
