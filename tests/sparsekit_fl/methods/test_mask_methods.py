"""CS, PruneFL, FedSpa, LotteryFL and Hermes: how weights are chosen, rules on three numbers, how masks live on."""

import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from personal import ONE_STEP, STATE, client_context, deep_problem, server_context, tiny_run, training, update, watched
from zoo import ZOO

from sparsekit.allocation import make_mask
from sparsekit.criteria import Ordered, ScoringContext
from sparsekit.graph import WeightMask
from sparsekit_fl.methods import cs, fedspa, hermes, lotteryfl, prunefl
from sparsekit_fl.methods.client import Task, load
from sparsekit_fl.methods.personal_masks import _group_lasso, layer_densities, move_mask
from sparsekit_fl.methods.weight_masks import keep_largest, largest_weights, search_weights, weight_count, weight_seconds
from sparsekit_fl.problem.data import Capability
from sparsekit_fl.problem.models import NextWordLstm
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import tiny_config, tiny_problem

WEIGHTS = {"w": torch.tensor([[1.0, -3.0, 2.0], [0.5, 3.0, -2.0]]), "b": torch.tensor([9.0, 9.0])}


def test_pruning_again_stays_within_what_is_left():
    first = largest_weights(WEIGHTS, ["w"], 0.5)
    changed = {"w": torch.tensor([[8.0, 1.0, 2.0], [8.0, 3.0, 8.0]])}
    assert largest_weights(changed, ["w"], 0.3, within=first)["w"].tolist() == [[False, False, True], [False, True, False]]
    # No more can stay than are alive.
    assert largest_weights(changed, ["w"], 1.0, within=first)["w"].tolist() == first["w"].tolist()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0.001, 1.0))
def test_exactly_the_count_stays_and_nothing_larger_is_dropped(values, ratio):
    scores = torch.tensor(values, dtype=torch.float32)
    count = weight_count(ratio, len(values))
    keep = keep_largest(scores, count)
    assert int(keep.sum()) == count
    order = torch.sort(scores.abs(), descending=True, stable=True).indices[:count]
    assert set(keep.nonzero().flatten().tolist()) == set(order.tolist())


def test_counts_are_rounded_up_and_at_least_one():
    assert [weight_count(r, 10) for r in (0.1, 0.11, 1e-9, 1.0, 0.0)] == [1, 2, 1, 10, 0]


def test_densities_by_hand():
    # (2 + 2) / 4 = 1 and (10 + 10) / 100 = 0.2: at one half of 104 weights the small layer is whole.
    shares = layer_densities({"small": torch.Size((2, 2)), "large": torch.Size((10, 10))}, 0.5)
    assert shares == {"small": 1.0, "large": pytest.approx(0.48)}


