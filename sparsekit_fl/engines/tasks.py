"""Tasks: what a client is asked that is elsewhere, in a worker process or on a node of Flower, and what comes back of it."""

import contextlib
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sparsekit.errors import DataError
from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import (
    Assignment,
    Evaluation,
    decode_assignment,
    decode_update,
    encode_assignment,
    encode_update,
)
from sparsekit_fl.engines.base import Reply, Scored, Unscored
from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError, LostMemoryError, WorkerDiedError
from sparsekit_fl.results.state.storage import write_atomically
from sparsekit_fl.results.state.store import ClientStore, MemoryRounds, MemoryStore

T = TypeVar("T")

# A device's text about its failure is cut here.
_MOST_TEXT = 4000


@dataclass(frozen=True, eq=False)
class Task:
    """What one client is asked, in a header of plain JSON values: "task" ("train" or "evaluate"), "client", "round", …"""

    header: Mapping[str, Any]
    payloads: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def who(self) -> str:
        """The client and the round, for messages."""
        return f"client {self.header.get('client')} in round {self.header.get('round')}"


Answer = tuple[Mapping[str, Any], Mapping[str, bytes]]
"""Header and payloads of what came back; a header with "failure" says why nothing usable did."""


def answer(task: Task, executor: Callable[[], ClientExecutor], shared: StateDict) -> Answer:
    """Do a task where its client is. Whatever goes wrong becomes an answer, so that the server can tell whose fault it was.

    `executor` makes or finds the executor of this process; `shared` is the shared state, where it came beside the task.
    """
    try:
        found, do = executor(), _train if task.header["task"] == "train" else _evaluate
        if task.header["carried"]:
            found.store = MemoryStore(task.payloads.get("memory", b""))
        return do(task, found, shared)
    except Exception as error:  # noqa: BLE001 - sent to the server, which raises it
        if isinstance(error, ClientError):
            said: dict[str, Any] = {"error": str(error)}
        elif isinstance(error, OSError) and error.errno:
            # What fails in a client is a ClientError by now: this is the store of its memories, such as a full disk.
            said = {"error": f"the place of {task.who} cannot keep its memory: {error}", "errno": error.errno}
        else:
            # Not the client's fault: its memory cannot be read or written, or this package has a bug.
            said = {"broken": f"{type(error).__name__}: {error}"}
        return {**said, "traceback": traceback.format_exc()}, {}


def _with_memory(work: Callable[[int | None], T], version: int | None) -> tuple[T, str]:
    """Do work with a memory, or without one that was lost; return what came of it, and what to say of the loss."""
    try:
        return work(version), ""
    except LostMemoryError as error:
        # Better a client that starts afresh, and says so, than one that never takes part again.
        return work(None), f"{error}; it started afresh"


def _train(task: Task, executor: ClientExecutor, shared: StateDict) -> Answer:
    assignment = decode_assignment(task.payloads["body"], executor.spec.graph, state=shared or None)
    if (assignment.client_id, assignment.round) != (task.header["client"], task.header["round"]):
        raise DataError("header and assignment are of different clients or rounds")
    (update, stored), note = _with_memory(partial(executor.train, assignment), task.header["version"])
    return {"stored": stored, "note": note}, {"body": encode_update(update), "memory": executor.store.written}


def _evaluate(task: Task, executor: ClientExecutor, shared: StateDict) -> Answer:
    header = task.header
    with tempfile.TemporaryDirectory(prefix="sparsekit-") as folder:
        export = Path(folder) if header["models"] == "sent" else None
        if header["models"] == "kept":
            export = executor.keep(shared)
        how: dict[str, Any] = {"round": header["round"], "with_shared": header["with_shared"], "export": export}
        # It is scored with what it would deploy now; that its memory is lost is said when it trains.
        evaluation, _ = _with_memory(partial(executor.evaluate, shared, header["client"], **how), header["version"])
        model = next((path.read_bytes() for path in Path(folder).glob("*.safetensors")), b"")
    return {"evaluation": evaluation.to_dict()}, {"model": model}


