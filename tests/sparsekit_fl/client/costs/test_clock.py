"""Simulated seconds."""

from __future__ import annotations

import pytest

import sparsekit_fl as fl
from sparsekit_fl.client.costs import client_seconds, round_cost


def test_a_client_downloads_computes_and_uploads_one_after_the_other():
    capability = fl.Capability(0.5, flops_per_second=100.0, uplink_bytes_per_second=10.0, downlink_bytes_per_second=20.0)
    cost = fl.WorkCost(flops_compact=300, flops_rowmask=999, uplink_bytes=50, downlink_bytes=40)
    assert client_seconds(cost, capability) == pytest.approx(2.0 + 3.0 + 5.0)


def test_a_round_takes_as_long_as_its_slowest_client():
    costs = [
        fl.WorkCost(flops_compact=1, seconds=2.0, wall_seconds=9.0),
        fl.WorkCost(flops_compact=2, seconds=5.0, wall_seconds=9.0),
    ]
    assert round_cost(costs, wall_seconds=3.0) == fl.WorkCost(flops_compact=3, seconds=5.0, wall_seconds=3.0)


def test_a_round_without_work_costs_nothing():
    assert round_cost([], wall_seconds=0.0) == fl.WorkCost()


def test_a_round_may_end_before_its_slowest_client():
    assert round_cost([fl.WorkCost(seconds=5.0), fl.WorkCost(seconds=2.0)], wall_seconds=1.0, seconds=2.5).seconds == 2.5
