"""Asynchronous steps: clients train all the time, and the server aggregates as soon as enough have come in.

One loop and two clocks. By the simulated clock a client is under way for as long as its capability says that its work takes, so
any engine, any number of workers and any resume give the same bits. By the wall clock clients come in when they do.

Source: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation (FedBuff), AISTATS 2022 (arXiv 2106.06639),
algorithm 1; that a client which came in is sampled again only after the next aggregation is ours: from the same model it would
learn the same.
"""

from __future__ import annotations

import heapq
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import torch

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client.messages import Assignment, Update, decode_update, encode_update
from sparsekit_fl.engines.base import ClientPool, ClientStream, Reply, await_clients
from sparsekit_fl.errors import TooFewRepliesError
from sparsekit_fl.results.state.store import MemoryRounds
from sparsekit_fl.server.server import Server
from sparsekit_fl.server.steps import REPEATS, Step, Steps, Told


class Asynchronous(Steps):
    """Steps of the server, in which at most `cohort` clients are under way.

    With `async_buffer` valid updates the server aggregates, in the order of the clients' ids. Where nobody is under way, and
    nobody can start, it takes what there is, if that is `min_replies`; otherwise those who failed are asked again, twice at
    most.
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

    def step(self, round: int, memory_rounds: MemoryRounds, *, ids: Sequence[int]) -> Step:
        self._server.begin(round)
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
        self._memory = server.state.memory.setdefault("asynchronous", {"now": 0.0, "order": 0, "flights": []})
        self._waiting: deque[Update] = deque()
        # (end, order of the start, step of the start, update)
        self._flying: list[tuple[float, int, int, Update]] = [
            (float(one["end"]), int(one["order"]), int(one["base"]), decode_update(one["update"].numpy().tobytes()))
            for one in self._memory["flights"]
        ]
        heapq.heapify(self._flying)

    @property
    def under_way(self) -> list[int]:
        return sorted(update.client_id for update in (*(one[-1] for one in self._flying), *self._waiting))

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
        while self._waiting and len(self._flying) < self._cohort:
            self._fly(step)

    def _fly(self, step: Step) -> None:
        update, order = self._waiting.popleft(), int(self._memory["order"])
        heapq.heappush(self._flying, (self._now() + update.cost.simulated_seconds, order, step.round, update))
        self._memory["order"] = order + 1

    def _arrive(self, step: Step) -> None:
        self._memory["now"], _, base, update = heapq.heappop(self._flying)
        step.landed.append((update, step.round - base))

    def step(self, round: int, memory_rounds: MemoryRounds, *, ids: Sequence[int]) -> Step:
        step = super().step(round, memory_rounds, ids=ids)
        while self._waiting:
            # Who did not start in this step has trained for nothing else: it starts now.
            self._fly(step)
        self._memory["flights"] = [
            {"client": update.client_id, "end": end, "order": order, "base": base, "update": _packed(update)}
            for end, order, base, update in sorted(self._flying, key=lambda one: one[:2])
        ]
        return step


def _packed(update: Update) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(encode_update(update), dtype=np.uint8).copy())


class Wall(Asynchronous):
    """By the wall clock, over nodes that answer one by one: whoever comes in makes room for the next at once.

    An update depends on the client, the model that it started from and its step, and on no clock; who comes in when does.

    Raises:
        InvalidValueError: the engine has no nodes.
    """

    def __init__(self, server: Server, pool: ClientPool, told: Told) -> None:
        super().__init__(server, pool, told)
        opened = getattr(pool, "stream", None)
        if opened is None:
            raise InvalidValueError(
                "async_clock 'wall' needs nodes that answer one by one: SuperNodes, or Flower's simulation (--engine flower);"
                " this engine has the simulated clock alone"
            )
        self._stream: ClientStream = opened()
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
