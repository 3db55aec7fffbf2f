"""Flights: asynchronous rounds over any engine. Clients train all the time, and the server steps when enough have come in.

The clock is simulated: a client is under way for as long as its capability says that its work takes, so any engine, any number
of workers and any resume give the same bits. What a client makes depends on the model that it started from and not on the
moment, so the clients of one model version are trained together; the clock then decides who comes in when and who starts where.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sparsekit.errors import InvalidValueError
from sparsekit_fl.context.memory import Memory
from sparsekit_fl.context.server import ServerContext
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.policies.aggregate import AggregatePolicy
from sparsekit_fl.policies.sampling import SamplingPolicy
from sparsekit_fl.wire.messages import Update, decode_update, encode_update

__all__ = ["Arrival", "Flights", "Landing", "by_wall_clock", "came_in", "flights_of"]


@dataclass(frozen=True, eq=False)
class Arrival:
    """An update that came in.

    Args:
        update: As the client made it.
        age: Aggregations since the client received its model.
    """

    update: Update
    age: int

    def counted(self, staleness: float) -> Update:
        """The update with its changes times (1 + age)^-staleness; integers, which count batches, as they are."""
        if not self.age or not staleness:
            return self.update
        factor = (1 + self.age) ** -staleness
        delta = {name: value * factor if value.is_floating_point() else value for name, value in self.update.delta.items()}
        return replace(self.update, delta=delta)


@dataclass(frozen=True, eq=False)
class Landing:
    """What a step of the server takes, and the state of the clock behind it.

    Args:
        arrivals: In the order in which they came in.
        now: Simulated seconds since the start of the run.
        left: (end, order, base, update) of each client that is still under way.
        order: Number of clients that have started so far.
    """

    arrivals: tuple[Arrival, ...]
    now: float
    left: tuple[tuple[float, int, int, Update], ...]
    order: int


def by_wall_clock(config: RunConfig) -> bool:
    """Whether the wall clock decides who comes in first."""
    return config.async_buffer is not None and config.async_clock == "wall"


def came_in(arrivals: Sequence[Arrival]) -> str:
    """Return a text for the record of a round: who came in, in this order, and the age of what they received."""
    ages = ", ".join(f"{arrival.update.client_id} ({arrival.age})" for arrival in arrivals)
    return f"asynchronous: clients that came in, and the age of what they received: {ages}"


class Flights:
    """Clients under way, kept in the server's memory.

    In each step of the server clients are sampled from those that are not under way. As soon as one comes in, the next starts,
    so that `cohort` clients train at any time where there are enough. With `async_buffer` updates the server aggregates.

    Args:
        config: Has `cohort` and `async_buffer`.
        memory: Lives from round to round.

    Source: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation (FedBuff), AISTATS 2022
        (arXiv 2106.06639), algorithm 1; that a client which comes in is sampled again only after the next aggregation is ours.
    """

    def __init__(self, config: RunConfig, memory: Memory) -> None:
        assert config.async_buffer is not None
        self._cohort, self._buffer, self._staleness = config.cohort, config.async_buffer, config.async_staleness
        self._memory = memory

    @property
    def now(self) -> float:
        """Simulated seconds since the start of the run."""
        return float(self._memory.get("now", 0.0))

    def _under_way(self) -> list[tuple[float, int, int, Update]]:
        return [
            (float(one["end"]), int(one["order"]), int(one["base"]), decode_update(one["update"].numpy().tobytes()))
            for one in self._memory.get("flights", [])
        ]

    def sampling(self, ctx: ServerContext) -> ServerContext:
        """Return the context that samples those who start in this step: from clients that are not under way."""
        busy = {int(one["client"]) for one in self._memory.get("flights", [])}
        idle = [id for id in ctx.roster if id not in busy]
        starting = self._cohort - len(busy) + self._buffer - 1
        return replace(ctx.reaching(idle), cohort=max(0, min(starting, len(idle))))

    def land(self, updates: Sequence[Update], round: int) -> Landing:
        """Let clients start and come in until the buffer is full; nothing is changed before `take`.

        Args:
            updates: Of the clients that start in this step, in the order in which they start.
            round: The step, counted from 1.

        Returns:
            The updates that the server aggregates now: fewer than asked for where no more client is under way.
        """
        now, order = self.now, int(self._memory.get("order", 0))
        flying = self._under_way()
        heapq.heapify(flying)
        waiting = list(updates)
        arrivals: list[Arrival] = []
        while len(arrivals) < self._buffer:
            while waiting and len(flying) < self._cohort:
                update = waiting.pop(0)
                heapq.heappush(flying, (now + update.cost.simulated_seconds, order, round - 1, update))
                order += 1
            if not flying:
                break
            now, _, base, update = heapq.heappop(flying)
            arrivals.append(Arrival(update, round - 1 - base))
        # Who did not start in this step has trained for nothing else: it starts now.
        for update in waiting:
            heapq.heappush(flying, (now + update.cost.simulated_seconds, order, round - 1, update))
            order += 1
        return Landing(tuple(arrivals), now, tuple(sorted(flying, key=lambda one: one[:2])), order)

    def take(self, landing: Landing) -> list[tuple[Update, int]]:
        """Keep the state behind a landing, and return what is aggregated: updates, scaled by their age, and ages."""
        self._memory.update(
            now=landing.now,
            order=landing.order,
            flights=[
                {"client": update.client_id, "end": end, "order": order, "base": base, "update": _packed(update)}
                for end, order, base, update in landing.left
            ],
        )
        return [(arrival.counted(self._staleness), arrival.age) for arrival in landing.arrivals]


def _packed(update: Update) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(encode_update(update), dtype=np.uint8).copy())


def flights_of(method: Method, config: RunConfig, memory: Memory) -> Flights | None:
    """Make the flights of a run; None where its rounds wait for their cohort, or the wall clock decides who comes in first.

    Args:
        method: Must leave to the run which updates count when, and add up updates by `AggregatePolicy`.
        config: Has the options.
        memory: Of the whole server.

    Raises:
        InvalidValueError: the method cannot run asynchronously; says why.
    """
    if config.async_buffer is None:
        return None
    sampling, aggregate = type(method.sampling), type(method.aggregate)
    for name in ("arrivals", "seconds"):
        if getattr(sampling, name) is not getattr(SamplingPolicy, name):
            raise InvalidValueError(
                f"method {method.name!r} cannot run with async_buffer: {sampling.__name__} decides itself"
                f" {'which updates count' if name == 'arrivals' else 'how long a round lasts'}"
            )
    if any(getattr(aggregate, name) is not getattr(AggregatePolicy, name) for name in ("init", "finish")):
        raise InvalidValueError(
            f"method {method.name!r} cannot run with async_buffer: {aggregate.__name__} changes the model beside adding up"
            " updates, and clients that are under way would not know"
        )
    if by_wall_clock(config):
        return None
    return Flights(config, memory.setdefault("asynchronous", {}))
