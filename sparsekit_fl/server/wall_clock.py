"""WallClock: asynchronous rounds in which clients come in when they do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sparsekit_fl.engines.base import ClientStream, Reply
from sparsekit_fl.errors import ClientError, TooFewRepliesError, UpdateError
from sparsekit_fl.server.asynchronous import Arrival, came_in
from sparsekit_fl.server.server import Aggregated, Server
from sparsekit_fl.wire.messages import Assignment, Update

__all__ = ["Step", "WallClock"]

_REPEATS = 2
_MOST_REASONS = 5


@dataclass(frozen=True, eq=False)
class Step:
    """What happened until the server had its updates.

    Args:
        started: Assignments of the clients that started, in this order.
        replies: What came in, in this order.
        aggregated: The updates that count.
        dropped: Client id → why its work does not count.
    """

    started: tuple[Assignment, ...]
    replies: tuple[Reply, ...]
    aggregated: Aggregated
    dropped: Mapping[int, Exception]


class WallClock:
    """Steps of the server by the wall clock.

    `cohort` clients are under way where there are enough and their nodes are free; whoever comes in makes room for the next at
    once. With `async_buffer` valid updates the server aggregates, in the order of the clients' ids. A client that came in, or
    failed, is sampled again only in the next step: from the same model it would learn the same. Where nobody is under way, and
    nobody can start, the server takes what there is, if that is `min_replies`; otherwise those who failed are asked again,
    twice at most.

    An update depends on the client, the model that it started from and its step, and on no clock; who comes in when does.

    Args:
        server: Its config has `cohort`, `async_buffer` and `async_staleness`.
        stream: Starts clients and gives their replies.
        told: Called with a client's id and its update, or None where it failed.

    Source: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation (FedBuff), AISTATS 2022
        (arXiv 2106.06639), algorithm 1.
    """

    def __init__(self, server: Server, stream: ClientStream, *, told: Callable[[int, Update | None], None]) -> None:
        self._server, self._stream, self._told = server, stream, told
        config = server.spec.config
        assert config.async_buffer is not None
        self._cohort, self._buffer = config.cohort, config.async_buffer
        self._needed = config.needed_replies(self._buffer)
        self._under_way: dict[int, Assignment] = {}
        # Came in together with the last one that a step needed.
        self._waiting: deque[Reply] = deque()
        self._began = time.monotonic()

    def free(self, ids: list[int]) -> list[int]:
        """Return those of these clients whose nodes have nothing to do."""
        return self._stream.free(ids)

    @property
    def under_way(self) -> list[int]:
        """Ids of clients whose updates have not been aggregated."""
        return sorted(self._under_way)

    def step(self, round: int, versions: Mapping[int, int], *, ids: list[int]) -> Step:
        """Start clients and take in what comes until the server can aggregate, and aggregate.

        Args:
            round: Of the server, counted from 1.
            versions: The memory of each client that counts.
            ids: All clients.

        Raises:
            TooFewRepliesError: too few updates were valid, and nobody is left to ask.
        """
        self._server.begin(round)
        started: list[Assignment] = []
        replies: list[Reply] = []
        landed: list[Arrival] = []
        dropped: dict[int, Exception] = {}
        done: set[int] = set()
        notes: list[str] = []
        while len(landed) < self._buffer:
            started += self._start([id for id in ids if id not in done], versions)
            if not self._under_way:
                if len(landed) >= self._needed:
                    break
                again = [id for id in dropped if id in done]
                text = self._missing(landed, dropped)
                if len(notes) == _REPEATS or not again:
                    raise TooFewRepliesError(f"step {round}: {text}")
                notes.append(f"asked again, since {text}")
                done -= set(again)
                continue
            if not self._waiting:
                self._waiting.extend(self._stream.arrived())
            while self._waiting and len(landed) < self._buffer:
                reply = self._waiting.popleft()
                if reply.update is not None:
                    reply = replace(reply, update=self._server.timed(reply.update))
                replies.append(reply)
                done.add(reply.client_id)
                self._told(reply.client_id, reply.update)
                try:
                    landed.append(Arrival(*self._landed(reply, round)))
                    dropped.pop(reply.client_id, None)
                except (ClientError, UpdateError) as error:
                    dropped[reply.client_id] = error
        self._server.take(landed)
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        updates = tuple(sorted((arrival.update for arrival in landed), key=lambda update: update.client_id))
        aggregated = Aggregated(updates, (), seconds, note="; ".join([came_in(landed), *notes]))
        return Step(tuple(started), tuple(replies), aggregated, dropped)

    def _start(self, ids: list[int], versions: Mapping[int, int]) -> list[Assignment]:
        """Start clients until there are enough under way, or no node is free; return their assignments."""
        started: list[Assignment] = []
        while (room := self._cohort - len(self._under_way)) > 0:
            free = [id for id in self._stream.free(ids) if id not in self._under_way]
            chosen = self._stream.apart(self._server.sample(free, room)) if free else []
            if not chosen:
                break
            # The order of draws for them must not depend on the order of nodes.
            assignments = self._server.write(sorted(chosen))
            self._under_way.update({assignment.client_id: assignment for assignment in assignments})
            self._stream.start(assignments, versions)
            started += assignments
        return started

    def _landed(self, reply: Reply, round: int) -> tuple[Update, int]:
        """Return a valid update and its age; raise ClientError or UpdateError where there is none."""
        assignment = self._under_way.pop(reply.client_id)
        if reply.update is None:
            assert reply.error is not None
            raise reply.error if isinstance(reply.error, ClientError) else ClientError(str(reply.error))
        return self._server.checked(reply.update, assignment), round - assignment.round

    def _missing(self, landed: list[Arrival], dropped: Mapping[int, Exception]) -> str:
        """Say why a step cannot end; the first reasons in full."""
        reasons = [f"client {client_id}: {str(error).rstrip('.')}" for client_id, error in dropped.items()]
        more = [f"and {len(reasons) - _MOST_REASONS} clients more"] if len(reasons) > _MOST_REASONS else []
        return (
            f"{len(landed)} updates came in, {self._needed} are needed (min_replies), nobody is under way and no other client"
            " can start; " + "; ".join([*reasons[:_MOST_REASONS], *more] or ["no node has a client that is not done"])
        )
