"""Engines map requests to replies, in order. `Processes` runs clients in this process, or in worker processes.

Also what an engine that is written elsewhere needs: `answer`, which runs a client, and `registry`.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any, Protocol

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict
from sparsekit.registry import Registry
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client.messages import Reply, Request, decode_reply, decode_request, encode_reply, encode_request
from sparsekit_fl.client_round import answer, run_client
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.options import Checked, Count
from sparsekit_fl.problem.data import Client
from sparsekit_fl.processes import (
    check_device,
    device_of,
    end_with_parent,
    exact_arithmetic,
    one_thread,
    start_method,
    train_alike,
    use_exact_arithmetic,
)
from sparsekit_fl.spec import RunSpec

__all__ = [
    "Engine",
    "Memories",
    "Processes",
    "RunClients",
    "RunSpec",
    "answer",
    "one_thread",
    "registry",
    "run_client",
]

RunClients = Callable[[Sequence[Request]], Iterator[Reply]]
"""Runs clients; yields one reply for each request, in the order of the requests.

All requests of a call hold the same state. A call may begin when all replies of the last one were read.
"""


class Engine(Protocol):
    """Runs clients. An engine handles processes and messages; learning is left to the client.

    An engine whose clients keep their personal models, as devices do, has an attribute `keeps_models` that is true.
    """

    @property
    def workers(self) -> int:
        """Number of clients that train at once, for the record."""
        ...

    def open(self, spec: RunSpec, clients: Mapping[int, Client], memories: Memories) -> AbstractContextManager[RunClients]:
        """Start what runs clients; leaving the context ends it.

        Args:
            spec: The fixed parts of the run.
            clients: Client id → client.
            memories: The memories of the clients, on this machine.
        """
        ...


@dataclass(frozen=True)
class Processes(Checked):
    """Clients on this machine, without any framework. The results do not depend on the number of workers.

    Args:
        workers: Number of processes that train clients, one torch thread each; 1 trains in this process.
            On Linux and the CPU they are forked and share data and problem with this process without copying. Elsewhere they
            are spawned, and both must be picklable: no lambdas, and no classes of a notebook.

    Raises:
        InvalidValueError: a value that is not allowed.
    """

    workers: Count = 1

    @contextmanager
    def open(self, spec: RunSpec, clients: Mapping[int, Client], memories: Memories) -> Iterator[RunClients]:
        """Run clients in this process, one after the other, or in a pool of worker processes."""
        check_device(spec.config.device)
        with one_thread(), exact_arithmetic(spec.config.deterministic):
            if self.workers == 1:
                here = spec.on(device_of(spec.config.device))
                yield lambda requests: (answer(here, clients[one.client_id], one, memories) for one in requests)
                return
            state = {name: spec.initial[name].clone().share_memory_() for name in spec.shared_names()}
            context: Any = multiprocessing.get_context(start_method(spec.config.device))
            numbers, ids = context.SimpleQueue(), context.SimpleQueue()
            for number in range(self.workers):
                numbers.put(number)
            pool = ProcessPoolExecutor(self.workers, context, _begin, (spec, clients, memories, state, numbers, ids))
            try:
                yield lambda requests: _map(pool, spec, state, requests)
            except BaseException:
                while not ids.empty():  # nobody waits for what they do now
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(ids.get(), signal.SIGTERM)
                raise
            finally:
                pool.shutdown(cancel_futures=True)


def _map(pool: ProcessPoolExecutor, spec: RunSpec, state: StateDict, requests: Sequence[Request]) -> Iterator[Reply]:
    for name, tensor in state.items() if requests else ():
        tensor.copy_(requests[0].state[name])
    try:
        futures = [pool.submit(_run, encode_request(one, spec.graph, with_state=False)) for one in requests]
    except (TypeError, AttributeError, PicklingError) as error:
        raise InvalidValueError(
            f"model, data or method cannot be sent to a worker process: {error}; keep locks, open files, lambdas and classes of"
            " a notebook out of them, or run with workers=1 (--workers 1)"
        ) from error
    for request, future in zip(requests, futures, strict=True):
        try:
            yield decode_reply(future.result(), request, spec.graph)
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                f"a worker process died while client {request.client_id} or a later one had its turn in round {request.round};"
                " often the system is out of memory: try fewer workers (1 trains in this process)"
            ) from error


_worker: tuple[RunSpec, Mapping[int, Client], Memories, StateDict]
"""Of a worker process: what it works with."""


def _begin(spec: RunSpec, clients: Mapping[int, Client], memories: Memories, state: StateDict, numbers: Any, ids: Any) -> None:
    """Begin a worker process, which is interrupted by its parent alone, and ends with it."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    ids.put(os.getpid())
    train_alike()
    if spec.config.deterministic:
        use_exact_arithmetic()
    _worker = spec.on(device_of(spec.config.device, numbers.get())), clients, memories, state


def _run(payload: bytes) -> bytes:
    spec, clients, memories, state = _worker
    request = decode_request(payload, spec.graph, state=state)
    return encode_reply(answer(spec, clients[request.client_id], request, memories))


registry = Registry(
    "engine",
    {
        "flower": "sparsekit_fl.flower.engine:GridEngine",
        "processes": "sparsekit_fl.engines:Processes",
    },
    group="sparsekit_fl.engines",
)
