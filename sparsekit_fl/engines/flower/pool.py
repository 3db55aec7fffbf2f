"""GridPool: runs clients by messages over a Flower grid, of a simulation, of devices or of a test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from flwr.app import Message

from sparsekit.errors import DataError
from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import Assignment
from sparsekit_fl.client.packing import pack
from sparsekit_fl.engines.base import Reply, in_order
from sparsekit_fl.engines.flower.post import POLL_SECONDS, Carrier, Post
from sparsekit_fl.engines.flower.wire import content, join, part, read
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.engines.tasks import Answer, Task, TaskPool
from sparsekit_fl.errors import ClientError
from sparsekit_fl.results.state.store import ClientStore, MemoryRounds

_TTL_SECONDS = 12 * 3600.0
# Flower's simulation looks through all open messages for each of its nodes, ten times a second, and at each of our polls;
# with ten thousand clients to score at once it would do little else. As many as keep the workers busy are enough.
_MOST_OPEN = 50
# A look for nodes is a request to the SuperLink.
_LOOK_SECONDS = 2.0
# Of one message: what it says of them, and what its reply says, must fit into a header of 2**20 bytes.
_MOST_TASKS = 1000


class GridPool(TaskPool):
    """Runs clients on the nodes of a grid.

    Replies count by the client that they answer for, never by their order; memories are files of the nodes, or travel with the
    messages. A client that does not say its scores is asked twice.

    Args:
        carrier: The grid, and the node of each client.
        spec: The fixed parts of the run.
        store: The memories, where they travel.
        memory: "nodes" where nodes keep the memories of their clients; "server" where the server does, and sends them along.
        workers: Number of clients that train at once, for the record.
        timeout_seconds: Replies that take longer are given up; None waits for twelve hours.
        exports: Whether nodes send personal models to be written into the run's folder.
        grouped: Ask all clients of one node in one message, for nodes that start a process for each message.
        run: Id of the run, under which nodes keep memories.
        trusted: Nodes are ours; see `TaskPool`.
    """

    times_scored = 2

    def __init__(
        self,
        carrier: Carrier,
        spec: RunSpec,
        store: ClientStore,
        *,
        memory: Literal["nodes", "server"],
        workers: int,
        timeout_seconds: float | None = None,
        exports: bool = True,
        grouped: bool = False,
        run: str = "",
        trusted: bool = True,
    ) -> None:
        super().__init__(spec, workers)
        self.carrier, self.exports, self.trusted = carrier, exports, trusted
        self.carried = store if memory == "server" else None
        self._grouped, self._run = grouped, run
        self._ttl = _TTL_SECONDS if timeout_seconds is None else timeout_seconds

    def stream(self) -> GridStream:
        """Return what starts clients one by one, and gives their replies as they come in."""
        return GridStream(self)

    def await_clients(self, ids: Collection[int], needed: int) -> None:
        self.carrier.await_clients(ids, needed)

    def news(self) -> list[str]:
        return self.carrier.news()

    @cached_property
    def _most(self) -> int:
        """Bytes of a reply about one client; a longer one is refused."""
        return max(4 * sum(tensor.nbytes for tensor in self.spec.initial.values()), 2**24)

    def answers(self, tasks: Sequence[Task], state: StateDict, *, times: int = 1) -> Iterator[Answer]:
        scored = any(task.header["task"] == "evaluate" for task in tasks)
        return in_order(self._exchange(tasks, pack(dict(state), {"kind": "state"}) if scored else b"", times), len(tasks))

    def _exchange(self, tasks: Sequence[Task], shared: bytes, times: int) -> Iterator[tuple[int, Answer]]:
        """Send all, and yield what comes back; where nothing usable does, send again, so many times in all."""
        places = {task: place for place, task in enumerate(tasks)}
        waiting = list(tasks)
        while waiting:
            times -= 1
            self.carrier.look(wait=True)
            # Nodes that start a process for each message get theirs at once: each is a device, and slow ones delay no other.
            post = self.post(shared, most=None if self._grouped else max(_MOST_OPEN, 8 * self.workers))
            post.add(self._groups(waiting))
            waiting = []
            for asked, reply in post.answers():
                for task, answer in zip(asked, self.read(reply, len(asked)), strict=True):
                    if times and "failure" in answer[0]:
                        waiting.append(task)
                    else:
                        yield places[task], answer

    def post(self, shared: bytes = b"", *, most: int | None = None) -> Post[tuple[Task, ...]]:
        """Return what carries messages of tasks for one node, each with `shared`; at most `most` are open at once."""
        return Post(
            self.carrier,
            partial(self._message, shared),
            lambda tasks: self.carrier.node_of(tasks[0].header["client"]),
            ttl=self._ttl,
            most=most,
            trusted=self.trusted,
        )

    def _groups(self, tasks: Sequence[Task]) -> list[tuple[Task, ...]]:
        """The tasks of each message."""
        by_node: dict[Any, list[Task]] = {}
        for task in tasks:
            node: Any = task
            if self._grouped:
                with contextlib.suppress(ClientError):  # the post says why
                    node = self.carrier.node_of(task.header["client"])
            by_node.setdefault(node, []).append(task)
        return [tuple(asked[i : i + _MOST_TASKS]) for asked in by_node.values() for i in range(0, len(asked), _MOST_TASKS)]

    def _message(self, shared: bytes, tasks: Sequence[Task], node: int) -> Message:
        header = {"tasks": [task.header for task in tasks], "run": self._run}
        record = content(header, shared=shared, **join([task.payloads for task in tasks]))
        return Message(record, node, tasks[0].header["task"], ttl=self._ttl, group_id=str(tasks[0].header["round"]))

    def read(self, message: Message | str, count: int) -> list[Answer]:
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


class GridStream:
    """Clients on the nodes of a grid, started one by one; see `engines.base.ClientStream`."""

    def __init__(self, pool: GridPool) -> None:
        self._pool, self._carrier, self._post = pool, pool.carrier, pool.post()
        self._tasks: dict[int, tuple[Assignment, Task]] = {}
        self._early: list[tuple[tuple[Task, ...], Message | str]] = []  # came while others were sent
        self._looked = float("-inf")

    def free(self, ids: Collection[int]) -> dict[int, int]:
        self._carrier.look()
        self._looked = time.monotonic()
        found = {}
        for id in ids:
            with contextlib.suppress(ClientError):  # its node is away
                place = self._carrier.node_of(id) if self._carrier.exclusive else id
                if id not in self._tasks and place not in self._post.busy:
                    found[id] = place
        return found

    def start(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> None:
        tasks = [self._pool.training(one, memory_rounds) for one in assignments]
        self._tasks.update({one.client_id: (one, task) for one, task in zip(assignments, tasks, strict=True)})
        self._post.add((task,) for task in tasks)
        self._early += self._post.poll()

    def arrived(self) -> list[Reply]:
        while self._tasks:
            found, self._early = [*self._early, *self._post.poll()], []
            if found:
                replies = [(self._tasks.pop(task.header["client"]), self._pool.read(said, 1)) for (task,), said in found]
                return [self._pool.reply(*asked, answer) for asked, (answer,) in replies]
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._looked = time.monotonic()
                if self._carrier.look():
                    break
            time.sleep(POLL_SECONDS)
        return []
