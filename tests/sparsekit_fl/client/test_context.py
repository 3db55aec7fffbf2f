"""Contexts: a generator for each purpose."""

from typing import get_args

import numpy as np

from sparsekit_fl.client.context import Purpose, Rngs


def test_generators_are_those_that_numpy_spawns_in_whatever_order_they_are_asked_for() -> None:
    purposes = get_args(Purpose)
    spawned = dict(zip(purposes, np.random.default_rng(5).spawn(len(purposes)), strict=True))
    lazy = Rngs(np.random.default_rng(5))
    assert [lazy[one].random() for one in reversed(purposes)] == [spawned[one].random() for one in reversed(purposes)]
    assert lazy["local"] is lazy["local"]
