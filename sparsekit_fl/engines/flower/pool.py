"""GridPool: runs clients by messages over a Flower grid, whatever is behind it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph.state import StateDict
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.engines.base import Reply, Unscored
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.state.storage import write_atomically
from sparsekit_fl.state.store import ClientStore, Versions
from sparsekit_fl.wire.messages import Assignment, Evaluation, decode_update, encode_assignment
from sparsekit_fl.wire.packing import pack

__all__ = ["Carrier", "GridDiedError", "GridPool", "Task"]

_POLL_SECONDS = 0.02
_TTL_SECONDS = 12 * 3600.0
# Flower's simulation looks through all open messages for each of its nodes, ten times a second, and at each of our polls;
# with ten thousand clients to score at once it would do little else. As many as keep the workers busy are enough.
_MOST_OPEN = 50
# Of one message: what it says of them, and what its reply says, must fit into a header of 2**20 bytes.
_MOST_TASKS = 1000
# Flower's codes for a message, or a reply, that is no longer there.
_EXPIRED = (3, 4)
# A device may say what it likes of its failure, but not at any length.
_MOST_TEXT = 4000
# What Ray says of a process that was killed; Flower puts such an actor back to work, where it fails for ever.
_DEAD_ACTOR = ("ActorDiedError", "RayActorError", "OutOfMemoryError", "WorkerCrashedError")


class GridDiedError(WorkerDiedError):
    """What runs the clients behind a grid is damaged, and must be started anew."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What one client is asked.

    Args:
        kind: Flower's type of the message.
        client_id: For whom.
        header: Plain JSON values.
        payloads: Bytes by name.
        shared: Bytes that are the same for all tasks of a call.
    """

    kind: Literal["train", "evaluate"]
    client_id: int
    header: Mapping[str, Any]
    payloads: Mapping[str, bytes]
    shared: bytes = b""


@dataclass(frozen=True, eq=False)
class Answer:
    """What came back: header and payloads, or why nothing usable did."""

    header: Mapping[str, Any]
    payloads: Mapping[str, bytes]
    failure: str | None = None


class Carrier(Protocol):
    """A grid, and which of its nodes serves a client."""

    grid: Grid

    def node_of(self, client_id: int) -> int:
        """The node that has this client; raises ClientError where none has."""
        ...

    def refresh(self) -> None:
        """Look which nodes are there now; called before a round's messages are sent."""
        ...

    def news(self) -> list[str]:
        """What became of nodes since the last call, for the record of the round."""
        ...

    def restart(self, reason: str) -> None:
        """Replace the grid after it was damaged; raises where that cannot help."""
        ...


def _late(seconds: float) -> str:
    return f"no reply within {seconds:g} seconds"


