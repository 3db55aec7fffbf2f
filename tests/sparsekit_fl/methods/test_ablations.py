"""The ablations: which one part of FedLPS each replaces, also in the variant for local classes."""

import dataclasses

import pytest
import torch
from personal import tiny_run, watched

from sparsekit_fl.methods import fedlps, registry
from sparsekit_fl.testing import tiny_config

PATTERNS = ["fedlps-random", "fedlps-ordered", "fedlps-magnitude"]
CHANGED = {
    "flst": {"ratios"}, "rcr-fix": {"ratios"}, "rcr-dyn": {"ratios"}, "p-ucbv-fix": set(), "p-ucbv-dyn": set(),
    **{name: {"pattern"} for name in PATTERNS},
}  # fmt: skip


def test_only_the_named_part_differs_from_fedlps() -> None:
    variants = {"fedlps", "fedlps-paper", "fedlps-local-classes"}
    assert set(CHANGED) == {name for name, kind in registry.items() if issubclass(kind, fedlps)} - variants
    for name, changed in CHANGED.items():
        ours, whole = registry[name]().options(), fedlps().options()
        assert {option for option in whole if ours[option] != whole[option]} == changed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fixed"), [("rcr-fix", True), ("rcr-dyn", False)])
def test_a_clients_capability_is_drawn_once_or_in_every_round(name, fixed) -> None:
    # The run says the opposite of the method, which has the last word.
    config = dataclasses.replace(tiny_config(rounds=8), capability="dynamic" if fixed else "fixed")
    result, updates = watched(name, config=config)
    ratios: dict[int, set[float]] = {}
    for update in updates:
        ratios.setdefault(update.client_id, set()).add(update.ratio)
    assert all(len(found) == 1 for found in ratios.values()) == fixed
    assert result.config.capability == ("fixed" if fixed else "dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PATTERNS, "fedlps-local-classes pattern=ordered"])
def test_patterns_take_one_ratio_for_all_or_leave_it_to_the_bandits(name) -> None:
    _, free = watched(name, rounds=6)
    _, bound = watched(f"{name} ratios=0.5", rounds=6)
    assert len({update.ratio for update in free}) > 3
    assert {update.ratio for update in bound} == {0.5}
    first = {}
    for update in free:
        first.setdefault(update.client_id, update)
    assert all(("initial_accuracy" in update.metrics) == (first[update.client_id] is update) for update in free)


@pytest.mark.slow
def test_the_proximal_term_is_that_of_the_learning_client() -> None:
    options = "ratios=1.0 mu=500.0 strength=0.0"
    mine, theirs = (tiny_run(f"{name} {options}", rounds=1).state for name in ("fedlps-ordered", "fedlps"))
    assert all(torch.allclose(mine[name].double(), theirs[name].double(), atol=1e-5) for name in theirs)
