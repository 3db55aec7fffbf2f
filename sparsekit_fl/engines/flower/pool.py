"""GridPool: runs clients by messages over a Flower grid, of a simulation, of devices or of a test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from flwr.app import Message

from sparsekit.errors import DataError
from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import Assignment, Evaluation, decode_update, encode_assignment
from sparsekit_fl.client.packing import pack
from sparsekit_fl.engines.base import Reply, Scored, Unscored, in_order
from sparsekit_fl.engines.flower.post import POLL_SECONDS, Carrier, Post
from sparsekit_fl.engines.flower.wire import content, join, part, read
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.options.checked import Checked, Count, Positive
from sparsekit_fl.results.state.storage import write_atomically
from sparsekit_fl.results.state.store import ClientStore, MemoryRounds

_TTL_SECONDS = 12 * 3600.0
# Flower's simulation looks through all open messages for each of its nodes, ten times a second, and at each of our polls;
# with ten thousand clients to score at once it would do little else. As many as keep the workers busy are enough.
_MOST_OPEN = 50
# A look for nodes is a request to the SuperLink.
_LOOK_SECONDS = 2.0
# Of one message: what it says of them, and what its reply says, must fit into a header of 2**20 bytes.
_MOST_TASKS = 1000
# A device's text about its failure is cut here.
_MOST_TEXT = 4000


@dataclass(frozen=True, eq=False)
class Task:
    """What one client is asked.

    Args:
        header: Plain JSON values: "task" ("train" or "evaluate", Flower's type of the message), "client", "round", …
        payloads: Bytes by name.
        shared: Bytes that are the same for all tasks of a call.
    """

    header: Mapping[str, Any]
    payloads: Mapping[str, bytes]
    shared: bytes = b""


Answer = tuple[Mapping[str, Any], Mapping[str, bytes]]
"""Header and payloads of what came back; a header with "failure" says why nothing usable did."""


@dataclass(eq=False)
class GridPool(Checked):
    """Runs clients on the nodes of a grid.

    Every client is asked once a round, with all that it needs, and answers once. Replies count by the client that they
    answer for, never by their order; memories are files of the nodes, or travel with the messages.

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
        trusted: Nodes are ours, so one that is broken stops the run, or is replaced. Otherwise its clients are dropped,
            whatever its message is: no device can stop the others.
    """

    carrier: Carrier
    spec: RunSpec
    store: ClientStore
    _: KW_ONLY
    memory: Literal["nodes", "server"]
    workers: Count
    timeout_seconds: Positive | None = None
    exports: bool = True
    grouped: bool = False
    run: str = ""
    trusted: bool = True

    def map(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> Iterator[Reply]:
        tasks = [self.training(assignment, memory_rounds) for assignment in assignments]
        for assignment, task, answer in zip(assignments, tasks, self._answers(tasks), strict=True):
            yield self._reply(assignment, task, answer)

    def stream(self) -> GridStream:
        """Return what starts clients one by one, and gives their replies as they come in."""
        return GridStream(self, self.carrier)

    def await_clients(self, ids: Collection[int], needed: int) -> None:
        self.carrier.await_clients(ids, needed)

    @property
    def _carried(self) -> bool:
        return self.memory == "server"

    @cached_property
    def _most(self) -> int:
        """Bytes of a reply about one client; a longer one is refused."""
        return max(4 * sum(tensor.nbytes for tensor in self.spec.initial.values()), 2**24)

    @property
    def _ttl(self) -> float:
        return _TTL_SECONDS if self.timeout_seconds is None else self.timeout_seconds

    def training(self, assignment: Assignment, memory_rounds: MemoryRounds) -> Task:
        id, body = assignment.client_id, encode_assignment(assignment, self.spec.graph)
        return self._task("train", id, memory_rounds.get(id), assignment.round, body=body)

    def reply(self, assignment: Assignment, task: Task, message: Message | str) -> Reply:
        """Read the reply to a message of one task."""
        return self._reply(assignment, task, self._read(message, 1)[0])

    def _reply(self, assignment: Assignment, task: Task, answer: Answer) -> Reply:
        """Read a reply, and add what became of nodes."""
        travelled = sum(len(payloads.get("memory", b"")) for payloads in (task.payloads, answer[1]))
        try:
            reply = self._update(assignment, answer)
        except ClientError as error:
            reply = Reply(client_id=assignment.client_id, error=error)
        notes = [*self.carrier.news(), *([reply.note] if reply.note else [])]
        return replace(reply, memory_bytes=travelled, note="; ".join(notes))

    def _update(self, assignment: Assignment, answer: Answer) -> Reply:
        """The update that a client sent; raises ClientError where it sent none."""
        (header, payloads), who = answer, f"client {assignment.client_id} in round {assignment.round}"
        self._raise_failure(header, f"{who}: ")
        try:
            update = decode_update(payloads.get("body", b""), self.spec.graph)
        except DataError as error:
            raise ClientError(f"{who} sent no valid update: {error}") from None
        stored = header.get("stored") is True
        if stored and self._carried:
            if not payloads.get("memory"):
                raise ClientError(f"{who} sent its update without its memory")
            self.store.save(assignment.client_id, assignment.round, payloads["memory"])
        note = header.get("note")
        text = note[:_MOST_TEXT] if isinstance(note, str) else ""
        return Reply(client_id=assignment.client_id, update=update, stored=stored, note=text)

    def _raise_failure(self, header: Mapping[str, Any], who: str = "") -> None:
        """Raise what a reply says of a failure, if it does.

        Raises:
            ClientError: the client failed, or a node that is not ours.
            WorkerDiedError, OSError: a node of ours is broken, or cannot write: the run ends as with any other engine.
        """
        text = str(header.get("failure") or header.get("error") or header.get("broken") or "")[:_MOST_TEXT]
        if "failure" in header:
            raise ClientError(f"{who}{text}")
        if "error" in header:
            if self.trusted and type(header.get("errno")) is int:
                raise OSError(header["errno"], text)
            error = ClientError(text)
            error.add_note(f"On its node:\n{header.get('traceback', '')}")
            raise error
        if "broken" in header:
            # Not the client's fault: its memory cannot be read or written, or this package has a bug.
            text = f"{who}its node failed:\n{text}"
            raise WorkerDiedError(text) if self.trusted else ClientError(text[:_MOST_TEXT])

    def evaluate(
        self,
        state: StateDict,
        ids: Sequence[int],
        memory_rounds: MemoryRounds,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Iterator[Scored]:
        """Score; see `ClientPool.evaluate`. A client that does not answer is asked twice."""
        body = pack(dict(state), {"kind": "state", "round": round})
        last = export is not None
        options: dict[str, Any] = {"with_shared": with_shared, "last": last, "export": last and self.exports}
        tasks = [self._task("evaluate", i, memory_rounds.get(i), round, shared=body, **options) for i in ids]
        for client_id, answer in zip(ids, self._answers(tasks, times=2), strict=True):
            try:
                yield self._scores(client_id, answer, export)
            except ClientError as error:
                yield Unscored(client_id, str(error))

    def _scores(self, client_id: int, answer: Answer, export: Path | None) -> Evaluation:
        """The scores that a client sent; raises ClientError where it sent none."""
        header, payloads = answer
        self._raise_failure(header)
        try:
            evaluation = Evaluation.from_dict(header["evaluation"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ClientError(f"it sent malformed scores: {error!r}") from error
        if evaluation.client_id != client_id:
            raise ClientError(f"it sent the scores of client {evaluation.client_id}")
        if export is not None and payloads.get("model"):
            write_atomically(export / f"client-{client_id}.safetensors", payloads["model"])
        return evaluation

    def _task(
        self,
        kind: Literal["train", "evaluate"],
        client_id: int,
        version: int | None,
        round: int,
        *,
        shared: bytes = b"",
        body: bytes = b"",
        **options: Any,
    ) -> Task:
        header = {"task": kind, "client": client_id, "round": round, "version": version, "carried": self._carried, **options}
        payloads = {"body": body} if body else {}
        if self._carried and version is not None:
            with contextlib.suppress(FileNotFoundError):  # the node says that it did not come
                payloads["memory"] = self.store.load(client_id, version)
        return Task(header, payloads, shared)

    def _answers(self, tasks: Sequence[Task], *, times: int = 1) -> Iterator[Answer]:
        return in_order(self._exchange(tasks, times), len(tasks))

    def _exchange(self, tasks: Sequence[Task], times: int) -> Iterator[tuple[int, Answer]]:
        """Send all, and yield what comes back; where nothing usable does, send again, so many times in all."""
        places = {task: place for place, task in enumerate(tasks)}
        waiting = list(tasks)
        while waiting:
            times -= 1
            self.carrier.look(wait=True)
            # Nodes that start a process for each message get theirs at once: each is a device, and slow ones delay no other.
            post = self.post(most=None if self.grouped else max(_MOST_OPEN, 8 * self.workers))
            post.add(self._groups(waiting))
            waiting = []
            for asked, reply in post.answers():
                for task, answer in zip(asked, self._read(reply, len(asked)), strict=True):
                    if times and "failure" in answer[0]:
                        waiting.append(task)
                    else:
                        yield places[task], answer

    def post(self, *, most: int | None = None) -> Post[tuple[Task, ...]]:
        """Return what carries messages, each of tasks for one node."""
        return Post(
            self.carrier,
            self._message,
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
            if self.grouped:
                with contextlib.suppress(ClientError):  # the post says why
                    node = self.carrier.node_of(task.header["client"])
            by_node.setdefault(node, []).append(task)
        return [tuple(asked[i : i + _MOST_TASKS]) for asked in by_node.values() for i in range(0, len(asked), _MOST_TASKS)]

    def _message(self, tasks: Sequence[Task], node: int) -> Message:
        header = {"tasks": [task.header for task in tasks], "run": self.run}
        record = content(header, shared=tasks[0].shared, **join([task.payloads for task in tasks]))
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


class GridStream:
    """Clients on the nodes of a grid, started one by one; see `engines.base.ClientStream`.

    Args:
        pool: Writes and reads messages.
        carrier: The grid, and the node of each client.
    """

    def __init__(self, pool: GridPool, carrier: Carrier) -> None:
        self._pool, self._carrier, self._post = pool, carrier, pool.post()
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
                return [self._pool.reply(*self._tasks.pop(task.header["client"]), said) for (task,), said in found]
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._looked = time.monotonic()
                if self._carrier.look():
                    break
            time.sleep(POLL_SECONDS)
        return []
