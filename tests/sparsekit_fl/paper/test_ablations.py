"""The ablations: the contract, and which one part of FedLPS each replaces."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparsekit.errors import InvalidValueError
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl.callbacks.base import Callback
from sparsekit_fl.client.messages import Evaluation
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.methods import fedavg, fedlps, fedlps_own
from sparsekit_fl.paper.ablations import (
    MeanProximalSgd,
    fedlps_magnitude,
    fedlps_ordered,
    fedlps_random,
    flst,
    p_ucbv_dyn,
    p_ucbv_fix,
    rcr_dyn,
    rcr_fix,
)
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.personal import GlobalModel
from sparsekit_fl.policies.ratio import Full
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

pytestmark = pytest.mark.slow

PATTERNS = [fedlps_random, fedlps_ordered, fedlps_magnitude]


class Updates(Callback):
    def __init__(self) -> None:
        self.all = []

    def on_client_end(self, run, client_id, update) -> None:
        if isinstance(update, Evaluation):
            return
        self.all.append(update)


def watched(method, config=None):
    updates = Updates()
    result = run(method, tiny_problem(), tiny_clients(), config or tiny_config(rounds=6), callbacks=[updates])
    return result, updates.all


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        (flst, {"ratio"}),
        (rcr_fix, {"ratio"}),
        (rcr_dyn, {"ratio"}),
        (p_ucbv_fix, set()),
        (p_ucbv_dyn, set()),
        *((pattern, {"mask", "local"}) for pattern in PATTERNS),
    ],
)
def test_only_the_named_part_differs_from_fedlps(method, changed) -> None:
    ours, whole = method().describe(), fedlps().describe()
    assert {kind for kind in whole if ours[kind] != whole[kind]} == changed | {"name"}


@pytest.mark.parametrize("method", [flst, rcr_fix, rcr_dyn, p_ucbv_fix, p_ucbv_dyn, *PATTERNS])
def test_the_same_part_can_be_taken_from_the_variant_for_own_classes(method) -> None:
    def changed(ours, whole) -> set[str]:
        return {kind for kind in whole.describe() if ours.describe()[kind] != whole.describe()[kind]}

    own = method(whole="fedlps-own")
    assert own.name == f"own-{method().name}"
    assert changed(own, fedlps_own()) == changed(method(), fedlps())
    with pytest.raises(InvalidValueError, match="whole must be one of fedlps, fedlps-own, got 'fedavg'"):
        method(whole="fedavg")


@pytest.mark.parametrize(("method", "fixed"), [(rcr_fix, True), (rcr_dyn, False)])
def test_a_clients_capability_is_drawn_once_or_in_every_round(method, fixed) -> None:
    # The run says the opposite of the method, which has the last word.
    config = dataclasses.replace(tiny_config(rounds=8), capability="dynamic" if fixed else "fixed")
    result, updates = watched(method(), config)
    ratios: dict[int, set[float]] = {}
    for update in updates:
        ratios.setdefault(update.client_id, set()).add(update.ratio)
    assert all(len(found) == 1 for found in ratios.values()) == fixed
    assert result.config.capability == ("fixed" if fixed else "dynamic")


@pytest.mark.parametrize("method", PATTERNS)
def test_pattern_variants_take_one_ratio_for_all_or_leave_it_to_the_bandits(method) -> None:
    _, free = watched(method())
    _, bound = watched(method(0.5))
    assert len({update.ratio for update in free}) > 3
    assert {update.ratio for update in bound} == {0.5}
    first = {}
    for update in free:
        first.setdefault(update.client_id, update)
    assert all(("initial_accuracy" in update.metrics) == (first[update.client_id] is update) for update in free)


def test_ordered_units_are_the_first_ones_and_random_ones_change() -> None:
    _, ordered = watched(fedlps_ordered(0.5))
    assert all(update.mask["first"].nonzero().flatten().tolist() == [0, 1, 2, 3] for update in ordered)
    _, random = watched(fedlps_random(0.5))
    assert len({tuple(update.mask["first"].tolist()) for update in random}) > 10


def test_magnitude_keeps_the_units_of_largest_weights_in_the_global_model() -> None:
    _, updates = watched(fedlps_magnitude(0.25), tiny_config(rounds=1))
    state = RunSpec.build(fedavg(), tiny_problem(), tiny_config()).initial
    own = state["first.weight"].abs().sum(1) + state["first.bias"].abs() + state["norm.weight"] + state["norm.bias"]
    top = set(own.topk(2).indices.tolist())
    assert all(set(update.mask["first"].nonzero().flatten().tolist()) == top for update in updates)


@pytest.mark.same_bits
def test_a_full_pattern_without_the_proximal_term_is_fedavg_bit_for_bit() -> None:
    plain = dataclasses.replace(fedlps_random(), ratio=Full(), local=MeanProximalSgd(proximal=0.0), personal=GlobalModel())
    ours, _ = watched(plain)
    reference, _ = watched(fedavg())
    assert ours.final.state_sha256 == reference.final.state_sha256


def test_the_proximal_term_is_that_of_the_learning_client() -> None:
    config = tiny_config(rounds=1)
    ours = dataclasses.replace(fedlps_ordered(), ratio=Full(), local=MeanProximalSgd(proximal=500.0))
    learning = dataclasses.replace(
        fedlps(), ratio=Full(), local=LearnableSgd(proximal=500.0, term=ImportanceRegularizer(strength=0.0))
    )
    mine, theirs = watched(ours, config)[0].state, watched(learning, config)[0].state
    assert all(torch.allclose(mine[name].double(), theirs[name].double(), atol=1e-5) for name in theirs)
