"""PruneFL: the search by hand and against trying everything, when it happens, and what it costs."""

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from personal import ONE_STEP, client_context, deep_problem, tiny_run, watched

from sparsekit.graph import WeightMask
from sparsekit_fl.methods import prunefl
from sparsekit_fl.methods.client import Task
from sparsekit_fl.methods.weight_masks import search_weights, weight_seconds
from sparsekit_fl.problem.data import Capability
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import tiny_config, tiny_problem


def test_a_search_by_hand() -> None:
    mask = WeightMask({"a": torch.tensor([True, True, True, False]), "b": torch.tensor([True, True])})
    weights = {"a": torch.tensor([3.0, 1.0, 2.0, 0.0]), "b": torch.tensor([1.0, -2.0])}
    squares = {"a": torch.tensor([4.0, 1.0, 4.0, 9.0]), "b": torch.tensor([0.0, 10.0])}
    seconds = {"a": 1.0, "b": 2.0}
    # One of three and one of two may go: a1 and b0 compete with the dropped a3 at 1, 0 and 9 per second.
    # In stay 4 + 4 + 10 over 2 + 2 seconds: Γ = 4.5; a3 at 9 raises it to 27 / 5, then 1 does not.
    found = search_weights(weights, mask, squares, seconds, share=0.5, overhead=0.0)
    assert found == WeightMask({"a": torch.tensor([True, False, True, True]), "b": torch.tensor([False, True])})
    # With time that no weight is to blame for, Γ = 27 / (8 · 10 + 5) and a1 is worth its second as well.
    found = search_weights(weights, mask, squares, seconds, share=0.5, overhead=10.0)
    assert found == WeightMask({"a": torch.tensor([True, True, True, True]), "b": torch.tensor([False, True])})


@settings(max_examples=40)
@given(st.lists(st.floats(0.0, 10.0), min_size=3, max_size=7), st.floats(0.0, 3.0), st.integers(0, 50))
def test_no_choice_of_candidates_has_more_gradient_per_second(values, overhead, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = len(values)
    keep = torch.rand(size, generator=generator) > 0.5
    keep[0] = True
    mask, squares = WeightMask({"w": keep}), {"w": torch.tensor(values)}
    weights = {"w": torch.randn(size, generator=generator) * keep}
    found = search_weights(weights, mask, squares, {"w": 1.0}, share=0.4, overhead=overhead)["w"]
    order = torch.where(keep, weights["w"].abs(), -1.0).sort(descending=True).indices
    stays = set(order[: max(1, int(keep.sum()) - int(0.4 * int(keep.sum())))].tolist())

    def rate(chosen):
        return sum(values[place] for place in chosen) / (overhead * size + len(chosen))

    rest = [place for place in range(size) if place not in stays]
    best = max(rate([*stays, *extra]) for count in range(len(rest) + 1) for extra in itertools.combinations(rest, count))
    assert stays <= set(found.nonzero().flatten().tolist())
    assert rate(found.nonzero().flatten().tolist()) == pytest.approx(best, abs=1e-6)


def test_seconds_per_weight_are_those_of_computing_and_sending_it() -> None:
    spec = RunSpec.build(prunefl(), tiny_problem(), tiny_config())
    seconds = weight_seconds(spec.costs, WeightMask({"first.weight": torch.ones(8, 6, dtype=torch.bool)}), examples=100.0)
    device = Capability()
    wire = 4 / device.uplink_bytes_per_second + 4 / device.downlink_bytes_per_second
    assert seconds["first.weight"] == pytest.approx(3 * 2 * 100 / 727e9 + wire)


def test_one_client_prunes_in_the_first_round_and_all_share_its_mask() -> None:
    result, updates = watched(prunefl(every=99))
    assert [len(record.cohort) for record in result.rounds] == [1, 4, 4, 4]
    mask = updates[0].mask
    assert 0.0 < updates[0].ratio < 1.0
    assert set(mask) == {"first.weight"}
    assert all(item.mask == mask for item in updates)
    assert not bool(result.state["first.weight"][~mask["first.weight"]].any())
    # Ten reconfigurations at most, each after two epochs of at most 27 examples.
    assert result.rounds[0].cost.flops <= 20 * 27 * 3 * 2 * (48 + 24)


def test_the_gradients_are_squared_sums_of_dense_ones_times_examples() -> None:
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
    assert result.ratio == 0.5


def test_the_share_that_may_be_dropped_halves_over_the_run(monkeypatch) -> None:
    module, shares = sys.modules["sparsekit_fl.methods.weight_masks"], []
    search = module.search_weights

    def heard(*given, share, **more):
        shares.append(share)
        return search(*given, share=share, **more)

    monkeypatch.setattr(module, "search_weights", heard)
    tiny_run("prunefl every=2 initial=0", rounds=6)
    assert shares == pytest.approx([0.3 * 0.5 ** (round / 6) for round in (2, 4, 6)])
