"""FedLPSPaper: its bandit, its reward and its pull by exact numbers, and the ablations."""

import inspect
import math
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
from personal import ONE_STEP, chain, client_context, server_context, tiny_run, update, watched

import sparsekit_fl as fl
from sparsekit_fl.methods import fedlps_magnitude, fedlps_paper, make_method, p_ucbv_dyn, rcr_fix, registry
from sparsekit_fl.methods.base import ClientInfo
from sparsekit_fl.methods.fedlps_paper import FedLPSPaper, utility
from sparsekit_fl.testing import tiny_config


def server(round, capability, memory):
    roster = {7: ClientInfo(examples=10, capability=fl.Capability(ratio=capability))}
    return server_context(round=round, rounds=100, roster=roster, cohort=10, rng=[0, round], client=memory)


def answer(ratio, accuracy, **metrics):
    metrics, cost = {"accuracy": accuracy, **metrics}, fl.Cost(simulated_seconds=2.0)
    return update(7, [0.0] * 3, ratio=ratio, metrics=metrics, cost=cost)


def test_proposals_never_exceed_the_capability_of_the_round_and_what_ran_is_credited():
    method, memory = p_ucbv_dyn(), defaultdict(dict)
    executed = []
    for round in range(1, 60):
        level = (1.0, 0.5, 0.25, 0.125, 0.0625)[round % 5]
        ctx = server(round, level, memory)
        proposal = method.assign(ctx, 7).ratio
        assert 1 / 16 <= proposal <= max(level, 1 / 16)
        if round % 3:
            method.aggregate(ctx, [answer(proposal, 0.5 + 0.001 * round, initial_accuracy=0.1)])
            executed.append(proposal)
    # Also where a draw that was lost was proposed again, to a device that had become slower.
    assert [pull.value for pull, _ in method._bandit(ctx, 7).bandit.told] == executed


def test_a_ratio_that_failed_counts_as_a_trial_and_is_not_proposed_again():
    method, memory = p_ucbv_dyn(), defaultdict(dict)
    ctx = server(1, 1.0, memory)
    ctx.failed[7] = method.assign(ctx, 7).ratio
    method.aggregate(ctx, [replace(answer(0.5, 0.5), client_id=8)])
    assert memory[7]["bandit"]["log"][-1] == {"forget": 0}
    assert memory[7]["pull"] is None


def test_a_proposal_that_was_never_answered_is_made_again():
    memory: dict = defaultdict(dict)
    method = p_ucbv_dyn()
    first = method.assign(server(1, 1.0, memory), 7).ratio
    assert method.assign(server(2, 1.0, memory), 7).ratio == first


@pytest.mark.parametrize("name", ["fedlps", "rcr-dyn ratios=random", "fedmp", "p-ucbv-dyn", "rcr-dyn"])
def test_a_client_that_fails_is_offered_less_a_lost_message_changes_nothing_and_success_brings_it_back(name):
    method, memory, last = make_method(name), defaultdict(dict), []

    def ratio(round, capability=1.0):
        last.append(method.assign(server(round, capability, memory), 7).ratio)
        return last[-1]

    def fail(round):
        ctx = server(round, 1.0, memory)
        ctx.failed[7] = last[-1]
        method.aggregate(ctx, [replace(answer(0.5, 0.5, loss=1.0), client_id=8)])

    first = ratio(1)
    fail(1)
    second = ratio(2)
    assert second <= first / 2
    assert ratio(3) == pytest.approx(second) or "random" in name, "nothing came back"
    fail(3)
    least = ratio(4)
    assert least <= second / 2 or least <= first / 4
    for round in range(4, 60):
        given = ratio(round)
        method.aggregate(server(round, 1.0, memory), [answer(given, 0.5 + 0.01 / given, loss=1.0)])
    if name != "p-ucbv-dyn":  # a bandit may like what it tried
        assert max(last[-8:]) > least
        assert "limit" not in memory[7]


@pytest.mark.parametrize("name", ["fedlps", "fedp3", "fjord", "flst", "rcr-fix"])
def test_a_client_that_was_never_asked_deploys_what_its_device_affords(name):
    config = replace(tiny_config(rounds=1), cohort=1, capability_levels=(0.25,))
    problem = chain(6, 64, 64, 3)
    result = tiny_run(name, problem=problem, config=config)
    assert all((one.ratio is not None and one.ratio <= 0.25) or name == "flst" for one in result.final.per_client)


