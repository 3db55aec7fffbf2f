"""Hostile clients in whole runs: what a method's server cannot use is refused, and the run goes on."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparsekit.graph.mask import WeightMask
from sparsekit_fl.callbacks.base import Callback
from sparsekit_fl.client.kept import Kept
from sparsekit_fl.client.messages import Evaluation
from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.method import Method
from sparsekit_fl.methods.prunefl import Search, prunefl
from sparsekit_fl.results.part import plain
from sparsekit_fl.results.scores import RoundScores
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

HOSTILE = (1, 4)
GRAPH = RunSpec.build(Method(name="m", source=""), tiny_problem(), tiny_config()).graph


class Dropped(Callback):
    """Notes who was refused, and why."""

    def __init__(self):
        self.reasons = []

    def on_round_end(self, run, record):
        self.reasons += [reason for _, reason in record.dropped]


@pytest.fixture
def spoiled(monkeypatch):
    """Runs a method of which two clients change what they send; returns why they were refused."""

    def start(method, change, rounds=3):
        train = ClientExecutor.train

        def hostile(self, assignment, *args, **kwargs):
            update, stored = train(self, assignment, *args, **kwargs)
            return (change(update) if assignment.client_id in HOSTILE else update), stored

        monkeypatch.setattr(ClientExecutor, "train", hostile)
        watch = Dropped()
        config = replace(tiny_config(rounds=rounds), eval_every=rounds)
        result = run(method, tiny_problem(), tiny_clients(), config, callbacks=[watch])
        assert len(result.rounds) == rounds
        return watch.reasons

    return start


# PruneFL asks one client alone in the first round, so that a hostile one stops that round for good; it has tests of its own.
# Ablations of FedLPS are made of its policies.
OTHERS = sorted(name for name in set(registry) - {"prunefl"} if registry[name].__module__ != "sparsekit_fl.paper.ablations")


@pytest.mark.parametrize("name", OTHERS)
def test_an_update_without_what_a_method_learns_from_never_stops_a_run(spoiled, name):
    reasons = spoiled(registry[name](), lambda update: replace(update, metrics={}, extra={}))
    learning = name in ("fedlps", "fedlps-paper", "fedmp", "oort")
    if learning:
        assert reasons
        assert all("lacks the metrics" in reason for reason in reasons)


@pytest.mark.parametrize("name", OTHERS)
def test_an_update_with_a_mask_of_its_own_never_stops_a_run(spoiled, name):
    strange = WeightMask({"first.weight": torch.arange(48).view(8, 6) % 5 == 0})
    extra = {key: torch.zeros(2) for key in ("owned_classes", "next_mask", "x")}
    kept = Kept(GRAPH, strange)

    def change(update):
        delta = {
            key: torch.zeros(kept.shape(key) if key in GRAPH.shapes else delta.shape, dtype=delta.dtype)
            for key, delta in update.delta.items()
        }
        return replace(update, mask=strange, delta=delta, extra=extra)

    reasons = spoiled(registry[name](), change)
    if name in ("fedavg", "fedprox", "refl"):
        assert reasons
        assert all("needs whole entries" in reason for reason in reasons)


@pytest.mark.parametrize("name", OTHERS)
def test_no_number_that_a_client_reports_stops_a_run(spoiled, name):
    """The largest, the least, none: in every metric, cost and time; the changes themselves are honest."""
    extremes = (1.7e308, -1.7e308, 5e-324, 0.0, math.inf, -math.inf, math.nan)
    calls = itertools.count()

    def change(update):
        turn = next(calls)
        metrics = {key: extremes[(turn + place) % len(extremes)] for place, key in enumerate(update.metrics)}
        seconds = abs(extremes[(turn + 1) % len(extremes)])
        cost = replace(update.cost, seconds=seconds, wall_seconds=seconds, flops_compact=2**62, uplink_bytes=2**62)
        return replace(update, metrics=metrics, cost=cost)

    spoiled(registry[name](), change, rounds=5)


@given(st.lists(st.floats(), min_size=1, max_size=5), st.lists(st.sampled_from([0.0, 1.0, 3.5, 1e308]), min_size=5, max_size=5))
@example([math.inf, -math.inf], [1.0] * 5)
@example([1.7e308, 1.7e308], [1.0] * 5)
def test_no_scores_that_clients_send_stop_a_run(sums, weights):
    evaluations = [
        Evaluation(client_id=id, examples=1, personal={"loss": pair}, validation={"loss": pair}, shared={"loss": pair})
        for id, pair in enumerate(zip(sums, weights, strict=False))
    ]
    scores = RoundScores.of(evaluations)
    json.dumps(plain(scores.to_dict()), allow_nan=False)


def test_prunefl_refuses_gradients_that_are_not_of_its_weights(spoiled):
    method = prunefl(Search(every=1, initial=0))
    reasons = spoiled(method, lambda update: replace(update, extra={"first.weight": torch.zeros(3)}))
    assert reasons
    assert all("has no gradients of the weights that are pruned" in reason for reason in reasons)


def test_prunefl_refuses_a_mask_that_it_did_not_send(spoiled):
    strange = WeightMask({"first.weight": torch.arange(48).view(8, 6) % 5 == 0})

    def change(update):
        if update.mask is None:
            return update
        kept = Kept(GRAPH, strange)
        delta = {key: torch.zeros(kept.shape(key), dtype=delta.dtype) for key, delta in update.delta.items()}
        return replace(update, mask=strange, delta=delta)

    reasons = spoiled(prunefl(Search(every=1, initial=0)), change)
    assert reasons
    assert all("another mask than the one that it was sent" in reason for reason in reasons)
