"""The ablations: the contract, and which one part of FedLPS each replaces."""

import dataclasses

import pytest
import torch
from personal import tiny_run, watched

from sparsekit.errors import InvalidValueError
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl.methods import fedlps, fedlps_own
from sparsekit_fl.paper import ablations
from sparsekit_fl.paper.ablations import MeanProximalSgd
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.ratio import Full
from sparsekit_fl.testing import tiny_config

pytestmark = pytest.mark.slow

PATTERNS = [ablations.fedlps_random, ablations.fedlps_ordered, ablations.fedlps_magnitude]
RATIOS = [ablations.flst, ablations.rcr_fix, ablations.rcr_dyn]
BANDITS = [ablations.p_ucbv_fix, ablations.p_ucbv_dyn]


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        *((one, {"ratio"}) for one in RATIOS),
        *((one, set()) for one in BANDITS),
        *((pattern, {"mask", "local"}) for pattern in PATTERNS),
    ],
)
def test_only_the_named_part_differs_from_fedlps_and_from_the_variant_for_own_classes(method, changed) -> None:
    own = method(whole="fedlps-own")
    assert own.name == f"own-{method().name}"
    for ours, whole in ((method().describe(), fedlps().describe()), (own.describe(), fedlps_own().describe())):
        assert {kind for kind in whole if ours[kind] != whole[kind]} == changed | {"name"}
    with pytest.raises(InvalidValueError, match="whole must be one of fedlps, fedlps-own, got 'fedavg'"):
        method(whole="fedavg")


@pytest.mark.parametrize(("method", "fixed"), [(ablations.rcr_fix, True), (ablations.rcr_dyn, False)])
def test_a_clients_capability_is_drawn_once_or_in_every_round(method, fixed) -> None:
    # The run says the opposite of the method, which has the last word.
    config = dataclasses.replace(tiny_config(rounds=8), capability="dynamic" if fixed else "fixed")
    result, updates = watched(method(), config=config)
    ratios: dict[int, set[float]] = {}
    for update in updates:
        ratios.setdefault(update.client_id, set()).add(update.ratio)
    assert all(len(found) == 1 for found in ratios.values()) == fixed
    assert result.config.capability == ("fixed" if fixed else "dynamic")


@pytest.mark.parametrize("method", PATTERNS)
def test_pattern_variants_take_one_ratio_for_all_or_leave_it_to_the_bandits(method) -> None:
    _, free = watched(method(), rounds=6)
    _, bound = watched(method(0.5), rounds=6)
    assert len({update.ratio for update in free}) > 3
    assert {update.ratio for update in bound} == {0.5}
    first = {}
    for update in free:
        first.setdefault(update.client_id, update)
    assert all(("initial_accuracy" in update.metrics) == (first[update.client_id] is update) for update in free)


def test_the_proximal_term_is_that_of_the_learning_client() -> None:
    ours = dataclasses.replace(ablations.fedlps_ordered(), ratio=Full(), local=MeanProximalSgd(proximal=500.0))
    learning = dataclasses.replace(
        fedlps(), ratio=Full(), local=LearnableSgd(proximal=500.0, term=ImportanceRegularizer(strength=0.0))
    )
    mine, theirs = tiny_run(ours, rounds=1).state, tiny_run(learning, rounds=1).state
    assert all(torch.allclose(mine[name].double(), theirs[name].double(), atol=1e-5) for name in theirs)