class GridPool:
    """Runs clients on the nodes of a grid.

    Every client is asked once a round, with all that it needs, and answers once. Replies count by the client that they
    answer for, never by their order; memories are files of the nodes, or travel with the messages.

    Args:
        carrier: The grid.
        spec: Of the run.
        store: Where memories are that travel.
        memory: "nodes" keep the memories of their clients; the "server" does, and sends them along.
        workers: How many clients train at once, for the record.
        timeout_seconds: Replies that take longer are given up; None waits for twelve hours.
        max_reply_bytes: A longer reply is refused; None takes four times the dense state, and 16 MiB at least.
        export: Whether nodes send personal models to be written into the run's folder.
        grouped: Ask all clients of one node in one message, for nodes that start a process for each message.
        trusted: Nodes are ours, so one that is broken stops the run, or is replaced. Otherwise its clients are dropped, for
            whatever it says: no device can stop the others.
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
        self._exports = export
        self._grouped = grouped
        self._trusted = trusted

    def map(self, assignments: Sequence[Assignment], versions: Versions) -> Iterator[Reply]:
        """Train; see `ClientPool.map`."""
        tasks = [self._train_task(assignment, versions.get(assignment.client_id)) for assignment in assignments]
        for assignment, task, answer in zip(assignments, tasks, self._in_order(tasks), strict=True):
            travelled = sum(len(payloads.get("memory", b"")) for payloads in (task.payloads, answer.payloads))
            reply = replace(self._reply(assignment, answer), memory_bytes=travelled)
            news = self._carrier.news()
            yield replace(reply, note="; ".join([*news, reply.note] if reply.note else news)) if news else reply

    def evaluate(
        self,
        state: StateDict,
        ids: Sequence[int],
        versions: Versions,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Iterator[Evaluation | Unscored]:
        """Score; see `ClientPool.evaluate`. A client that does not answer is asked twice."""
        body = pack(dict(state), {"kind": "state", "round": round})
        common = {"task": "evaluate", "round": round, "with_shared": with_shared, "carried": self._carried}
        wanted = export is not None and self._exports
        tasks = []
        for client_id in ids:
            version = versions.get(client_id)
            header = {**common, "client": client_id, "version": version, "export": wanted}
            memory = self._memory(client_id, version)
            tasks.append(Task(kind="evaluate", client_id=client_id, header=header, payloads=memory, shared=body))
        held: list[Evaluation | Unscored] = []  # from the first client on that is asked again
        silent: dict[int, Task] = {}
        for task, answer in zip(tasks, self._in_order(tasks), strict=True):
            if answer.failure is not None:
                silent[len(held)] = task
            if silent:
                held.append(self._scores(task, answer, export))
            else:
                yield self._scores(task, answer, export)
        for place, answer in zip(silent, self._in_order(list(silent.values())), strict=True):
            held[place] = self._scores(silent[place], answer, export)
        yield from held

    def _scores(self, task: Task, answer: Answer, export: Path | None) -> Evaluation | Unscored:
        if answer.failure is not None:
            return Unscored(task.client_id, answer.failure)
        wrong = answer.header.get("error") or answer.header.get("broken")
        if wrong:
            if self._trusted:
                raise ClientError(f"client {task.client_id} could not be scored: {wrong}")
            return Unscored(task.client_id, str(wrong)[:_MOST_TEXT])
        try:
            evaluation = Evaluation.from_dict(answer.header["evaluation"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return Unscored(task.client_id, f"it sent malformed scores: {error!r}")
        if evaluation.client_id != task.client_id:
            return Unscored(task.client_id, f"it sent the scores of client {evaluation.client_id}")
        if export is not None and answer.payloads.get("model"):
            write_atomically(export / f"client-{task.client_id}.safetensors", answer.payloads["model"])
        return evaluation

    def _memory(self, client_id: int, version: int | None) -> dict[str, bytes]:
        return {"memory": self._store.load(client_id, version)} if self._carried and version is not None else {}

    def _train_task(self, assignment: Assignment, version: int | None) -> Task:
        header = {
            "task": "train",
            "client": assignment.client_id,
            "round": assignment.round,
            "version": version,
            "carried": self._carried,
        }
        body = encode_assignment(assignment, self._spec.graph)
        payloads = {"body": body, **self._memory(assignment.client_id, version)}
        return Task(kind="train", client_id=assignment.client_id, header=header, payloads=payloads)

    def _reply(self, assignment: Assignment, answer: Answer) -> Reply:
        who = f"client {assignment.client_id} in round {assignment.round}"
        if answer.failure is not None:
            return Reply(client_id=assignment.client_id, error=ClientError(f"{who}: {answer.failure}"))
        if "error" in answer.header:
            error = ClientError(str(answer.header["error"])[:_MOST_TEXT])
            error.add_note(f"On its node:\n{answer.header.get('traceback', '')}")
            return Reply(client_id=assignment.client_id, error=error)
        if "broken" in answer.header:
            # Not the client's fault: its memory cannot be read or written, or this package has a bug.
            text = f"the node of {who} failed:\n{answer.header['broken']}"
            if self._trusted:
                raise WorkerDiedError(text)
            return Reply(client_id=assignment.client_id, error=ClientError(text[:_MOST_TEXT]))
        try:
            update = decode_update(answer.payloads.get("body", b""), self._spec.graph)
        except DataError as error:
            return Reply(client_id=assignment.client_id, error=ClientError(f"{who} sent no valid update: {error}"))
        stored = answer.header.get("stored") is True
        if stored and self._carried:
            if not answer.payloads.get("memory"):
                return Reply(client_id=assignment.client_id, error=ClientError(f"{who} sent its update without its memory"))
            self._store.save(assignment.client_id, assignment.round, answer.payloads["memory"])
        note = answer.header.get("note")
        text = note[:_MOST_TEXT] if isinstance(note, str) else ""
        return Reply(client_id=assignment.client_id, update=update, stored=stored, note=text)

    def _in_order(self, tasks: Sequence[Task]) -> Iterator[Answer]:
        """Answers in the order of the tasks, each as soon as it and those before it are there."""
        done: dict[int, Answer] = {}
        waiting = self._exchange(tasks)
        for place in range(len(tasks)):
            while place not in done:
                found, answer = next(waiting)
                done[found] = answer
            yield done.pop(place)

    def _exchange(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Answer]]:
        """Send all, and yield what comes back; after a breakdown, send again what was not answered."""
        self._carrier.refresh()
        left = set(range(len(tasks)))
        while left:
            try:
                for place, answer in self._once(tasks, sorted(left)):
                    left.remove(place)
                    yield place, answer
            except GridDiedError as error:
                self._carrier.restart(str(error))

    def _once(self, tasks: Sequence[Task], places: Iterable[int]) -> Iterator[tuple[int, Answer]]:
        grid = self._carrier.grid
        ttl = _TTL_SECONDS if self._timeout is None else self._timeout
        groups: dict[Any, list[int]] = {}
        nodes: dict[Any, int] = {}
        counts: dict[int, int] = {}
        for place in places:
            try:
                node = self._carrier.node_of(tasks[place].client_id)
            except ClientError as error:
                yield place, Answer({}, {}, str(error))
                continue
            counts[node] = counts.get(node, -1) + 1
            key = (node, counts[node] // _MOST_TASKS) if self._grouped else (node, place)
            nodes[key] = node
            groups.setdefault(key, []).append(place)
        # Nodes that start a process for each message get theirs at once: each is a device, and slow ones delay no other.
        most = len(groups) if self._grouped else max(_MOST_OPEN, 8 * self.workers)
        waiting = list(groups)
        open_ids: dict[str, tuple[float, list[int]]] = {}
        while waiting or open_ids:
            fresh = waiting[: most - len(open_ids)]
            waiting = waiting[len(fresh) :]
            messages = [self._message([tasks[place] for place in groups[key]], nodes[key], ttl) for key in fresh]
            sent = time.monotonic()
            for key, id in zip(fresh, grid.push_messages(messages) if messages else (), strict=True):
                if id:
                    open_ids[id] = sent, groups[key]
                else:
                    yield from ((place, Answer({}, {}, "its node is gone")) for place in groups[key])
            found = list(grid.pull_messages(list(open_ids))) if open_ids else []
            for message in found:
                began, asked = open_ids.pop(message.metadata.reply_to_message_id, (0.0, []))
                over = time.monotonic() - began > 0.9 * ttl
                if asked and over and message.has_error() and message.error.code in _EXPIRED:
                    # Flower's own words for it speak of databases.
                    yield from ((place, Answer({}, {}, _late(ttl))) for place in asked)
                elif asked:
                    yield from zip(asked, self._answers(message, len(asked)), strict=True)
            for id in [id for id, (began, _) in open_ids.items() if time.monotonic() - began >= ttl]:
                _, asked = open_ids.pop(id)
                yield from ((place, Answer({}, {}, _late(ttl))) for place in asked)
            if open_ids and not found:
                time.sleep(_POLL_SECONDS)

    def _message(self, tasks: Sequence[Task], node: int, ttl: float) -> Message:
        payloads = {f"{place}/{name}": data for place, task in enumerate(tasks) for name, data in task.payloads.items()}
        header = {"tasks": [task.header for task in tasks]}
        record = content(header, shared=tasks[0].shared, **payloads)
        return Message(record, node, tasks[0].kind, ttl=ttl, group_id=str(tasks[0].header["round"]))

    def _answers(self, message: Message, count: int) -> list[Answer]:
        """What a message answers to each of its `count` tasks."""
        if message.has_error():
            reason = f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})"
            if self._trusted and any(word in reason for word in _DEAD_ACTOR):
                raise GridDiedError(f"a process that trains clients died: {reason.strip().splitlines()[-1]}")
            return [Answer({}, {}, reason)] * count
        try:
            header, payloads = read(message, max_bytes=count * self._most)
            replies = header.get("replies")
            if not isinstance(replies, list) or len(replies) != count or not all(isinstance(one, dict) for one in replies):
                raise DataError(f"expected {count} replies")
        except DataError as error:
            return [Answer({}, {}, str(error))] * count
        answers = []
        for place, reply in enumerate(replies):
            own = {name[len(f"{place}/") :]: data for name, data in payloads.items() if name.startswith(f"{place}/")}
            answers.append(Answer(reply, own))
        return answers