class TaskPool(ABC):
    """Runs clients by tasks; a subclass carries them. Every client is asked once, with all that it needs, and answers once."""

    exports = True
    """Whether personal models are sent, to be written into the run's folder; else they are kept where their clients are."""
    trusted = True
    """Answers come from processes of ours, so one that is broken stops the run. Otherwise its clients are dropped, whatever it
    says: no device can stop the others."""
    carried: ClientStore | None = None
    """The memories, where they travel with tasks; None where the processes that train keep them."""

    def __init__(self, spec: RunSpec, workers: int) -> None:
        self.spec, self.workers = spec, workers

    @abstractmethod
    def answers(self, tasks: Sequence[Task], state: StateDict) -> Iterator[Answer]:
        """Carry tasks of one kind, about one shared state; yield their answers in the order of the tasks."""

    def encode(self, assignment: Assignment) -> bytes:
        """Pack an assignment; the default with its state."""
        return encode_assignment(assignment, self.spec.graph)

    def news(self) -> list[str]:
        """Return what is to be said beside a reply, for the record of the round."""
        return []

    def training(self, assignment: Assignment, memory_rounds: MemoryRounds) -> Task:
        """The task of an assignment."""
        id, payloads = assignment.client_id, {"body": self.encode(assignment)}
        return self._task("train", id, memory_rounds.get(id), assignment.round, payloads)

    def map(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> Iterator[Reply]:
        tasks = [self.training(assignment, memory_rounds) for assignment in assignments]
        for assignment, task, found in zip(assignments, tasks, self.answers(tasks, assignments[0].state), strict=True):
            yield self.reply(assignment, task, found)

    def evaluate(
        self, state: StateDict, ids: Sequence[int], memory_rounds: MemoryRounds, *, round: int, export: Path | None, **how: bool
    ) -> Iterator[Scored]:
        models = None if export is None else "sent" if self.exports else "kept"
        tasks = [self._task("evaluate", id, memory_rounds.get(id), round, {}, models=models, **how) for id in ids]
        for client_id, found in zip(ids, self.answers(tasks, state), strict=True):
            try:
                yield self._scores(client_id, found, export)
            except ClientError as error:
                yield Unscored(client_id, str(error))

    def _task(
        self, kind: str, client_id: int, version: int | None, round: int, payloads: dict[str, bytes], **options: Any
    ) -> Task:
        carried = self.carried is not None
        if self.carried is not None and version is not None:
            with contextlib.suppress(FileNotFoundError):  # whoever trains the client says that it did not come
                payloads["memory"] = self.carried.load(client_id, version)
        header = {"task": kind, "client": client_id, "round": round, "version": version, "carried": carried}
        return Task({**header, **options}, payloads)

    def reply(self, assignment: Assignment, task: Task, found: Answer) -> Reply:
        """Read the answer to an assignment, and add the news."""
        travelled = sum(len(payloads.get("memory", b"")) for payloads in (task.payloads, found[1]))
        try:
            reply = self._update(assignment, task, found)
        except ClientError as error:
            reply = Reply(client_id=assignment.client_id, error=error)
        notes = [*self.news(), *([reply.note] if reply.note else [])]
        return replace(reply, memory_bytes=travelled, note="; ".join(notes))

    def _update(self, assignment: Assignment, task: Task, found: Answer) -> Reply:
        """The update that a client sent; raises ClientError where it sent none."""
        header, payloads = found
        self._raise_failure(header, f"{task.who}: ")
        try:
            update = decode_update(payloads.get("body", b""), self.spec.graph)
        except DataError as error:
            raise ClientError(f"{task.who} sent no valid update: {error}") from None
        stored = header.get("stored") is True
        if stored and self.carried is not None:
            if not payloads.get("memory"):
                raise ClientError(f"{task.who} sent its update without its memory")
            self.carried.save(assignment.client_id, assignment.round, payloads["memory"])
        note = header.get("note")
        text = note[:_MOST_TEXT] if isinstance(note, str) else ""
        return Reply(client_id=assignment.client_id, update=update, stored=stored, note=text)

    def _scores(self, client_id: int, found: Answer, export: Path | None) -> Evaluation:
        """The scores that a client sent; raises ClientError where it sent none."""
        header, payloads = found
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

    def _raise_failure(self, header: Mapping[str, Any], who: str = "") -> None:
        """Raise what an answer says of a failure, if it does: ClientError, or, of processes of ours, what ends the run."""
        where = f"Where it failed:\n{str(header.get('traceback', ''))[:_MOST_TEXT]}"
        if "failure" in header:
            raise ClientError(f"{who}{str(header['failure'])[:_MOST_TEXT]}")
        if "error" in header:
            text = str(header["error"])[:_MOST_TEXT]
            error: Exception = ClientError(text)
            if self.trusted and type(header.get("errno")) is int:
                error = OSError(header["errno"], text)
        elif "broken" in header and self.trusted:
            error = WorkerDiedError(f"{who}the process that trains it failed: {header['broken']}")
        elif "broken" in header:
            error = ClientError(f"{who}its node failed: {header['broken']}\n{where}"[:_MOST_TEXT])
        else:
            return
        error.add_note(where)
        raise error
