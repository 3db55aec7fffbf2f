"""The benchmark of attacks: its hostile clients do what they are said to do, and a robust rule helps where it should."""

from __future__ import annotations

import attacks
import numpy as np
import pytest
import torch

from sparsekit_fl.callbacks.base import Callback
from sparsekit_fl.client.messages import Evaluation
from sparsekit_fl.methods import registry
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

pytestmark = pytest.mark.slow


class Sent(Callback):
    def __init__(self):
        self.updates = {}

    def on_client_end(self, run, client_id, update):
        if isinstance(update, Evaluation):
            return
        self.updates[client_id] = update


@pytest.mark.parametrize("method", ["fedavg", "fedlps", "heterofl"])
@pytest.mark.same_bits
def test_a_hostile_client_sends_a_multiple_of_its_honest_change_and_the_others_what_they_would(method):
    sent = []
    for factor in (1.0, -10.0):
        watch = Sent()
        engine = attacks.hostile_engine(frozenset({0, 1, 2, 3}), factor)
        config = tiny_config(rounds=1)
        run(registry[method](), tiny_problem(), tiny_clients(), config, engine=engine, callbacks=[watch])
        sent.append(watch.updates)
    assert len({client_id < 4 for client_id in sent[0]}) == 2
    for client_id, honest in sent[0].items():
        for name, delta in honest.delta.items():
            factor = -10 if client_id < 4 and delta.is_floating_point() else 1
            assert torch.equal(sent[1][client_id].delta[name], factor * delta)


def test_robust_rules_beat_the_mean_where_clients_are_alike_and_some_are_loud():
    clients = tiny_clients(8, examples=60)
    config = RunConfig(rounds=4, cohort=8, training=tiny_config().training, eval_every=4)
    accuracy = {}
    for rule, changes in attacks.RULES.items():
        result = attacks._run("fedavg", -10.0, frozenset({3}), (tiny_problem(), clients, config), **changes)
        accuracy[rule] = np.mean([attacks._accuracy(one.shared) for one in result.final.per_client if one.client_id != 3])
    assert min(accuracy["trimmed-mean"], accuracy["median"], accuracy["norm-clipped"]) > accuracy["mean"] + 0.1
