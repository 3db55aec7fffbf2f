"""Embedded: clients in this process, or in worker processes that share its memory. Same bits for any number of them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph.state import StateDict
from sparsekit_fl.client.executor import ClientExecutor
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.client.worker import one_thread
from sparsekit_fl.engines.base import ClientPool, Reply
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.state.store import ClientStore, Versions
from sparsekit_fl.wire.messages import (
    Assignment,
    Evaluation,
    decode_assignment,
    decode_update,
    encode_assignment,
    encode_update,
)

__all__ = ["Embedded"]


class _LocalPool:
    workers = 1

    def __init__(self, executor: ClientExecutor) -> None:
        self._executor = executor

    def map(self, assignments: Sequence[Assignment], versions: Versions) -> Iterator[Reply]:
        for assignment in assignments:
            client_id = assignment.client_id
            try:
                update, stored = self._executor.train(assignment, versions.get(client_id))
            except ClientError as error:
                yield Reply(client_id=client_id, error=error)
            else:
                yield Reply(client_id=client_id, update=update, stored=stored)

    def evaluate(
        self,
        state: StateDict,
        ids: Sequence[int],
        versions: Versions,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Iterator[Evaluation]:
        for client_id in ids:
            yield self._executor.evaluate(
                state, client_id, versions.get(client_id), round=round, with_shared=with_shared, export=export
            )


def _send(connection: Connection, header: Mapping[str, Any], payload: bytes = b"") -> None:
    connection.send_bytes(json.dumps(header).encode())
    connection.send_bytes(payload)


def _receive(connection: Connection) -> tuple[dict[str, Any], bytes]:
    return json.loads(connection.recv_bytes()), connection.recv_bytes()


def _serve(
    connection: Connection,
    others: Sequence[Connection],
    spec: RunSpec,
    clients: Mapping[int, Client],
    store: ClientStore,
    shared: dict[str, Tensor],
) -> None:
    """The life of a worker process: tasks in, replies out, until the pipe closes."""
    for other in others:
        # A forked process inherits the ends of its siblings; while it holds them, nobody sees a pipe close.
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_thread()
    executor = ClientExecutor(spec, clients, store)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            header, payload = _receive(connection)
            try:
                reply, answer = _answer(executor, header, payload, shared)
            except ClientError as error:
                reply, answer = {"error": str(error), "traceback": traceback.format_exc()}, b""
            except Exception:  # noqa: BLE001 - sent to the main process, which raises it
                reply, answer = {"broken": traceback.format_exc()}, b""
            _send(connection, reply, answer)


def _answer(
    executor: ClientExecutor, header: Mapping[str, Any], payload: bytes, shared: dict[str, Tensor]
) -> tuple[dict[str, Any], bytes]:
    if header["task"] == "train":
        assignment = decode_assignment(payload, executor.spec.graph, state=shared)
        update, stored = executor.train(assignment, header["version"])
        return {"stored": stored}, encode_update(update)
    export = header["export"]
    evaluation = executor.evaluate(
        shared,
        header["client"],
        header["version"],
        round=header["round"],
        with_shared=header["with_shared"],
        export=None if export is None else Path(export),
    )
    return {"evaluation": evaluation.to_dict()}, b""


class _Worker:
    def __init__(self, process: Any, connection: Connection) -> None:
        self.process = process
        self.connection = connection


class _ProcessPool:
    def __init__(self, workers: int, context: Any, spec: RunSpec, clients: Mapping[int, Client], store: ClientStore) -> None:
        self.workers = workers
        self._spec = spec
        self._loaded: StateDict | None = None
        self._shared = {name: spec.initial[name].clone().share_memory_() for name in spec.shared_names()}
        self._workers: list[_Worker] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            others = [worker.connection for worker in self._workers] + [ours] if context.get_start_method() == "fork" else []
            process = context.Process(target=_serve, args=(theirs, others, spec, clients, store, self._shared), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _load(self, state: StateDict) -> None:
        """Put the global state where the workers read it; none of them is at work now."""
        if state is not self._loaded:
            for name, tensor in self._shared.items():
                tensor.copy_(state[name])
            self._loaded = state

    def map(self, assignments: Sequence[Assignment], versions: Versions) -> Iterator[Reply]:
        self._load(assignments[0].state)
        graph = self._spec.graph
        tasks = []
        for assignment in assignments:
            client_id = assignment.client_id
            header = {"task": "train", "client": client_id, "round": assignment.round, "version": versions.get(client_id)}
            tasks.append((header, encode_assignment(assignment, graph, with_state=False)))
        for assignment, (reply, payload) in zip(assignments, self._run(tasks), strict=True):
            if "error" in reply:
                yield Reply(client_id=assignment.client_id, error=_client_error(reply))
            else:
                yield Reply(client_id=assignment.client_id, update=decode_update(payload), stored=reply["stored"])

    def evaluate(
        self,
        state: StateDict,
        ids: Sequence[int],
        versions: Versions,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Iterator[Evaluation]:
        self._load(state)
        common = {"round": round, "with_shared": with_shared, "export": None if export is None else str(export)}
        tasks = [({"task": "evaluate", "client": i, "version": versions.get(i), **common}, b"") for i in ids]
        for reply, _ in self._run(tasks):
            if "error" in reply:
                raise _client_error(reply)
            yield Evaluation.from_dict(reply["evaluation"])

    def _run(self, tasks: Sequence[tuple[Mapping[str, Any], bytes]]) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Hand tasks to whoever is free; yield the replies in the order of the tasks."""
        waiting = iter(range(len(tasks)))
        busy: dict[Connection, tuple[int, _Worker]] = {}
        done: dict[int, tuple[dict[str, Any], bytes]] = {}

        def give(worker: _Worker) -> None:
            place = next(waiting, None)
            if place is not None:
                busy[worker.connection] = (place, worker)
                try:
                    _send(worker.connection, *tasks[place])
                except (BrokenPipeError, ConnectionResetError):
                    self._died(worker, tasks[place][0])

        for worker in self._workers:
            give(worker)
        for turn in range(len(tasks)):
            while turn not in done:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    place, worker = busy.pop(ready)
                    try:
                        done[place] = _receive(ready)
                    except (EOFError, ConnectionResetError):
                        self._died(worker, tasks[place][0])
                    if "broken" in done[place][0]:
                        # Not the client's fault: its memory cannot be read or written, or this package has a bug.
                        raise WorkerDiedError(f"a worker process failed:\n{done[place][0]['broken']}")
                    give(worker)
            yield done.pop(turn)

    def _died(self, worker: _Worker, header: Mapping[str, Any]) -> None:
        worker.process.join(timeout=5)
        code = worker.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
            if -code == signal.SIGKILL:
                how += "; often the system is out of memory: try fewer workers"
        raise WorkerDiedError(
            f"a worker process ended by {how} while it had client {header['client']} in round {header['round']}"
            f" (task: {header['task']})"
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            # A worker in the middle of a task would finish it first; nobody waits for that result.
            worker.process.terminate()
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()


def _client_error(reply: Mapping[str, Any]) -> ClientError:
    error = ClientError(reply["error"])
    error.add_note(f"In a worker process:\n{reply['traceback']}")
    return error


class Embedded:
    """Clients on this machine, without any framework.

    Args:
        workers: Processes that train clients, one torch thread each; 1 trains in this process.
        start_method: How processes start; None takes "fork" on Linux for the CPU, where they share data and problem with
            this process without copying, and "spawn" elsewhere, where both must be picklable.
    """

    def __init__(self, workers: int = 1, *, start_method: str | None = None) -> None:
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise InvalidValueError(f"workers must be an integer >= 1, got {workers!r}")
        if start_method is not None and start_method not in multiprocessing.get_all_start_methods():
            raise InvalidValueError(
                f"start_method must be one of {multiprocessing.get_all_start_methods()}, got {start_method!r}"
            )
        self.workers = workers
        self._start_method = start_method

    def run(
        self,
        rounds: Callable[[ClientPool], RunResult],
        *,
        spec: RunSpec,
        clients: Mapping[int, Client],
        store: ClientStore,
    ) -> RunResult:
        """Run the loop; torch has one thread meanwhile, since results depend on the number of threads."""
        before = one_thread()
        try:
            if self.workers == 1:
                return rounds(_LocalPool(ClientExecutor(spec, clients, store)))
            method = self._start_method or ("fork" if sys.platform == "linux" and spec.config.device == "cpu" else "spawn")
            pool = _ProcessPool(self.workers, multiprocessing.get_context(method), spec, clients, store)
            try:
                return rounds(pool)
            finally:
                pool.close()
        finally:
            torch.set_num_threads(before)
