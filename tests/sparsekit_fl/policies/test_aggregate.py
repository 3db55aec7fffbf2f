"""Means, robust rules and server optimisers on a model of three numbers, exactly; then in runs and across a resume."""

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from personal import server_context, tiny_run

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph, UnitGroup, UnitMask, UnitSlice, WeightMask
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.policies import AggregatePolicy, Assignment, Mean, Update
from sparsekit_fl.policies import aggregate as combining
from sparsekit_fl.policies.aggregate import Changes, Counted, mean, median, norm_clipped, trimmed, trimmed_mean, update_norm
from sparsekit_fl.policies.server_optimizer import ServerOptimizer
from sparsekit_fl.testing import tiny_config

INDEX = torch.arange(3).view(3, 1)
GRAPH = UnitGraph(
    groups={"a": UnitGroup("a", 3, "feature", (UnitSlice("w", 0, INDEX, "out", False),))},
    shapes={"w": torch.Size([3]), "n": torch.Size([])},
)
STATE = {"w": torch.zeros(3), "n": torch.tensor(10)}


def update(client_id, delta, *, keep=None, examples=1, count=0):
    mask = None if keep is None else UnitMask({"a": torch.tensor(keep)})
    kept = Kept(GRAPH, mask)
    entries = {"w": kept.gather("w", torch.tensor(delta)), "n": torch.tensor(count)}
    return Update(round=1, client_id=client_id, examples=examples, delta=entries, mask=mask)


def trim(share):
    return partial(trimmed_mean, share=share)


def clip(limit):
    return partial(norm_clipped, limit=limit)


def combine(policy, rule, updates, state=STATE):
    return policy.combine(server_context(graph=GRAPH, state=STATE), state, [(item, 0) for item in updates], rule)


START = {"w": torch.tensor([1.0, 2.0, 3.0]), "n": torch.tensor(10)}
UNIFORM = Mean("uniform", over="all")
ALL, HOLDERS, BY_EXAMPLES = Mean(over="all"), Mean("uniform", over="holders"), Mean("examples", over="holders")
SIZES = [update(0, [1.0, 0.0, 4.0], examples=1), update(1, [5.0, 4.0, 0.0], examples=3)]
DISJOINT = [update(0, [2.0, 0.0, 0.0], keep=[True, False, False]), update(1, [0.0, 4.0, 0.0], keep=[False, True, False])]
ALIKE = [update(k, [2.0 + k, 8.0, 4.0 - k], keep=[True, False, True]) for k in range(2)]
UNEVEN = [
    update(0, [1.0, 3.0, 0.0], keep=[True, True, False], examples=1),
    update(1, [5.0, 0.0, 0.0], keep=[True, False, False], examples=3),
]
ALONE = [
    update(0, [1.0, 0.0, 0.0], keep=[True, False, False], examples=3),
    update(1, [0.0, 4.0, 0.0], keep=[False, True, False], examples=1),
]
BY_ENTRY = Update(
    round=1,
    client_id=0,
    examples=1,
    mask=WeightMask({"w": torch.tensor([False, True, True])}),
    delta={"w": torch.tensor([3.0, 5.0]), "n": torch.tensor(0)},
)


@pytest.mark.parametrize(
    ("policy", "updates", "expected"),
    [
        (Mean(), SIZES, [5.0, 5.0, 4.0]),
        (Mean("uniform"), SIZES, [4.0, 4.0, 5.0]),
        (ALL, ALIKE, [3.5, 2.0, 6.5]),
        (HOLDERS, ALIKE, [3.5, 2.0, 6.5]),
        (HOLDERS, DISJOINT, [3.0, 6.0, 3.0]),
        (ALL, DISJOINT, [2.0, 4.0, 3.0]),
        (BY_EXAMPLES, UNEVEN, [5.0, 5.0, 3.0]),
        (BY_EXAMPLES, ALONE, [2.0, 6.0, 3.0]),  # a holder of few examples counts in full where it is alone
        (HOLDERS, [update(0, [2.0] * 3), update(1, [4.0, 0.0, 0.0], keep=[True, False, False])], [4.0, 4.0, 5.0]),
        (HOLDERS, [BY_ENTRY, update(1, [1.0, 1.0, 1.0])], [2.0, 4.0, 6.0]),
    ],
)
def test_a_mean_is_over_all_clients_or_the_holders_alike_or_by_examples(policy, updates, expected):
    assert combine(policy, mean, updates, START)["w"].tolist() == expected


