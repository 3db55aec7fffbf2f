"""Embedded: clients in this process, or in worker processes that share its memory. Same bits for any number of them."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any, Literal

from torch import Tensor

from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import Assignment, Update, encode_assignment
from sparsekit_fl.devices import device_of, exact_arithmetic
from sparsekit_fl.engines.base import Loop, Reply, Scored, Unscored, in_order
from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.spec import RunSpec, check_device
from sparsekit_fl.engines.tasks import Answer, Task, TaskPool, answer
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.options import Checked, Count
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.processes import Child, Children, one_thread, start_method
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.state.store import ClientStore, MemoryRounds


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


def serve(connection: Connection, make: Callable[..., ClientExecutor], shared: dict[str, Tensor], device: str) -> None:
    """Answer tasks in a worker process, which trains on `device`, until the pipe closes; `shared` is in shared memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    executor = cache(partial(make, device=device))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(answer(connection.recv(), executor, shared))


class ProcessPool(TaskPool):
    """Clients in worker processes, which read the state from shared memory.

    `make` makes the executor in each of them, with a keyword `device`; it must be picklable unless processes fork.
    """

    def __init__(self, children: Children, workers: int, spec: RunSpec, make: Callable[..., ClientExecutor]) -> None:
        super().__init__(spec, workers)
        self._loaded: StateDict | None = None
        self._shared = {name: spec.initial[name].clone().share_memory_() for name in spec.shared_names()}
        self._children = children
        for number in range(workers):
            children.start(serve, make, self._shared, device_of(spec.config.device, number))

    def encode(self, assignment: Assignment) -> bytes:
        return encode_assignment(assignment, self.spec.graph, with_state=False)

    def answers(self, tasks: Sequence[Task], state: StateDict) -> Iterator[Answer]:
        if state is not self._loaded:
            # All workers are idle now.
            for name, tensor in self._shared.items():
                tensor.copy_(state[name])
            self._loaded = state
        return in_order(self._exchange(tasks), len(tasks))

    def _exchange(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Answer]]:
        """Hand tasks to idle workers; yield the place of a task and its answer, in the order in which they come."""
        waiting = iter(enumerate(tasks))
        for child in self._children:
            _give(child, next(waiting, None))
        left = len(tasks)
        while left:
            found = []
            for child, said in self._children.poll():
                place, task = child.task
                if said is None:
                    raise _died(child, task)
                found.append((place, said))
                _give(child, next(waiting, None))
            left -= len(found)
            yield from found


def _give(child: Child, task: tuple[int, Task] | None) -> None:
    child.task = task
    if task is not None:
        try:
            child.connection.send(task[1])
        except (BrokenPipeError, ConnectionResetError):
            raise _died(child, task[1]) from None


def _died(child: Child, task: Task) -> WorkerDiedError:
    what = f"{task.who} (task: {task.header['task']})"
    return WorkerDiedError(f"a worker process ended by {child.ending()} while it had {what}")


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
        check_device(spec.config.device)
        with one_thread(), exact_arithmetic(spec.config.deterministic):
            if self.workers == 1:
                return rounds(LocalPool(ClientExecutor(spec, clients, store)))
            method = self.start_method or start_method(spec.config.device)
            with Children(method, daemon=True) as children:
                return rounds(ProcessPool(children, self.workers, spec, partial(ClientExecutor, spec, clients, store)))
