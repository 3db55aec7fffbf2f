"""CS, FedSpa and LotteryFL: their rules on three numbers, what travels, their costs, and how masks live on."""

import itertools
import math

import pytest
import torch
from personal import STATE, client_context, deep_problem, server_context, update, watched

from sparsekit.graph import WeightMask
from sparsekit_fl.methods import cs, fedspa, lotteryfl
from sparsekit_fl.methods.client import Task
from sparsekit_fl.methods.personal_masks import move_mask
from sparsekit_fl.testing import tiny_config


def test_the_server_sends_the_largest_weights_from_the_second_round_on() -> None:
    assert cs(ratio=1 / 3).assign(server_context(round=1), 0).mask is None
    mask = cs(ratio=1 / 3).assign(server_context(round=2), 0).mask
    assert mask == WeightMask({"w": torch.tensor([[False, False, True]])})


def test_complements_are_added_at_the_rate_and_the_sum_is_pruned() -> None:
    # The server sent 3 and kept it; both clients fill the other two places, weights 1 and 3.
    state = {**STATE, "w": torch.tensor([[0.0, 0.0, 3.0]])}
    first = update(0, [4.0, 8.0, 0.0], keep=[True, True, False], examples=1, b=1.0)
    second = update(1, [0.0, -4.0, 0.0], keep=[True, True, False], examples=3, b=5.0)
    # Means 1 and -1, times 1.5; the smaller of two equal magnitudes' places wins the second seat.
    found = cs(ratio=2 / 3).aggregate(server_context(state=state), [first, second])
    assert found["w"].tolist() == [[1.5, 0.0, 3.0]]
    # Biases are a plain mean, the output layer is neither pruned nor sped up.
    assert found["b"].tolist() == [14.0]
    assert found["out"].tolist() == [[5.0]]


def test_the_first_round_is_a_plain_mean_and_then_pruned() -> None:
    found = cs(ratio=1 / 3).aggregate(server_context(), [update(0, [1.0, 0.0, 4.0]), update(1, [5.0, 4.0, 0.0])])
    assert found["w"].tolist() == [[0.0, 0.0, 5.0]]


def test_what_comes_down_and_what_goes_up_are_complements() -> None:
    result, updates = watched(cs(ratio=0.25))
    assert all(item.mask is None for item in updates if item.round == 1)
    later = [item for item in updates if item.round > 1]
    assert all(item.mask.counts() == {"first.weight": 36} for item in later)
    # The global model is the sparse one.
    assert int((result.state["first.weight"] != 0).sum()) == 12
    assert result.state["last.weight"].count_nonzero() == 24


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


@pytest.mark.same_bits
def test_a_client_that_pruned_starts_from_round_0_and_others_from_the_global_values() -> None:
    mask = WeightMask({"0.weight": torch.arange(48).view(8, 6) % 2 == 0})

    def fit(factor, *, pruned):
        spec, _, ctx = client_context(lotteryfl(), deep_problem(), round=3)
        state = {name: factor * tensor for name, tensor in spec.initial.items()}
        return spec.method.fit(ctx, Task(state=state, mask=mask), pruned=pruned).state

    rewound, initial, onward = fit(2, pruned=True), fit(1, pruned=False), fit(2, pruned=False)
    assert all(torch.equal(rewound[name], tensor) for name, tensor in initial.items())
    assert not torch.equal(onward["4.bias"], rewound["4.bias"])
    assert not bool(rewound["0.weight"][~mask["0.weight"]].any())


@pytest.mark.parametrize("right", [True, False])
def test_the_received_model_decides_on_validation_data_whether_a_client_prunes(right) -> None:
    spec, client, ctx = client_context(lotteryfl(threshold=0.4))
    label = int(client.data.val.targets.mode().values)
    label = label if right else (label + 1) % 3
    state = {name: tensor.clone() for name, tensor in spec.initial.items()}
    state["last.bias"] = 100.0 * torch.nn.functional.one_hot(torch.tensor(label), 3)
    result = spec.method.train(ctx, Task(state=state))
    assert float((client.data.val.targets == label).float().mean() > 0.4) == right
    assert (result.mask is not None) == right
    assert result.ratio == (0.9 if right else 1.0)


@pytest.mark.parametrize(("method", "entry", "count"), [("lotteryfl", "first.weight", 48), ("hermes", "first", 8)])
def test_tickets_and_subnetworks_only_shrink_and_stop_at_the_target(method, entry, count) -> None:
    _, updates = watched(f"{method} threshold=0.0", rounds=20)
    assert min(item.ratio for item in updates) == pytest.approx(0.9**7)
    for client_id in range(8):
        history = [item for item in updates if item.client_id == client_id]
        # A participation prunes a tenth of what is left or nothing, and nothing below one half.
        for before, after in itertools.pairwise([1.0, *(item.ratio for item in history)]):
            assert after in (before, pytest.approx(0.9 * before))
            assert after == before or before > 0.5
        masks = [item.mask for item in history if item.mask]
        assert all(item.mask.counts() == {entry: math.ceil(item.ratio * count - 1e-9)} for item in history if item.mask)
        for before, after in itertools.pairwise(masks):
            assert not bool((after[entry] & ~before[entry]).any())