@given(
    st.dictionaries(st.text("abcdef", min_size=1), st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
)
def test_densities_add_up_and_never_exceed_one(sizes, density):
    shapes = {name: torch.Size(size) for name, size in sizes.items()}
    shares = layer_densities(shapes, density)
    assert all(0.0 <= share <= 1.0 + 1e-12 for share in shares.values())
    total = sum(math.prod(shape) for shape in shapes.values())
    kept = sum(shares[name] * math.prod(shape) for name, shape in shapes.items())
    # Layers that are whole may alone exceed what was asked for.
    assert kept == pytest.approx(density * total) or any(share == 1.0 for share in shares.values())
    assert kept >= density * total - 1e-6


def test_the_first_round_is_a_mean_then_complements_are_added_at_the_rate_and_the_sum_is_pruned():
    found = cs(ratio=1 / 3).aggregate(server_context(), [update(0, [1.0, 0.0, 4.0]), update(1, [5.0, 4.0, 0.0])])
    assert found["w"].tolist() == [[0.0, 0.0, 5.0]]
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


def test_a_move_by_hand():
    mask = WeightMask({"w": torch.tensor([True, True, True, True, False, False])})
    weights = {"w": torch.tensor([0.1, -0.4, 0.3, -0.2, 0.0, 0.0])}
    gradients = {"w": torch.tensor([0.0, 9.0, 9.0, 1.0, 3.0, -2.0])}
    # Two of four go, the smallest; of the four that are out, those of largest gradient come.
    assert move_mask(mask, weights, gradients, 0.5)["w"].tolist() == [False, True, True, False, True, True]
    # One that went comes back where its gradient is large.
    gradients = {"w": torch.tensor([7.0, 0.0, 0.0, 1.0, 3.0, -2.0])}
    assert move_mask(mask, weights, gradients, 0.5)["w"].tolist() == [True, True, True, False, True, False]
    assert move_mask(mask, weights, gradients, 0.0) == mask


def test_masks_keep_their_size_per_layer_and_move_less_and_less():
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


@pytest.mark.parametrize("right", [True, False])
def test_the_received_model_decides_on_validation_data_whether_a_client_prunes_and_rewinds(right):
    spec, client, ctx = client_context(lotteryfl(threshold=0.4), config=training(tiny_config(), lr=1e-9))
    label = int(client.data.val.targets.mode().values)
    label = label if right else (label + 1) % 3
    state = {name: 2 * tensor for name, tensor in spec.initial.items()}
    state["last.bias"] = 100.0 * torch.nn.functional.one_hot(torch.tensor(label), 3)
    result = spec.method.train(ctx, Task(state=state))
    assert float((client.data.val.targets == label).float().mean() > 0.4) == right
    assert (result.mask is not None) == right
    assert result.ratio == (0.9 if right else 1.0)
    # A client that has pruned starts from round 0, any other from the global values.
    torch.testing.assert_close(result.state["last.weight"], (spec.initial if right else state)["last.weight"])


@pytest.mark.parametrize(("method", "entry", "count"), [("lotteryfl", "first.weight", 48), ("hermes", "first", 8)])
def test_tickets_and_subnetworks_only_shrink_and_stop_at_the_target(method, entry, count):
    _, updates = watched(f"{method} threshold=0.0", rounds=20, capability_of="units")
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


NETWORKS = {
    "residual": (ZOO["resnet-small"].make, torch.zeros(2, 3, 7, 7)),
    "lstm": (lambda: NextWordLstm(vocabulary=4, width=6, hidden=8), torch.zeros(2, 5, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_lassos_gradient_is_autograds(name, ratio):
    model, inputs = NETWORKS[name]
    spec, _, ctx = client_context(hermes(), Problem(model=model, example_inputs=(inputs,)))
    mask = make_mask(Ordered(), spec.graph, ratio, ScoringContext())
    leaves = load(ctx, spec.initial, mask)
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


@settings(max_examples=60)
@given(st.lists(st.floats(0.0, 10.0), min_size=7, max_size=7), st.floats(0.0, 3.0), st.integers(0, 50))
def test_no_choice_of_candidates_in_two_layers_has_more_gradient_per_second(values, overhead, seed):
    generator, times = torch.Generator().manual_seed(seed), [1.0] * 4 + [2.0] * 3
    mask, weights, stays = {}, {}, set()
    for name, places in (("a", range(4)), ("b", range(4, 7))):
        keep = torch.rand(len(places), generator=generator) > 0.5
        keep[0] = True
        mask[name], weights[name] = keep, torch.randn(len(places), generator=generator) * keep
        order, active = torch.where(keep, weights[name].abs(), -1.0).sort(descending=True).indices, int(keep.sum())
        stays |= {places[place] for place in order[: active - active // 2].tolist()}
    squares = {"a": torch.tensor(values[:4]), "b": torch.tensor(values[4:])}
    found = search_weights(weights, WeightMask(mask), squares, {"a": 1.0, "b": 2.0}, share=0.5, overhead=overhead)

    def rate(chosen):
        return sum(values[place] for place in chosen) / (overhead * sum(times) + sum(times[place] for place in chosen))

    rest = [place for place in range(7) if place not in stays]
    best = max(rate([*stays, *extra]) for count in range(len(rest) + 1) for extra in itertools.combinations(rest, count))
    chosen = torch.cat([found["a"], found["b"]]).nonzero().flatten().tolist()
    assert stays <= {*chosen}
    assert rate(chosen) == pytest.approx(best, abs=1e-5)


def test_seconds_per_weight_are_those_of_computing_and_sending_it():
    spec = RunSpec.build(prunefl(), tiny_problem(), tiny_config())
    seconds = weight_seconds(spec.costs, WeightMask({"first.weight": torch.ones(8, 6, dtype=torch.bool)}), examples=100.0)
    device = Capability()
    wire = 4 / device.uplink_bytes_per_second + 4 / device.downlink_bytes_per_second
    assert seconds["first.weight"] == pytest.approx(3 * 2 * 100 / 727e9 + wire)


def test_the_gradients_are_squared_sums_of_dense_ones_times_examples():
    """One batch and one epoch: the sum is the gradient at the start, dropped entries included."""
    spec, client, ctx = client_context(prunefl(every=2), deep_problem(), ONE_STEP, round=2)
    mask = WeightMask({"0.weight": torch.arange(48).view(8, 6) % 2 == 0})
    start = {**spec.initial, "0.weight": spec.initial["0.weight"] * mask["0.weight"]}
    result = spec.method.train(ctx, Task(state=start, mask=mask))
    model = deep_problem().model()
    model.load_state_dict(spec.initial)
    with torch.no_grad():
        model[0].weight *= mask["0.weight"]
    data = client.data.train
    torch.nn.functional.cross_entropy(model(data.inputs[0]), data.targets).backward()
    assert torch.allclose(result.extra["0.weight"], model[0].weight.grad.square() * 24, rtol=1e-4)
    assert result.metrics["processed_examples"] == 24.0


def test_the_share_that_may_be_dropped_halves_over_the_run(monkeypatch):
    module, shares = sys.modules["sparsekit_fl.methods.weight_masks"], []
    search = module.search_weights

    def heard(*given, share, **more):
        shares.append(share)
        return search(*given, share=share, **more)

    monkeypatch.setattr(module, "search_weights", heard)
    tiny_run("prunefl every=2 initial=0", rounds=6)
    assert shares == pytest.approx([0.3 * 0.5 ** (round / 6) for round in (2, 4, 6)])


def test_the_lasso_of_hermes_shrinks_units_while_a_client_trains():
    norms = []
    for lasso in (0.0, 0.5):
        spec, _, ctx = client_context(hermes(lasso=lasso))
        norms.append(float(spec.method.train(ctx, Task(state=spec.initial)).state["first.weight"].norm()))
    assert norms[1] < 0.9 * norms[0]
