"""GridStream: clients on the nodes of a grid, started one by one; replies are read in the order in which they come in."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from flwr.app import Message

from sparsekit_fl.engines.base import Reply
from sparsekit_fl.engines.flower.post import POLL_SECONDS, Carrier, Post
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.state.store import Versions
from sparsekit_fl.wire.messages import Assignment

__all__ = ["GridDiedError", "GridStream"]

# A look is a request to the SuperLink.
_LOOK_SECONDS = 2.0


class GridDiedError(WorkerDiedError):
    """What runs the clients behind a grid is damaged, and must be started anew."""


class _Sent(NamedTuple):
    """A task that was sent.

    Args:
        assignment: What the client does.
        version: The round of its memory; None where it has none.
        task: As the pool wrote it.
        node: Where it went.
    """

    assignment: Assignment
    version: int | None
    task: Any
    node: int


class GridStream:
    """Tasks under way on the nodes of a grid; see `engines.base.ClientStream`.

    Args:
        carrier: The grid, and the node of each client.
        write: (assignment, versions, node) → task and message.
        answer: (assignment, task, message or why there is none) → reply.
        ttl: Seconds after which a reply is given up.
    """

    def __init__(
        self,
        carrier: Carrier,
        write: Callable[[Assignment, Versions, int], tuple[Any, Message]],
        answer: Callable[[Assignment, Any, Message | str], Reply],
        *,
        ttl: float,
    ) -> None:
        self._carrier, self._write, self._answer, self._ttl = carrier, write, answer, ttl
        self._post: Post[int] = Post(carrier.grid, ttl=ttl)
        self._sent: dict[int, _Sent] = {}
        self._failed: list[Reply] = []
        self._looked = float("-inf")

    def free(self, ids: Collection[int]) -> list[int]:
        """Return those of these clients whose node is there and has nothing to do."""
        self._carrier.look()
        self._looked = time.monotonic()
        found, busy = [], {sent.node for sent in self._sent.values()} if self._carrier.exclusive else set()
        for id in ids:
            if id not in self._sent:
                try:
                    node = self._carrier.node_of(id)
                except ClientError:
                    continue
                if node not in busy:
                    found.append(id)
        return found

    def apart(self, ids: Collection[int]) -> list[int]:
        """Return of these clients the first of each node; all of them where any node serves any client."""
        if not self._carrier.exclusive:
            return list(ids)
        first: dict[int, int] = {}
        for id in ids:
            first.setdefault(self._carrier.node_of(id), id)
        return list(first.values())

    def start(self, assignments: Sequence[Assignment], versions: Versions) -> None:
        """Send tasks to clients that are free, at most one for each node.

        Args:
            assignments: One per client.
            versions: The memory of each client that counts.
        """
        self._send((assignment, versions.get(assignment.client_id)) for assignment in assignments)

    def _send(self, tasks: Iterable[tuple[Assignment, int | None]]) -> None:
        messages: dict[int, Message] = {}
        for assignment, version in tasks:
            id = assignment.client_id
            try:
                node = self._carrier.node_of(id)
            except ClientError as error:
                self._failed.append(Reply(client_id=id, error=error))
                continue
            task, messages[id] = self._write(assignment, {} if version is None else {id: version}, node)
            self._sent[id] = _Sent(assignment, version, task, node)
        for id in self._post.send(messages):
            sent = self._sent.pop(id)
            self._failed.append(self._answer(sent.assignment, sent.task, "its node is gone"))

    def arrived(self) -> list[Reply]:
        """Wait until a reply has come, or a node, or until nobody is under way.

        Returns:
            Replies in the order in which they came; none where a node came.
        """
        while True:
            found, self._failed = self._failed, []
            try:
                for id, message in self._post.poll():
                    # Read before it is taken off the list, so that it is sent again where the grid is damaged.
                    found.append(self._answer(self._sent[id].assignment, self._sent[id].task, message))
                    del self._sent[id]
            except GridDiedError as error:
                self._carrier.restart(str(error))
                self._post = Post(self._carrier.grid, ttl=self._ttl)
                again = list(self._sent.values())
                self._sent = {}
                self._send((sent.assignment, sent.version) for sent in again)
            if found or not self._sent:
                return found
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._looked = time.monotonic()
                if self._carrier.look():
                    return []
            time.sleep(POLL_SECONDS)
