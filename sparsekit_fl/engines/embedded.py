"""Embedded: clients in this process, or in worker processes that share its memory. Same bits for any number of them."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

from torch import Tensor

from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import (
    Assignment,
    Update,
    decode_assignment,
    decode_update,
    encode_assignment,
    encode_update,
)
from sparsekit_fl.engines.base import Loop, Reply, Scored, Unscored, in_order
from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.spec import RunSpec, check_device
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.options.checked import Checked, Count
from sparsekit_fl.options.devices import device_of, exact_arithmetic
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.processes import KILL, Child, Children, one_thread, start_method
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.state.store import ClientStore, MemoryRounds

GOODBYE = ((0.0, signal.SIGTERM), (5.0, KILL))
"""How worker processes are ended: one in the middle of a task would finish it first, and nobody waits for that result."""


class LocalPool:
    """Clients in this process, one after the other."""

    workers = 1

    def __init__(self, executor: ClientExecutor) -> None:
        self._executor = executor

    def map(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> Iterator[Reply]:
        for one in assignments:
            yield self._reply(one, partial(self._executor.train, one, memory_rounds.get(one.client_id)))

    def _reply(self, assignment: Assignment, train: Callable[[], tuple[Update, bool]]) -> Reply:
        try:
            update, stored = train()
        except ClientError as error:
            return Reply(client_id=assignment.client_id, error=error)
        return Reply(client_id=assignment.client_id, update=update, stored=stored)

    def evaluate(self, state: StateDict, ids: Sequence[int], memory_rounds: MemoryRounds, **how: Any) -> Iterator[Scored]:
        for client_id in ids:
            try:
                yield self._executor.evaluate(state, client_id, memory_rounds.get(client_id), **how)
            except ClientError as error:
                yield Unscored(client_id, str(error))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Task:
    """What a worker process is asked.

    Args:
        client_id: The client.
        version: The round of its memory that counts.
        round: The round.
        assignment: What to train on, packed, without the state: that is in shared memory. Empty to score the client.
        how: How to score the client.
    """

    client_id: int
    version: int | None
    round: int
    assignment: bytes = b""
    how: Mapping[str, Any] = field(default_factory=dict)

    def answer(self, executor: ClientExecutor, shared: StateDict) -> Any:
        """Return the packed update and whether a memory was stored; or the scores. In the worker process."""
        if not self.assignment:
            return executor.evaluate(shared, self.client_id, self.version, **self.how)
        assignment = decode_assignment(self.assignment, executor.spec.graph, state=shared)
        update, stored = executor.train(assignment, self.version)
        return encode_update(update), stored

    def died(self, child: Child) -> WorkerDiedError:
        """Return the error about a worker that died over it."""
        what = "train" if self.assignment else "evaluate"
        task = f"client {self.client_id} in round {self.round} (task: {what})"
        return WorkerDiedError(f"a worker process ended by {child.ending()} while it had {task}")


def serve(connection: Connection, make: Callable[..., ClientExecutor], shared: dict[str, Tensor], device: str) -> None:
    """Answer tasks in a worker process until the pipe closes.

    Args:
        connection: Brings tasks, and takes their answers, or errors that the main process raises.
        make: Makes the executor, for a device.
        shared: The state, in shared memory.
        device: Where this process trains.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    executor = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task: _Task = connection.recv()
            try:
                executor = executor or make(device=device)
                answer = task.answer(executor, shared)
            except Exception as error:  # noqa: BLE001 - sent to the main process, which raises it
                answer = _sent(error, "failed" if executor else "could not start")
                answer.add_note(f"In a worker process:\n{traceback.format_exc()}")
            connection.send(answer)


def _sent(error: Exception, what: str) -> Exception:
    """Return what the main process gets to see of an error: its class may be known here alone."""
    if isinstance(error, ClientError):
        return ClientError(str(error))
    if isinstance(error, OSError) and error.errno and what == "failed":
        # What fails in a client is a ClientError by now: this is the store of its memories, such as a full disk.
        return OSError(error.errno, error.strerror, error.filename)
    # No client's fault: its memory cannot be read or written, or this package has a bug.
    return WorkerDiedError(f"a worker process {what}: {type(error).__name__}: {error}")


