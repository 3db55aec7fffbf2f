"""GridPool: runs clients by messages over a Flower grid, of a simulation, of devices or of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

from flwr.app import Message

from sparsekit.errors import DataError
from sparsekit.graph import StateDict
from sparsekit_fl.client.packing import pack
from sparsekit_fl.engines.base import in_order
from sparsekit_fl.engines.flower.post import Carrier, Post
from sparsekit_fl.engines.flower.wire import content, join, part, read
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.engines.tasks import Answer, Task, TaskPool
from sparsekit_fl.errors import ClientError
from sparsekit_fl.results.state.store import ClientStore

_TTL_SECONDS = 12 * 3600.0
# Flower's simulation looks through all open messages for each of its nodes, ten times a second, and at each of our polls;
# with ten thousand clients to score at once it would do little else. As many as keep the workers busy are enough.
_MOST_OPEN = 50
# Of one message: what it says of them, and what its reply says, must fit into a header of 2**20 bytes.
_MOST_TASKS = 1000


class GridPool(TaskPool):
    """Runs clients on the nodes of a grid.

    Replies count by the client that they answer for, never by their order. Scores that do not come are asked for twice.

    Args:
        carrier: The grid, and the node of each client. Of devices all clients of one are asked in one message.
        spec: The fixed parts of the run.
        workers: Number of clients that train at once, for the record.
        carried: The memories, which travel with the messages; None where nodes keep those of their clients.
        timeout_seconds: Replies that take longer are given up; None waits for twelve hours.
        run: Id of the run, under which nodes keep memories.
    """

    def __init__(
        self,
        carrier: Carrier,
        spec: RunSpec,
        *,
        workers: int,
        carried: ClientStore | None = None,
        timeout_seconds: float | None = None,
        run: str = "",
    ) -> None:
        super().__init__(spec, workers)
        self.carrier, self.carried, self._run = carrier, carried, run
        self.exports = self.trusted = not carrier.devices
        self._ttl = _TTL_SECONDS if timeout_seconds is None else timeout_seconds

    def await_clients(self, ids: Collection[int], needed: int) -> None:
        self.carrier.await_clients(ids, needed)

    def news(self) -> list[str]:
        return self.carrier.news()

    @cached_property
    def _most(self) -> int:
        """Bytes of a reply about one client; a longer one is refused."""
        return max(4 * sum(tensor.nbytes for tensor in self.spec.initial.values()), 2**24)

    def answers(self, tasks: Sequence[Task], state: StateDict) -> Iterator[Answer]:
        return in_order(self._exchange(tasks, state), len(tasks))

    def _exchange(self, tasks: Sequence[Task], state: StateDict) -> Iterator[tuple[int, Answer]]:
        """Send all, and yield what comes back; scores that do not come are asked for once more."""
        places = {task: place for place, task in enumerate(tasks)}
        waiting, again = list(tasks), tasks[0].header["task"] == "evaluate"
        shared = pack(dict(state), {"kind": "state"}) if again else b""
        while waiting:
            self.carrier.look(wait=True)
            post = self._new_post(shared)
            post.add(self._groups(waiting))
            waiting = []
            for asked, reply in post.answers():
                for task, answer in zip(asked, self._read(reply, len(asked)), strict=True):
                    if again and "failure" in answer[0]:
                        waiting.append(task)
                    else:
                        yield places[task], answer
            again = False

    def _new_post(self, shared: bytes = b"") -> Post[tuple[Task, ...]]:
        """Return what carries messages of tasks for one node, each with `shared`."""
        return Post(
            self.carrier,
            partial(self._message, shared),
            lambda tasks: self.carrier.node_of(tasks[0].header["client"]),
            ttl=self._ttl,
            # Devices get theirs at once, so that slow ones delay no other.
            most=None if self.carrier.devices else max(_MOST_OPEN, 8 * self.workers),
        )

    def _groups(self, tasks: Sequence[Task]) -> list[tuple[Task, ...]]:
        """The tasks of each message."""
        by_node: dict[Any, list[Task]] = {}
        for task in tasks:
            node: Any = task
            if self.carrier.devices:
                with contextlib.suppress(ClientError):  # the post says why
                    node = self.carrier.node_of(task.header["client"])
            by_node.setdefault(node, []).append(task)
        return [tuple(asked[i : i + _MOST_TASKS]) for asked in by_node.values() for i in range(0, len(asked), _MOST_TASKS)]

    def _message(self, shared: bytes, tasks: Sequence[Task], node: int) -> Message:
        header = {"tasks": [task.header for task in tasks], "run": self._run}
        record = content(header, shared=shared, **join([task.payloads for task in tasks]))
        return Message(record, node, tasks[0].header["task"], ttl=self._ttl, group_id=str(tasks[0].header["round"]))

    def _read(self, message: Message | str, count: int) -> list[Answer]:
        """Return what a reply answers to each of its `count` tasks."""
        try:
            if isinstance(message, str):
                raise DataError(message)
            if message.has_error():
                raise DataError(f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})")
            header, payloads = read(message, max_bytes=count * self._most)
            replies = header.get("replies")
            if not isinstance(replies, list) or len(replies) != count or not all(isinstance(one, dict) for one in replies):
                raise DataError(f"expected {count} replies")
        except DataError as error:
            return [({"failure": str(error)}, {})] * count
        return [(reply, part(payloads, place)) for place, reply in enumerate(replies)]
