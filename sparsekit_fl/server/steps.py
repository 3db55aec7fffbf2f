"""Steps of the server: clients train, updates are checked, the model moves; in rounds, or without waiting.

Without waiting clients train all the time, and the server aggregates as soon as enough have come in. One loop and two clocks:
by the simulated clock a client is under way for as long as its capability says that its work takes, so any engine, any number
of workers and any resume give the same bits. By the wall clock clients come in when they do.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client.costs import round_cost
from sparsekit_fl.client.messages import Assignment, Update, WorkCost, decode_update, encode_update
from sparsekit_fl.engines.base import ClientPool, ClientStream, Reply, await_clients
from sparsekit_fl.errors import ClientError, TooFewRepliesError, UpdateError
from sparsekit_fl.results.state.store import MemoryRounds
from sparsekit_fl.server.server import Server

REPEATS = 2
"""Number of times that clients who failed are asked again before a run stops."""

_MOST_REASONS = 5
_log = logging.getLogger(__name__)

Told = Callable[[int, Update | None], None]
"""Called with a client's id and its update, or None where it failed."""


@dataclass(eq=False)
class Step:
    """What happens until the server has its updates.

    Args:
        round: Round of the server, counted from 1.
        memory_rounds: The memory of each client that counts.
        started: Assignments of the clients that started, in this order.
        replies: What came back, in this order; where clients were asked again, the last time.
        received: The valid updates among them.
        updates: What the server aggregated.
        dropped: Client id → why its work does not count.
        notes: For the record: why clients were asked again, and who came in when.
        cost: The work of all replies.
        landed: Of asynchronous steps what the server will aggregate, with its age, in the order in which it came in.
        done: Clients that have answered; asynchronously they are not asked again.
    """

    round: int
    memory_rounds: MemoryRounds
    started: list[Assignment] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    received: list[Update] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    dropped: dict[int, Exception] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cost: WorkCost = field(default_factory=WorkCost)
    landed: list[tuple[Update, int]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    def count(self, seconds: float | None) -> None:
        """Add the work of the replies to the cost; `seconds` where they did not wait for the slowest."""
        done = [reply.update.cost for reply in self.replies if reply.update is not None]
        self.cost += round_cost(done, wall_seconds=0.0, seconds=seconds)
        self.cost += WorkCost(memory_bytes=sum(reply.memory_bytes for reply in self.replies))

    def reasons(self) -> str:
        """Say why clients were dropped; the first reasons in full."""
        return shortened([f"client {client_id}: {str(error).rstrip('.')}" for client_id, error in self.dropped.items()])


def shortened(texts: Sequence[str]) -> str:
    """Join texts about clients; of many, the first."""
    more = [f"and {len(texts) - _MOST_REASONS} clients more"] if len(texts) > _MOST_REASONS else []
    return "; ".join([*texts[:_MOST_REASONS], *more])


class Steps(ABC):
    """How the server comes to its next model; `told` is told of every client that has trained."""

    def __init__(self, server: Server, pool: ClientPool, told: Told) -> None:
        self._server, self._pool, self._told = server, pool, told

    @property
    def under_way(self) -> list[int]:
        """Ids of clients whose updates have not been aggregated."""
        return []

    def free(self, ids: Collection[int]) -> list[int]:
        """Return those of these clients that can be scored now."""
        return list(ids)

    @abstractmethod
    def step(self, round: int, memory_rounds: MemoryRounds) -> Step:
        """Let clients train until the server can aggregate, and aggregate.

        Raises:
            TooFewRepliesError: too few updates were valid, also when clients were asked again.
        """

    def _receive(self, step: Step, assignment: Assignment, reply: Reply) -> Update | None:
        """Note a reply, with the simulated time of its scoring; return its update where that is valid."""
        if reply.update is not None:
            reply = replace(reply, update=self._server.with_scoring_time(reply.update))
        step.replies.append(reply)
        self._told(reply.client_id, reply.update)
        step.done.add(assignment.client_id)
        step.dropped.pop(assignment.client_id, None)
        error = reply.error or ClientError(f"client {assignment.client_id} sent no update")
        if reply.update is not None:
            try:
                step.received.append(self._server.validated(reply.update, assignment))
                return step.received[-1]
            except UpdateError as refused:
                error = refused
        step.dropped[assignment.client_id] = error
        return None


class Synchronous(Steps):
    """Rounds that wait for their whole cohort. One with too few valid updates changes nothing, and is sent out again."""

    def step(self, round: int, memory_rounds: MemoryRounds) -> Step:
        assignments = self._server.assign(round)
        needed = self._server.spec.config.needed_replies(len(assignments))
        step = Step(round, memory_rounds, started=assignments)
        while True:
            step.replies, step.received, step.dropped = [], [], {}
            replies = self._pool.map(assignments, memory_rounds) if assignments else ()
            for assignment, reply in zip(assignments, replies, strict=True):
                self._receive(step, assignment, reply)
            enough = len(step.received) >= needed
            step.count(self._server.aggregate(step.received) if enough else None)
            if enough:
                step.updates = step.received
                return step
            valid = f"{len(step.received)} of {len(step.replies)} updates were valid and {needed} are needed (min_replies)"
            text = f"{valid}; {step.reasons()}"
            _log.warning("round %d does not count: %s", round, text)
            if len(step.notes) == REPEATS:
                raise TooFewRepliesError(
                    f"round {round} was sent out {1 + REPEATS} times, and still {text}. Nothing of that round counted"
                ) from next(iter(step.dropped.values()), None)
            step.notes.append(f"repeated, since {text}")
            await_clients(self._pool, [assignment.client_id for assignment in assignments], needed)


class Asynchronous(Steps):
    """Steps of the server, in which at most `cohort` clients are under way.

    With `async_buffer` valid updates the server aggregates, in the order of the clients' ids. Where nobody is under way, and
    nobody can start, it takes what there is, if that is `min_replies`; otherwise those who failed are asked again, twice at
    most.

    Source: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation (FedBuff), AISTATS 2022 (arXiv 2106.06639),
        algorithm 1; that a client which came in is sampled again only after the next aggregation is ours: from the same model
        it would learn the same.
    """

    def __init__(self, server: Server, pool: ClientPool, told: Told) -> None:
        super().__init__(server, pool, told)
        config = server.spec.config
        assert config.async_buffer is not None
        self._cohort, self._buffer = config.cohort, config.async_buffer
        self._needed = config.needed_replies(self._buffer)

    @abstractmethod
    def _now(self) -> float:
        """Seconds, on the clock."""

    @abstractmethod
    def _start(self, step: Step, ids: list[int]) -> None:
        """Let clients start where there is room, of those that may be asked; their assignments go into the step."""

    @abstractmethod
    def _arrive(self, step: Step) -> None:
        """Wait for the next who come in; their updates go into the step."""

    def step(self, round: int, memory_rounds: MemoryRounds) -> Step:
        self._server.begin(round)
        ids = self._server.clients
        step, began = Step(round, memory_rounds), self._now()
        while len(step.landed) < self._buffer:
            self._start(step, [id for id in ids if id not in step.done])
            if self.under_way:
                self._arrive(step)
            elif len(step.landed) >= self._needed:
                break
            else:
                text = (
                    f"{len(step.landed)} updates came in, {self._needed} are needed (min_replies), nobody is under way and no"
                    f" other client can start; {step.reasons() or 'no node has a client that is not done'}"
                )
                if len(step.notes) == REPEATS:
                    raise TooFewRepliesError(f"step {round}: {text}. Nothing of that step counted")
                step.notes.append(f"asked again, since {text}")
                await_clients(self._pool, ids, self._needed - len(step.landed))
                step.done -= step.dropped.keys()
        # In the order of clients, so that the order in which they came in decides nothing.
        landed = sorted(step.landed, key=lambda arrival: arrival[0].client_id)
        step.updates = [update for update, _ in landed]
        self._server.aggregate(step.updates, [age for _, age in landed])
        step.count(self._now() - began)
        ages = ", ".join(f"{update.client_id} ({age})" for update, age in step.landed)
        came = f"asynchronous: clients that came in, and the age of what they received: {ages}"
        step.notes = ["; ".join([came, *step.notes])]
        return step


class Simulated(Asynchronous):
    """By the simulated clock, over any engine.

    What a client makes depends on the model that it started from and not on the moment. So those who will start in a step are
    trained together at its begin, by all workers; the clock then decides who starts and comes in when. Those who are under way
    are part of the server's memory, and of a checkpoint.
    """

    def __init__(self, server: Server, pool: ClientPool, told: Told) -> None:
        super().__init__(server, pool, told)
        # Who is under way, in the order of their starts: when each comes in, the step that it started in, its update.
        self._memory = server.state.memory.setdefault("asynchronous", {"now": 0.0, "flights": []})
        self._flights: list[dict[str, Any]] = self._memory["flights"]
        self._waiting: deque[Update] = deque()

    @property
    def under_way(self) -> list[int]:
        return sorted([*(one["client"] for one in self._flights), *(update.client_id for update in self._waiting)])

    def _now(self) -> float:
        return float(self._memory["now"])

    def _start(self, step: Step, ids: list[int]) -> None:
        busy = set(self.under_way)
        if not step.started or not busy:
            room = self._cohort - len(busy) + self._buffer - len(step.landed) - 1
            assignments = self._server.make_assignments(self._server.sample([id for id in ids if id not in busy], room))
            step.started += assignments
            replies = self._pool.map(assignments, step.memory_rounds) if assignments else ()
            for assignment, reply in zip(assignments, replies, strict=True):
                update = self._receive(step, assignment, reply)
                if update is not None:
                    self._waiting.append(update)
        while self._waiting and len(self._flights) < self._cohort:
            self._fly(step)

    def _fly(self, step: Step) -> None:
        update = self._waiting.popleft()
        sent = torch.from_numpy(np.frombuffer(encode_update(update), dtype=np.uint8).copy())
        end = self._now() + update.cost.simulated_seconds
        self._flights.append({"client": update.client_id, "end": end, "base": step.round, "update": sent})

    def _arrive(self, step: Step) -> None:
        ends = [one["end"] for one in self._flights]
        first = self._flights.pop(ends.index(min(ends)))  # of equals the one that started first
        self._memory["now"] = first["end"]
        step.landed.append((decode_update(first["update"].numpy().tobytes()), step.round - first["base"]))

    def step(self, round: int, memory_rounds: MemoryRounds) -> Step:
        step = super().step(round, memory_rounds)
        while self._waiting:
            # Who did not start in this step has trained for nothing else: it starts now.
            self._fly(step)
        return step


class Wall(Asynchronous):
    """By the wall clock, over nodes that answer one by one: whoever comes in makes room for the next at once.

    An update depends on the client, the model that it started from and its step, and on no clock; who comes in when does.

    Raises:
        InvalidValueError: the engine has no nodes.
    """

    def __init__(self, server: Server, pool: ClientPool, told: Told) -> None:
        super().__init__(server, pool, told)
        if not isinstance(pool, ClientStream):
            raise InvalidValueError(
                "async_clock 'wall' needs nodes that answer one by one: SuperNodes, or Flower's simulation (--engine flower);"
                " this engine has the simulated clock alone"
            )
        self._stream = pool
        self._asked: dict[int, Assignment] = {}
        # Came in together with the last one that a step needed.
        self._waiting: deque[Reply] = deque()

    @property
    def under_way(self) -> list[int]:
        return sorted(self._asked)

    def free(self, ids: Collection[int]) -> list[int]:
        return list(self._stream.free(ids))

    def _now(self) -> float:
        return time.monotonic()

    def _start(self, step: Step, ids: list[int]) -> None:
        while (room := self._cohort - len(self._asked)) > 0:
            free = {id: place for id, place in self._stream.free(ids).items() if id not in self._asked}
            # Policies sort; a node with several clients would always begin with the first.
            sampled = self._server.shuffled(self._server.sample(free, room)) if free else []
            if not sampled:
                return
            chosen = {free[id]: id for id in reversed(sampled)}
            # The order of draws for them must not depend on the order of nodes.
            assignments = self._server.make_assignments(sorted(chosen.values()))
            self._asked.update({assignment.client_id: assignment for assignment in assignments})
            self._stream.start(assignments, step.memory_rounds)
            step.started += assignments

    def _arrive(self, step: Step) -> None:
        if not self._waiting:
            self._waiting.extend(self._stream.arrived())
        while self._waiting and len(step.landed) < self._buffer:
            reply = self._waiting.popleft()
            assignment = self._asked.pop(reply.client_id)
            update = self._receive(step, assignment, reply)
            if update is not None:
                step.landed.append((update, step.round - assignment.round))
