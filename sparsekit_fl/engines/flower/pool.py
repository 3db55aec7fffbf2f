"""GridPool: runs clients by messages over a Flower grid, of a simulation, of devices or of a test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flwr.app import Message

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import Assignment, Evaluation, decode_update, encode_assignment
from sparsekit_fl.client.packing import pack
from sparsekit_fl.engines.base import Reply, Unscored, in_order
from sparsekit_fl.engines.flower.post import POLL_SECONDS, Carrier, Post
from sparsekit_fl.engines.flower.wire import content, join, part, read
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError, WorkerDiedError
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


@dataclass(frozen=True, eq=False)
class Answer:
    """What came back: header and payloads, or why nothing usable did."""

    header: Mapping[str, Any] = field(default_factory=dict)
    payloads: Mapping[str, bytes] = field(default_factory=dict)
    failure: str | None = None


class GridPool:
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
        max_reply_bytes: A longer reply is refused; None takes four times the dense state, and 16 MiB at least.
        export: Whether nodes send personal models to be written into the run's folder.
        grouped: Ask all clients of one node in one message, for nodes that start a process for each message.
        run: Id of the run, under which nodes keep memories.
        trusted: Nodes are ours, so one that is broken stops the run, or is replaced. Otherwise its clients are dropped,
            whatever its message is: no device can stop the others.
    """

    def __init__(
        self,
        carrier: Carrier,
        spec: RunSpec,
        store: ClientStore,
        *,
        memory: Literal["nodes", "server"],
        workers: int,
        timeout_seconds: float | None = None,
        max_reply_bytes: int | None = None,
        export: bool = True,
        grouped: bool = False,
        run: str = "",
        trusted: bool = True,
    ) -> None:
        if timeout_seconds is not None and not 0 < timeout_seconds < float("inf"):
            raise InvalidValueError(f"timeout_seconds must be a positive number or None, got {timeout_seconds}")
        self.workers = workers
        self._carrier = carrier
        self._spec = spec
        self._store = store
        self._carried = memory == "server"
        self._timeout = timeout_seconds
        dense = sum(tensor.numel() * tensor.element_size() for tensor in spec.initial.values())
        self._most = max(4 * dense, 2**24) if max_reply_bytes is None else max_reply_bytes
        self.exports = export
        self._grouped = grouped
        self._run = run
        self._trusted = trusted

    def map(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> Iterator[Reply]:
        """Train; see `ClientPool.map`."""
        tasks = [self._training(assignment, memory_rounds) for assignment in assignments]
        for assignment, (task, answer) in zip(assignments, self._in_order(tasks), strict=True):
            yield self._with_news(assignment, task, answer)

    def stream(self) -> GridStream:
        """Return what starts clients one by one, and gives their replies as they come in."""
        return GridStream(self, self._carrier)

    def await_clients(self, ids: Collection[int], needed: int) -> None:
        """See `ClientPool`."""
        self._carrier.await_clients(ids, needed)

    @property
    def _ttl(self) -> float:
        return _TTL_SECONDS if self._timeout is None else self._timeout

    def _training(self, assignment: Assignment, memory_rounds: MemoryRounds) -> Task:
        id, body = assignment.client_id, encode_assignment(assignment, self._spec.graph)
        return self._task("train", id, memory_rounds.get(id), assignment.round, body=body)

    def _with_news(self, assignment: Assignment, task: Task, answer: Answer) -> Reply:
        """Read a reply, and add what became of nodes."""
        travelled = sum(len(payloads.get("memory", b"")) for payloads in (task.payloads, answer.payloads))
        reply = replace(self._reply(assignment, answer), memory_bytes=travelled)
        news = self._carrier.news()
        return replace(reply, note="; ".join([*news, reply.note] if reply.note else news)) if news else reply

    def evaluate(
        self,
        state: StateDict,
        ids: Sequence[int],
        memory_rounds: MemoryRounds,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Iterator[Evaluation | Unscored]:
        """Score; see `ClientPool.evaluate`. A client that does not answer is asked twice."""
        body = pack(dict(state), {"kind": "state", "round": round})
        last = export is not None
        options: dict[str, Any] = {"with_shared": with_shared, "last": last, "export": last and self.exports}
        tasks = [self._task("evaluate", i, memory_rounds.get(i), round, shared=body, **options) for i in ids]
        held: list[Evaluation | Unscored] = []  # from the first client on that is asked again
        silent: dict[int, Task] = {}
        for task, answer in self._in_order(tasks):
            if answer.failure is not None:
                silent[len(held)] = task
            if silent:
                held.append(self._scores(task, answer, export))
            else:
                yield self._scores(task, answer, export)
        for place, (task, answer) in zip(silent, self._in_order(list(silent.values())), strict=True):
            held[place] = self._scores(task, answer, export)
        yield from held

    def _raise_full(self, answer: Answer) -> None:
        """Raise where a node of ours cannot write: the disk is the run's own, and the run ends as with any other engine."""
        number = answer.header.get("errno")
        if self._trusted and type(number) is int:
            raise OSError(number, str(answer.header.get("error"))[:_MOST_TEXT])

    def _scores(self, task: Task, answer: Answer, export: Path | None) -> Evaluation | Unscored:
        client_id = task.header["client"]
        if answer.failure is not None:
            return Unscored(client_id, answer.failure)
        self._raise_full(answer)
        wrong = answer.header.get("error") or answer.header.get("broken")
        if wrong:
            return Unscored(client_id, str(wrong)[:_MOST_TEXT])
        try:
            evaluation = Evaluation.from_dict(answer.header["evaluation"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return Unscored(client_id, f"it sent malformed scores: {error!r}")
        if evaluation.client_id != client_id:
            return Unscored(client_id, f"it sent the scores of client {evaluation.client_id}")
        if export is not None and answer.payloads.get("model"):
            write_atomically(export / f"client-{client_id}.safetensors", answer.payloads["model"])
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
                payloads["memory"] = self._store.load(client_id, version)
        return Task(header, payloads, shared)

    def _reply(self, assignment: Assignment, answer: Answer) -> Reply:
        try:
            return self._update(assignment, answer)
        except ClientError as error:
            return Reply(client_id=assignment.client_id, error=error)

    def _update(self, assignment: Assignment, answer: Answer) -> Reply:
        """The update that a client sent; raises ClientError where it sent none."""
        who, header = f"client {assignment.client_id} in round {assignment.round}", answer.header
        if answer.failure is not None:
            raise ClientError(f"{who}: {answer.failure}")
        if "error" in header:
            self._raise_full(answer)
            error = ClientError(str(header["error"])[:_MOST_TEXT])
            error.add_note(f"On its node:\n{header.get('traceback', '')}")
            raise error
        if "broken" in header:
            # Not the client's fault: its memory cannot be read or written, or this package has a bug.
            text = f"the node of {who} failed:\n{header['broken']}"
            raise WorkerDiedError(text) if self._trusted else ClientError(text[:_MOST_TEXT])
        try:
            update = decode_update(answer.payloads.get("body", b""), self._spec.graph)
        except DataError as error:
            raise ClientError(f"{who} sent no valid update: {error}") from None
        stored = header.get("stored") is True
        if stored and self._carried:
            if not answer.payloads.get("memory"):
                raise ClientError(f"{who} sent its update without its memory")
            self._store.save(assignment.client_id, assignment.round, answer.payloads["memory"])
        note = header.get("note")
        text = note[:_MOST_TEXT] if isinstance(note, str) else ""
        return Reply(client_id=assignment.client_id, update=update, stored=stored, note=text)

    def _in_order(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Answer]]:
        return zip(tasks, in_order(self._exchange(tasks), len(tasks)), strict=True)

    def _exchange(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Answer]]:
        """Send all, and yield what comes back."""
        self._carrier.refresh()
        post: Post[tuple[int, ...]] = Post(
            self._carrier,
            lambda places, node: self._message([tasks[place] for place in places], node),
            lambda places: self._carrier.node_of(tasks[places[0]].header["client"]),
            ttl=self._ttl,
            # Nodes that start a process for each message get theirs at once: each is a device, and slow ones delay no other.
            most=None if self._grouped else max(_MOST_OPEN, 8 * self.workers),
            trusted=self._trusted,
        )
        post.add(self._groups(tasks))
        for places, reply in post.answers():
            yield from zip(places, self._answers(reply, len(places)), strict=True)

    def _groups(self, tasks: Sequence[Task]) -> list[tuple[int, ...]]:
        """The tasks of each message, by their places."""
        if not self._grouped:
            return [(place,) for place in range(len(tasks))]
        by_node: dict[Any, list[int]] = {}
        for place, task in enumerate(tasks):
            try:
                by_node.setdefault(self._carrier.node_of(task.header["client"]), []).append(place)
            except ClientError:
                by_node[task] = [place]  # the post says why
        return [tuple(asked[i : i + _MOST_TASKS]) for asked in by_node.values() for i in range(0, len(asked), _MOST_TASKS)]

    def _message(self, tasks: Sequence[Task], node: int) -> Message:
        header = {"tasks": [task.header for task in tasks], "run": self._run}
        record = content(header, shared=tasks[0].shared, **join([task.payloads for task in tasks]))
        return Message(record, node, tasks[0].header["task"], ttl=self._ttl, group_id=str(tasks[0].header["round"]))

    def _answers(self, message: Message | str, count: int) -> list[Answer]:
        """Return what a reply answers to each of its `count` tasks."""
        if isinstance(message, str):
            return [Answer(failure=message)] * count
        if message.has_error():
            reason = f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})"
            return [Answer(failure=reason)] * count
        try:
            header, payloads = read(message, max_bytes=count * self._most)
            replies = header.get("replies")
            if not isinstance(replies, list) or len(replies) != count or not all(isinstance(one, dict) for one in replies):
                raise DataError(f"expected {count} replies")
        except DataError as error:
            return [Answer(failure=str(error))] * count
        return [Answer(reply, part(payloads, place)) for place, reply in enumerate(replies)]


