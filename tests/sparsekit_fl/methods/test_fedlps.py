"""FedLPS: its bandit, its reward and its pull by exact numbers, and the ablations."""

import dataclasses
import math
import sys
from collections import defaultdict

import pytest
import torch
from personal import ONE_STEP, STATE, client_context, server_context, watched

import sparsekit_fl as fl
from sparsekit_fl.methods import fedlps, fedlps_paper, registry
from sparsekit_fl.methods.fedlps import FedLPS, utility
from sparsekit_fl.methods.server import ClientInfo
from sparsekit_fl.testing import tiny_config


def server(round: int, capability: float, memory: dict) -> fl.ServerContext:
    roster = {7: ClientInfo(examples=10, capability=fl.Capability(ratio=capability))}
    return server_context(round=round, rounds=100, roster=roster, cohort=10, rng=[0, round], client=memory)


def answer(ratio: float, accuracy: float, **metrics: float) -> fl.Update:
    return fl.Update(
        round=1, client_id=7, examples=10, delta={name: torch.zeros_like(one) for name, one in STATE.items()}, ratio=ratio,
        metrics={"accuracy": accuracy, **metrics}, cost=fl.WorkCost(seconds=2.0),
    )  # fmt: skip


def test_proposals_never_exceed_the_capability_of_the_round() -> None:
    method, memory = fedlps(), defaultdict(dict)
    for round in range(1, 60):
        level = (1.0, 0.5, 0.25, 0.125, 0.0625)[round % 5]
        ctx = server(round, level, memory)
        proposal = method.assign(ctx, 7).ratio
        assert 1 / 16 <= proposal <= max(level, 1 / 16)
        if round % 3:
            method.aggregate(ctx, [answer(proposal, 0.5 + 0.001 * round, initial_accuracy=0.1)])


def test_a_proposal_that_was_never_answered_is_made_again() -> None:
    memory: dict = defaultdict(dict)
    first = fedlps().assign(server(1, 1.0, memory), 7).ratio
    assert fedlps().assign(server(2, 1.0, memory), 7).ratio == first


@pytest.mark.parametrize(("capability", "eliminated"), [(1.0, True), (1 / 16, False)])
def test_a_ratio_is_eliminated_only_if_it_was_executed(capability, eliminated) -> None:
    """Accuracy that falls under a ratio that capability cut says nothing of the drawn one."""
    method, memory = fedlps(), defaultdict(dict)
    for round, accuracy in ((1, 0.9), (2, 0.1)):
        ctx = server(round, capability, memory)
        ratio = method.assign(ctx, 7).ratio
        method.aggregate(ctx, [answer(ratio, accuracy, initial_accuracy=0.1)])
    # Each of two pulls splits one of five arms.
    assert len(method._bandit(ctx, memory[7], seed=0).arms) == (6 if eliminated else 7)


@pytest.mark.parametrize(("method", "seconds"), [(fedlps(), 2.0), (fedlps_paper(), 1.0)], ids=["ours", "paper"])
def test_a_bandit_learns_the_utility_gained_per_second_which_in_the_paper_leaves_out_the_download(method, seconds) -> None:
    memory: dict = defaultdict(dict)
    rate = fl.Capability().downlink_bytes_per_second
    for round, accuracy in ((1, 0.6), (2, 0.5)):
        ctx = server(round, 1.0, memory)
        update = answer(method.assign(ctx, 7).ratio, accuracy, initial_accuracy=0.1)
        method.aggregate(ctx, [dataclasses.replace(update, cost=fl.WorkCost(seconds=2.0, downlink_bytes=int(rate)))])
    rewards = [reward for _, reward in method._bandit(ctx, memory[7], seed=0).told]
    gains = utility(0.6) - utility(0.1), utility(0.5) - utility(0.6)
    assert rewards == pytest.approx([gain / seconds for gain in gains])


@pytest.mark.parametrize(
    ("method", "pull"),
    [(fedlps(mu=0.5), 1.0 / 99), (fedlps(mu=0.5, pattern="ordered"), 1.0 / 99), (fedlps_paper(mu=0.5), 1.0)],
    ids=["ours", "ordered", "paper"],
)
def test_the_pull_is_the_gradient_of_a_mean_of_squares_and_in_the_paper_of_a_sum(method, pull, monkeypatch) -> None:
    """μ‖θ − ω‖² has the gradient 2μ (θ − ω); the tiny model has 99 entries."""
    module, heard = sys.modules[FedLPS.__module__], []
    sgd = module.sgd
    monkeypatch.setattr(module, "sgd", lambda *given, pull, **more: heard.append(pull) or sgd(*given, pull=pull, **more))
    spec, _, ctx = client_context(method, config=ONE_STEP)
    method.train(ctx, fl.Task(state=spec.initial, ratio=0.5))
    assert heard == [pytest.approx(pull)]


def test_utility_is_the_papers_function() -> None:
    for x in (0.0, 0.3, 1.0, 15.0):
        assert utility(x) == pytest.approx(10 - 20 / (1 + math.exp(0.35 * x)))


CHANGED = {
    "flst": {"ratios"}, "rcr-fix": {"ratios"}, "rcr-dyn": {"ratios"}, "p-ucbv-fix": set(), "p-ucbv-dyn": set(),
    **{name: {"pattern"} for name in ("fedlps-random", "fedlps-ordered", "fedlps-magnitude")},
}  # fmt: skip


def test_only_the_named_part_differs_from_fedlps() -> None:
    assert {*CHANGED, "fedlps", "fedlps-paper"} == {name for name, kind in registry.items() if issubclass(kind, fedlps)}
    for name, changed in CHANGED.items():
        ours, whole = registry[name]().options(), fedlps().options()
        assert {option for option in whole if ours[option] != whole[option]} == changed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fixed"), [("rcr-fix", True), ("rcr-dyn", False)])
def test_a_clients_capability_is_drawn_once_or_in_every_round(name, fixed) -> None:
    # The run says the opposite of the method, which has the last word.
    config = dataclasses.replace(tiny_config(rounds=8), redraw_capability=fixed)
    result, updates = watched(name, config=config)
    ratios: dict[int, set[float]] = {}
    for update in updates:
        ratios.setdefault(update.client_id, set()).add(update.ratio)
    assert all(len(found) == 1 for found in ratios.values()) == fixed
    assert result.config.redraw_capability != fixed