@pytest.mark.parametrize(("method", "seconds"), [(p_ucbv_dyn(), 2.0), (fedlps_paper(), 1.0)], ids=["variant", "paper"])
def test_a_bandit_learns_the_utility_gained_per_second_which_in_the_paper_leaves_out_the_download(method, seconds):
    memory: dict = defaultdict(dict)
    rate = fl.Capability().downlink_bytes_per_second
    for round, accuracy in ((1, 0.6), (2, 0.5)):
        ctx = server(round, 1.0, memory)
        told = answer(method.assign(ctx, 7).ratio, accuracy, initial_accuracy=0.1)
        method.aggregate(ctx, [replace(told, cost=fl.Cost(simulated_seconds=2.0, downlink_bytes=int(rate)))])
    rewards = [reward for _, reward in method._bandit(ctx, 7).bandit.told]
    gains = utility(0.6) - utility(0.1), utility(0.5) - utility(0.6)
    assert rewards == pytest.approx([gain / seconds for gain in gains])


@pytest.mark.parametrize(
    ("method", "pull"),
    [(rcr_fix(mu=0.5), 1.0 / 99), (fedlps_magnitude(mu=0.5), 1.0 / 99), (fedlps_paper(mu=0.5), 1.0)],
    ids=["learned", "magnitude", "paper"],
)
def test_the_pull_is_the_gradient_of_a_mean_of_squares_and_in_the_paper_of_a_sum(method, pull, monkeypatch):
    """μ‖θ − ω‖² has the gradient 2μ (θ − ω); the tiny model has 99 entries."""
    module, heard = sys.modules[FedLPSPaper.__module__], []
    for name in ("sgd", "descend"):
        train = getattr(module, name)
        listening = lambda *given, pull, train=train, **more: heard.append(pull) or train(*given, pull=pull, **more)  # noqa: E731
        monkeypatch.setattr(module, name, listening)
    spec, _, ctx = client_context(method, config=ONE_STEP)
    method.train(ctx, fl.Task(state=spec.initial, ratio=0.5))
    assert heard == [pytest.approx(pull)]


def test_utility_is_the_papers_function():
    for x in (0.0, 0.3, 1.0, 15.0):
        assert utility(x) == pytest.approx(10 - 20 / (1 + math.exp(0.35 * x)))


CHANGED = {
    "flst": {"ratios"}, "rcr-fix": {"ratios", "redraw"}, "rcr-dyn": {"ratios", "redraw"},
    "p-ucbv-fix": {"redraw"}, "p-ucbv-dyn": {"redraw"},
    **{name: {"pattern"} for name in ("fedlps-random", "fedlps-ordered", "fedlps-magnitude")},
}  # fmt: skip


def test_only_the_named_part_differs_from_the_papers_method():
    assert {*CHANGED, "fedlps-paper"} == {name for name in registry if isinstance(registry[name](), FedLPSPaper)}
    whole = fedlps_paper().options()
    for name, changed in CHANGED.items():
        ours = registry[name]().options()
        assert {option for option in whole if ours[option] != whole[option]} == {*changed, "literal"}
        assert registry[name](mu=0.5).name == f"{name} mu=0.5"
        assert registry[name](mu=0.5).note == registry[name].note
        assert bool(registry[name].note) == bool(changed & {"ratios", "redraw"})
        assert inspect.getdoc(registry[name]) != inspect.getdoc(FedLPSPaper)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fixed"), [("rcr-fix", True), ("rcr-dyn", False)])
def test_a_clients_capability_is_drawn_once_or_in_every_round(name, fixed):
    # The run says the opposite of the method, which has the last word.
    config = replace(tiny_config(rounds=8), redraw_capability=fixed)
    result, updates = watched(name, config=config)
    ratios: dict[int, set[float]] = {}
    for one in updates:
        ratios.setdefault(one.client_id, set()).add(one.ratio)
    assert all(len(found) == 1 for found in ratios.values()) == fixed
    assert result.config.redraw_capability != fixed