def test_a_mean_of_whole_entries_refuses_masked_updates():
    ctx, masked = server_context(graph=GRAPH, state=START), update(0, [1.0, 1.0, 1.0], keep=[True, False, True])
    with pytest.raises(fl.errors.UpdateError, match=r'choose Mean\(over="all"\)'):
        Mean().validate(ctx, masked, Assignment(round=1, client_id=0, state=START))
    for policy in (ALL, HOLDERS):
        policy.validate(ctx, masked, Assignment(round=1, client_id=0, state=START))


@pytest.mark.same_bits
def test_a_full_mask_gives_the_bits_of_no_mask():
    deltas = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32).tolist()
    plain = combine(Mean(), mean, [update(k, delta, examples=7) for k, delta in enumerate(deltas)], START)
    for policy in (ALL, Mean("uniform", over="all"), HOLDERS, BY_EXAMPLES):
        masked = [update(k, delta, keep=[True] * 3, examples=7) for k, delta in enumerate(deltas)]
        assert torch.equal(combine(policy, mean, masked, START)["w"], plain["w"])


@pytest.mark.parametrize(("counts", "expected"), [((1, 2, 2), 12), ((1, 1, 2), 11), ((1, 4), 12), ((3, 4), 14)])
def test_integer_entries_are_rounded_to_the_nearest_and_halves_to_even(counts, expected):
    result = combine(Mean(), mean, [update(k, [0.0, 0.0, 0.0], count=count) for k, count in enumerate(counts)])
    assert result["n"].item() == expected
    assert result["n"].dtype == torch.int64


def column(*values):
    """One update per value, whose three entries are the value, its double and its negative."""
    return [update(k, [value, 2 * value, -value]) for k, value in enumerate(values)]


