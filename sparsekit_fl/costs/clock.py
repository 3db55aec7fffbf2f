"""Simulated seconds from cost and capability; a round lasts as long as its slowest client, unless its method says otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sparsekit_fl.problem.clients import Capability
from sparsekit_fl.wire.messages import WorkCost


def client_seconds(cost: WorkCost, capability: Capability) -> float:
    """Return the seconds that a device of this capability needs: download, train, upload, one after the other.

    Args:
        cost: Needs `flops_compact` and `flops_scoring`, whose seconds are left out, `downlink_bytes` and `uplink_bytes`.
        capability: What the device can do in the round.
    """
    return (
        cost.downlink_bytes / capability.downlink_bytes_per_second
        + cost.flops_compact_training / capability.flops_per_second
        + cost.uplink_bytes / capability.uplink_bytes_per_second
    )


def scoring_seconds(cost: WorkCost, capability: Capability) -> float:
    """Return the seconds that a device of this capability needs for the passes by which its method decides.

    Args:
        cost: Needs `flops_scoring`.
        capability: What the device can do in the round.
    """
    return max(0, cost.flops_scoring) / capability.flops_per_second


def round_cost(costs: Iterable[WorkCost], *, wall_seconds: float, seconds: float | None = None) -> WorkCost:
    """Add up the work of all clients; the seconds are those of the slowest one.

    Args:
        costs: One per client.
        wall_seconds: Measured for the whole round; the clients' own wall seconds overlap and are not added.
        seconds: Simulated length of a round that does not wait for its slowest client.
    """
    costs = list(costs)
    if seconds is None:
        seconds = max((cost.seconds for cost in costs), default=0.0)
        # The slowest with scoring may be another client than the slowest without.
        scoring = max((cost.simulated_seconds for cost in costs), default=0.0) - seconds
    else:
        scoring = 0.0
    return replace(sum(costs, WorkCost()), seconds=seconds, scoring_seconds=scoring, wall_seconds=wall_seconds)