class GridStream:
    """Clients on the nodes of a grid, started one by one; see `engines.base.ClientStream`.

    Args:
        pool: Writes and reads messages.
        carrier: The grid, and the node of each client.
    """

    def __init__(self, pool: GridPool, carrier: Carrier) -> None:
        self._pool, self._carrier = pool, carrier
        self._tasks: dict[int, tuple[Assignment, Task]] = {}
        self._post: Post[int] = Post(
            carrier,
            lambda id, node: pool._message([self._tasks[id][1]], node),
            carrier.node_of,
            ttl=pool._ttl,
            trusted=pool._trusted,
        )
        self._early: list[tuple[int, Message | str]] = []  # came while others were sent
        self._looked = float("-inf")

    def free(self, ids: Collection[int]) -> list[int]:
        """Return those of these clients whose node is there and has nothing to do."""
        self._carrier.look()
        self._looked = time.monotonic()
        return [id for id in ids if id not in self._tasks and self._free(id)]

    def _free(self, id: int) -> bool:
        try:
            node = self._carrier.node_of(id)
        except ClientError:
            return False
        return not self._carrier.exclusive or node not in self._post.busy

    def apart(self, ids: Collection[int]) -> list[int]:
        """Return of these clients the first of each node; all of them where any node serves any client."""
        if not self._carrier.exclusive:
            return list(ids)
        first: dict[int, int] = {}
        for id in ids:
            first.setdefault(self._carrier.node_of(id), id)
        return list(first.values())

    def start(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> None:
        """Send tasks to clients that are free, at most one for each node."""
        self._tasks.update({one.client_id: (one, self._pool._training(one, memory_rounds)) for one in assignments})
        self._post.add(one.client_id for one in assignments)
        self._early += self._post.poll()

    def arrived(self) -> list[Reply]:
        """Wait until a reply has come, or a node, or until nobody is under way.

        Returns:
            Replies in the order in which they came; none where a node came.
        """
        while self._tasks:
            found, self._early = [*self._early, *self._post.poll()], []
            if found:
                return [self._pool._with_news(*self._tasks.pop(id), self._pool._answers(said, 1)[0]) for id, said in found]
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._looked = time.monotonic()
                if self._carrier.look():
                    break
            time.sleep(POLL_SECONDS)
        return []