def test_the_number_that_is_trimmed_is_rounded_up_and_leaves_one_or_two():
    assert [trimmed(0.2, holders) for holders in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert [trimmed(0.49, holders) for holders in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert [trimmed(0.0, holders) for holders in range(7)] == [0] * 7
    assert trimmed(0.1, 30) == 3


HELD = [
    update(0, [1.0, 8.0, 0.0], keep=[True, True, False], examples=5),
    update(1, [3.0, 0.0, 0.0], keep=[True, False, False], examples=50),
    update(2, [50.0, 4.0, 0.0], keep=[True, True, False]),
]


ODD = [update(0, [3.0, 4.0, 0.0]), update(1, [0.0, 0.0, 1.0]), update(2, [600.0, 0.0, 800.0])]


@pytest.mark.parametrize(
    ("policy", "rule", "updates", "expected"),
    [
        (Mean(), median, column(1.0, 900.0, 2.0), [2.0, 4.0, -2.0]),
        (Mean(), median, column(1.0, 900.0, 2.0, 4.0), [3.0, 6.0, -3.0]),
        (Mean(), trim(0.2), column(-500.0, 1.0, 2.0, 6.0, 900.0), [3.0, 6.0, -3.0]),
        (Mean(), trim(0.0), column(1.0, 2.0, 6.0), [3.0, 6.0, -3.0]),
        # Of three holders the middle; of two the mean, since nobody can tell which of them lies; of none nothing.
        *((Mean("examples", over="holders"), rule, HELD, [3.0, 6.0, 0.0]) for rule in (median, trim(0.2))),
        *((HOLDERS, rule, DISJOINT, [2.0, 4.0, 0.0]) for rule in (median, trim(0.2))),
        # Where the mean is over all clients, a centre counts as its holders do.
        *((ALL, rule, HELD, [3.0, 4.0, 0.0]) for rule in (median, trim(0.2))),
        # Entries of a weight mask vote one by one.
        (HOLDERS, median, [BY_ENTRY, update(1, [1.0] * 3), update(2, [7.0, 2.0, 90.0])], [4.0, 2.0, 5.0]),
        # Norms 5, 1, 1000: clipped at their median, the third shrinks to (3, 0, 4); at a given value, weights stay.
        (Mean(), clip(None), ODD, [2.0, 4 / 3, 5 / 3]),
        (Mean(), clip(2.5), [replace(ODD[0], examples=3), ODD[1]], [1.125, 1.5, 0.25]),
        # Without trimming it is the uniform mean of either kind.
        *((policy, trim(0.0), HELD, combine(policy, mean, HELD)["w"].tolist()) for policy in (UNIFORM, HOLDERS)),
    ],
)
def test_a_robust_rule_is_over_those_who_hold_an_entry(policy, rule, updates, expected):
    assert combine(policy, rule, updates)["w"].tolist() == pytest.approx(expected)


def test_integers_are_voted_on_too():
    counts = [update(k, [0.0, 0.0, 0.0], count=count) for k, count in enumerate((5, 7, 2**31))]
    for rule in (median, trim(0.2), clip(None)):
        result = combine(Mean(), rule, counts)["n"]
        assert result.item() == 17
        assert result.dtype == torch.int64


def test_a_norm_is_over_all_floating_entries_and_no_others():
    assert update_norm(update(0, [3.0, 4.0, 0.0], count=10**6).delta) == 5.0
    assert update_norm(update(0, [3.0, 4.0, 12.0], keep=[True, True, False]).delta) == 5.0


def test_a_policy_that_adds_up_by_itself_is_refused_and_not_silently_left_out():
    @dataclass(frozen=True)
    class Own(AggregatePolicy):
        def combine(self, ctx, state, arrivals, rule=mean):
            return {name: tensor + arrivals[0][0].delta[name] for name, tensor in state.items()}

    config = replace(tiny_config(rounds=1), aggregation="median")
    with pytest.raises(InvalidValueError, match="does not reach all that Own"):
        tiny_run(fl.Method(name="own", source="", aggregate=Own()), config=config)


@pytest.mark.parametrize("clients", [3, 5, 8, 40])
@pytest.mark.parametrize("rule", [mean, median, trim(0.1), clip(None)])
@pytest.mark.same_bits
def test_an_entry_does_not_depend_on_those_beside_it(rule, clients, monkeypatch):
    """Sums over clients are taken in one order, whatever the width and the processor."""
    numbers = torch.from_numpy(np.random.default_rng(clients).normal(size=(clients, 90)))
    state = {"w": torch.zeros(90, dtype=torch.float64)}
    graph = UnitGraph({}, {"w": torch.Size([90])})
    updates = [Counted({"w": row}, Kept(graph, None), 1.0) for row in numbers]
    whole = rule(state, updates, "whole").changes["w"]
    for size in (1, 7, 20):
        monkeypatch.setattr(combining, "_CHUNK", size)
        assert torch.equal(rule(state, updates, "whole").changes["w"], whole)


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "cs"])
@pytest.mark.same_bits
def test_entries_in_pieces_give_the_same_bits_as_whole_ones(method, monkeypatch):
    config = dataclasses.replace(tiny_config(rounds=1), aggregation="trimmed-mean")
    digests = []
    for size in (2**18, 20):
        monkeypatch.setattr(combining, "_CHUNK", size)
        digests.append(tiny_run(method, config=config).final.state_sha256)
    assert digests[0] == digests[1]


THREE = UnitGraph(groups={}, shapes={"w": torch.Size([3])})


def optimizer(memory, **options):
    return ServerOptimizer(fl.RunConfig(rounds=1, **options), memory, frozenset({"w"}))


