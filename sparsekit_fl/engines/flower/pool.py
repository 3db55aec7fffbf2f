"""GridPool: runs clients by messages over a Flower grid, of a simulation, of devices or of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from flwr.app import Message

from sparsekit.errors import DataError
from sparsekit_fl.checkpoint import Memories, write_atomically
from sparsekit_fl.client.messages import MAX_TEXT, Reply, Request, Wire, decode_reply, encode_request
from sparsekit_fl.client.packing import pack
from sparsekit_fl.engines.flower.post import Carrier, Post
from sparsekit_fl.engines.flower.wire import content, join, part, read
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.spec import RunSpec

T = TypeVar("T")

_TTL_SECONDS = 12 * 3600.0
# Flower's simulation looks through all open messages for each of its nodes, ten times a second, and at each of our polls;
# with ten thousand clients to score at once it would do little else. As many as keep the workers busy are enough.
_MOST_OPEN = 50
# Of one message: what it says of them, and what its reply says, must fit into a header of 2**20 bytes.
_MOST_TASKS = 1000


@dataclass(frozen=True, eq=False)
class _Task:
    """A request as it is sent."""

    request: Request
    wire: Wire

    @property
    def who(self) -> str:
        return f"client {self.request.client_id} in round {self.request.round}"


class GridPool:
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
        carried: Memories | None = None,
        timeout_seconds: float | None = None,
        run: str = "",
    ) -> None:
        self.spec, self.workers = spec, workers
        self.carrier, self.carried, self._run = carrier, carried, run
        # Processes of ours: a broken one stops the run. No device can stop the others, whatever it says.
        self.trusted = not carrier.devices
        self._ttl = _TTL_SECONDS if timeout_seconds is None else timeout_seconds

    def __call__(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Run clients; yield their replies in the order of the requests."""
        tasks = [self._task(request) for request in requests]
        for task, (header, payloads) in zip(tasks, _in_order(self._exchange(tasks), len(tasks)), strict=True):
            try:
                reply = self._reply(task, header, payloads)
            except (ClientError, DataError) as error:
                reply = Reply(client_id=task.request.client_id, round=task.request.round, error=str(error))
            travelled = sum(len(sent.get("memory", b"")) for sent in (task.wire[1], payloads))
            note = "; ".join([*self.carrier.news(), *([reply.note] if reply.note else [])])
            yield replace(reply, memory_bytes=travelled, note=note)

    def _task(self, request: Request) -> _Task:
        header, payloads = encode_request(request, self.spec.graph, with_state=request.task == "train")
        if self.carried is not None and request.memory_round is not None:
            with contextlib.suppress(FileNotFoundError):  # whoever trains the client says that it did not come
                path = self.carried.path(request.client_id, request.memory_round)
                payloads = {**payloads, "memory": path.read_bytes()}
        return _Task(request, (header, payloads))

    def _reply(self, task: _Task, header: Any, payloads: Any) -> Reply:
        """Return the reply to a task; raise what ends the run, or ClientError and DataError for this client alone."""
        request, who = task.request, f"{task.who}: " if task.request.task == "train" else ""
        text = str(header.get("error") or header.get("broken") or "")[:MAX_TEXT]
        where = f"Where it failed:\n{str(header.get('traceback', ''))[:MAX_TEXT]}"
        if "failure" in header:
            raise ClientError(f"{who}{str(header['failure'])[:MAX_TEXT]}")
        if header.get("broken") and self.trusted:
            error: Exception = WorkerDiedError(f"{who}the process that runs it failed: {text}")
            if type(header.get("errno")) is int:
                error = OSError(header["errno"], text)
            error.add_note(where)
            raise error
        if header.get("broken"):
            raise ClientError(f"{who}its node failed: {text}\n{where}"[:MAX_TEXT])
        try:
            reply = decode_reply((header, payloads), request, self.spec.graph)
        except DataError as error:
            raise ClientError(f"{task.who} sent no valid update: {error}" if who else str(error)) from None
        if reply.stored and self.carried is not None:
            if not payloads.get("memory"):
                raise ClientError(f"{task.who} sent its update without its memory")
            write_atomically(
                self.carried.path(request.client_id, request.round), payloads["memory"], durable=self.carried.durable
            )
        return reply

    @cached_property
    def _most(self) -> int:
        """Bytes of a reply about one client; a longer one is refused."""
        return max(4 * sum(tensor.nbytes for tensor in self.spec.initial.values()), 2**24)

    def _exchange(self, tasks: Sequence[_Task]) -> Iterator[tuple[int, Wire]]:
        """Send all, and yield what comes back; scores that do not come are asked for once more."""
        places = {task: place for place, task in enumerate(tasks)}
        waiting, again = list(tasks), bool(tasks) and tasks[0].request.task != "train"
        shared = pack(dict(tasks[0].request.state), {"kind": "state"}) if again else b""
        while waiting:
            self.carrier.look(wait=True)
            if tasks[0].request.task == "train":
                needed = self.spec.config.needed_replies(len(tasks))
                self.carrier.await_clients([task.request.client_id for task in tasks], needed)
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

    def _new_post(self, shared: bytes = b"") -> Post[tuple[_Task, ...]]:
        """Return what carries messages of tasks for one node, each with `shared`."""
        return Post(
            self.carrier,
            partial(self._message, shared),
            lambda tasks: self.carrier.node_of(tasks[0].request.client_id),
            ttl=self._ttl,
            # Devices get theirs at once, so that slow ones delay no other.
            most=None if self.carrier.devices else max(_MOST_OPEN, 8 * self.workers),
        )

    def _groups(self, tasks: Sequence[_Task]) -> list[tuple[_Task, ...]]:
        """The tasks of each message."""
        by_node: dict[Any, list[_Task]] = {}
        for task in tasks:
            node: Any = task
            if self.carrier.devices:
                with contextlib.suppress(ClientError):  # the post says why
                    node = self.carrier.node_of(task.request.client_id)
            by_node.setdefault(node, []).append(task)
        return [tuple(asked[i : i + _MOST_TASKS]) for asked in by_node.values() for i in range(0, len(asked), _MOST_TASKS)]

    def _message(self, shared: bytes, tasks: Sequence[_Task], node: int) -> Message:
        header = {"tasks": [task.wire[0] for task in tasks], "run": self._run}
        record = content(header, shared=shared, **join([task.wire[1] for task in tasks]))
        request = tasks[0].request
        kind = "train" if request.task == "train" else "evaluate"
        return Message(record, node, kind, ttl=self._ttl, group_id=str(request.round))

    def _read(self, message: Message | str, count: int) -> list[Wire]:
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


def _in_order(answers: Iterator[tuple[int, T]], count: int) -> Iterator[T]:
    """Yield the answers to `count` tasks in the order of their positions, each as soon as it and those before it are there."""
    done: dict[int, T] = {}
    for position in range(count):
        while position not in done:
            found, answer = next(answers)
            done[found] = answer
        yield done.pop(position)