class ProcessPool:
    """Clients in worker processes, which read the state from shared memory.

    Args:
        children: Starts the processes.
        workers: Number of processes.
        spec: The fixed parts of the run.
        make: Makes the executor in each of them, with a keyword `device`; picklable unless processes fork.
    """

    def __init__(self, children: Children, workers: int, spec: RunSpec, make: Callable[..., ClientExecutor]) -> None:
        self.workers = workers
        self._graph = spec.graph
        self._loaded: StateDict | None = None
        self._shared = {name: spec.initial[name].clone().share_memory_() for name in spec.shared_names()}
        self._children = children
        for number in range(workers):
            children.start(serve, make, self._shared, device_of(spec.config.device, number))

    def map(self, assignments: Sequence[Assignment], memory_rounds: MemoryRounds) -> Iterator[Reply]:
        tasks = [
            _Task(
                client_id=assignment.client_id,
                version=memory_rounds.get(assignment.client_id),
                round=assignment.round,
                assignment=encode_assignment(assignment, self._graph, with_state=False),
            )
            for assignment in assignments
        ]
        for task, answer in self._answers(assignments[0].state, tasks):
            if isinstance(answer, ClientError):
                yield Reply(client_id=task.client_id, error=answer)
            else:
                payload, stored = answer
                yield Reply(client_id=task.client_id, update=decode_update(payload), stored=stored)

    def evaluate(self, state: StateDict, ids: Sequence[int], memory_rounds: MemoryRounds, **how: Any) -> Iterator[Scored]:
        tasks = [_Task(client_id=i, version=memory_rounds.get(i), round=how["round"], how=how) for i in ids]
        for task, answer in self._answers(state, tasks):
            yield Unscored(task.client_id, str(answer)) if isinstance(answer, ClientError) else answer

    def _answers(self, state: StateDict, tasks: Sequence[_Task]) -> Iterator[tuple[_Task, Any]]:
        """Put the state where the workers read it, now that all are idle; yield tasks and answers in the order of the tasks."""
        if state is not self._loaded:
            for name, tensor in self._shared.items():
                tensor.copy_(state[name])
            self._loaded = state
        return zip(tasks, in_order(self._exchange(tasks), len(tasks)), strict=True)

    def _exchange(self, tasks: Sequence[_Task]) -> Iterator[tuple[int, Any]]:
        """Hand tasks to idle workers; yield the place of a task and its answer, in the order in which they come."""
        waiting = iter(enumerate(tasks))
        for child in self._children:
            _give(child, next(waiting, None))
        left = len(tasks)
        while left:
            found = []
            for child, answer in self._children.poll():
                place, task = child.task
                if answer is None:
                    raise task.died(child)
                if isinstance(answer, Exception) and not isinstance(answer, ClientError):
                    raise answer
                found.append((place, answer))
                _give(child, next(waiting, None))
            left -= len(found)
            yield from found


def _give(child: Child, task: tuple[int, _Task] | None) -> None:
    child.task = task
    if task is not None:
        try:
            child.connection.send(task[1])
        except (BrokenPipeError, ConnectionResetError):
            raise task[1].died(child) from None


@dataclass(frozen=True)
class Embedded(Checked):
    """Clients on this machine, without any framework.

    Args:
        workers: Number of processes that train clients, one torch thread each; 1 trains in this process.
        start_method: How processes start; None takes "fork" on Linux for the CPU, where they share data and problem with
            this process without copying, and "spawn" elsewhere, where both must be picklable.

    Raises:
        InvalidValueError: a value that is not allowed.
    """

    workers: Count = 1
    _: KW_ONLY
    start_method: Literal["fork", "forkserver", "spawn"] | None = None

    def run(self, rounds: Loop, *, spec: RunSpec, clients: Mapping[int, Client], store: ClientStore) -> RunResult:
        """Run the loop; torch has one thread meanwhile, since results depend on the number of threads."""
        check_device(spec.config.device)
        with one_thread(), exact_arithmetic(spec.config.deterministic):
            if self.workers == 1:
                return rounds(LocalPool(ClientExecutor(spec, clients, store)))
            method = self.start_method or start_method(spec.config.device)
            with Children(method, GOODBYE, daemon=True) as children:
                return rounds(ProcessPool(children, self.workers, spec, partial(ClientExecutor, spec, clients, store)))