def moved(memory, change, *, mask=None, **options):
    """One round in which one update holds what `mask` keeps."""
    combined = torch.tensor(change, dtype=torch.float64)
    update = Counted({"w": combined}, Kept(THREE, mask), 1.0)
    found = optimizer(memory, **options).moved(Changes({"w": combined}, {}), [update])
    return found.changes["w"].tolist()


def test_fedavgm_adds_the_velocity():
    memory = {}
    options = {"server_optimizer": "fedavgm", "server_lr": 2.0, "server_momentum": 0.5}
    assert moved(memory, [1.0, 2.0, 0.0], **options) == [2.0, 4.0, 0.0]
    assert moved(memory, [1.0, 0.0, 4.0], **options) == [2.0 * 1.5, 2.0 * 1.0, 8.0]


@pytest.mark.parametrize(
    ("kind", "squares"),
    [
        # v of two rounds with Δ = 1 and then Δ = 3, from τ² = 0.25.
        ("fedadagrad", (0.25 + 1, 0.25 + 1 + 9)),
        ("fedadam", (0.9 * 0.25 + 0.1 * 1, 0.9 * (0.9 * 0.25 + 0.1) + 0.1 * 9)),
        ("fedyogi", (0.25 + 0.1 * 1, 0.25 + 0.1 + 0.1 * 9)),
    ],
)
def test_the_adaptive_three_are_those_of_the_paper(kind, squares):
    memory = {}
    options = {"server_optimizer": kind, "server_lr": 0.1, "server_momentum": 0.5, "server_tau": 0.5}
    options |= {} if kind == "fedadagrad" else {"server_beta2": 0.9}  # it sums squares, and has no β₂
    first = 0.1 * (0.5 * 1) / (math.sqrt(squares[0]) + 0.5)
    second = 0.1 * (0.5 * 0.5 + 0.5 * 3) / (math.sqrt(squares[1]) + 0.5)
    assert moved(memory, [1.0, 1.0, 1.0], **options) == pytest.approx([first] * 3, rel=1e-15)
    assert moved(memory, [3.0, 3.0, 3.0], **options) == pytest.approx([second] * 3, rel=1e-15)


def test_yogi_lets_the_square_sink_where_changes_are_small():
    memory = {}
    options = {"server_optimizer": "fedyogi", "server_momentum": 0.0, "server_beta2": 0.9, "server_tau": 1.0}
    moved(memory, [0.5, 0.5, 0.5], **options)
    assert memory["square"]["w"].tolist() == pytest.approx([1.0 - 0.1 * 0.25] * 3)


def test_entries_that_nobody_held_stay_and_keep_their_state():
    memory = {}
    options = {"server_optimizer": "fedadam", "server_lr": 1.0, "server_tau": 0.5}
    moved(memory, [1.0, 1.0, 1.0], **options)
    before = {what: memory[what]["w"].clone() for what in ("momentum", "square")}
    mask = WeightMask({"w": torch.tensor([True, False, True])})
    found = moved(memory, [1.0, 0.0, 0.0], mask=mask, **options)
    assert found[1] == 0.0
    assert found[0] > 0
    assert found[2] > 0, "it was held and did not change: the momentum goes on"
    for what, tensor in before.items():
        assert memory[what]["w"][1] == tensor[1]
        assert memory[what]["w"][2] != tensor[2]


def test_buffers_take_the_change_as_it_is():
    one = ServerOptimizer(fl.RunConfig(rounds=1, server_optimizer="fedadam"), {}, frozenset())
    change = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = Changes({"norm.running_mean": change}, {})
    update = Counted(found.changes, Kept(THREE, None), 1.0)
    assert one.moved(found, [update]).changes["norm.running_mean"] is change


@pytest.mark.same_bits
def test_a_rate_of_one_without_momentum_gives_the_bits_of_fedavg():
    plain = tiny_run().final.state_sha256
    assert tiny_run(server_optimizer="fedavgm", server_momentum=0.0, server_lr=1.0).final.state_sha256 == plain
    assert tiny_run(server_lr=0.5).final.state_sha256 != plain
