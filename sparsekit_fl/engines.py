"""Engines run clients: they map requests to replies, in order. `Processes` does so in this process, or in worker processes.

An engine in another package calls `answer` to run a client, and is found by name through `registry`.
"""

import contextlib
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from pickle import PicklingError
from typing import Any, Protocol

import numpy as np
import torch

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict
from sparsekit.registry import Registry
from sparsekit.version import __version__
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client.messages import Reply, Request, decode_reply, decode_request, encode_reply, encode_request
from sparsekit_fl.config import Checked, Count
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.problem.data import Client
from sparsekit_fl.spec import RunSpec, answer, run_client

__all__ = ["Engine", "Memories", "Processes", "RunClients", "RunSpec", "answer", "one_thread", "registry", "run_client"]

RunClients = Callable[[Sequence[Request]], Iterator[Reply]]
"""Runs clients; yields one reply for each request, in the order of the requests.

All requests of a call hold the same state. Read all replies of a call before you start another.
"""


class Engine(Protocol):
    """Runs clients. An engine handles processes and messages; it takes no part in the training itself.

    An engine whose clients keep their personal models, as devices do, has an attribute `keeps_models` that is true.
    """

    @property
    def workers(self) -> int:
        """Number of clients that train at the same time, which results record."""

    def clients(self, spec: RunSpec, clients: Mapping[int, Client]) -> Mapping[int, Client]:
        """Return the clients that are available now, by id. A run calls this before each round.

        Args:
            spec: The fixed parts of the run.
            clients: The clients that were passed to `run`; an engine whose clients join and leave ignores them.
        """

    def open(self, spec: RunSpec, clients: Mapping[int, Client], memories: Memories) -> AbstractContextManager[RunClients]:
        """Start the workers; leaving the context ends them.

        Args:
            spec: The fixed parts of the run.
            clients: The clients that were passed to `run`, by id.
            memories: Files with the memories of the clients that this machine trains.
        """


@dataclass(frozen=True)
class Processes(Checked):
    """Runs clients on this machine. Results do not depend on the number of workers.

    Args:
        workers: Number of processes that train clients, one torch thread each; 1 trains in this process.
            On Linux and the CPU they are forked and share data and problem with this process without copying. Elsewhere they
            are spawned, and both must be picklable: no lambdas, and no classes of a notebook.

    Raises:
        InvalidValueError: a value that is not allowed.
    """

    workers: Count = 1

    def clients(self, spec: RunSpec, clients: Mapping[int, Client]) -> Mapping[int, Client]:
        """Return all clients of the run, since they are always available."""
        del spec
        return clients

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
                while not ids.empty():  # end the workers, since their replies are no longer needed
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(ids.get(), signal.SIGTERM)
                raise
            finally:
                pool.shutdown(cancel_futures=True)


def _map(pool: ProcessPoolExecutor, spec: RunSpec, state: StateDict, requests: Sequence[Request]) -> Iterator[Reply]:
    for name, tensor in state.items() if requests else ():
        tensor.copy_(requests[0].state[name])
    when = "before"
    try:
        try:
            futures = [pool.submit(_run, encode_request(one, spec.graph, with_state=False)) for one in requests]
        except (TypeError, AttributeError, PicklingError) as error:
            raise InvalidValueError(
                f"model, data or method cannot be sent to a worker process: {error}; keep locks, open files, lambdas and"
                " classes of a notebook out of them, or run with workers=1 (--workers 1)"
            ) from error
        for request, future in zip(requests, futures, strict=True):
            when = f"while client {request.client_id} or a later one had its turn in"
            yield decode_reply(future.result(), request, spec.graph)
    except BrokenProcessPool as error:
        raise WorkerDiedError(
            f"a worker process died {when} round {requests[0].round}; often the system is out of memory: try fewer workers"
            " (1 trains in this process)"
        ) from error


_worker: tuple[RunSpec, Mapping[int, Client], Memories, StateDict]


def _begin(spec: RunSpec, clients: Mapping[int, Client], memories: Memories, state: StateDict, numbers: Any, ids: Any) -> None:
    """Prepare a worker process. It ignores Ctrl-C, and ends when its parent ends."""
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Use the settings of worker processes inside the block, so that results do not depend on the number of cores.

    They are those of `train_alike`. Afterwards, the caller's settings are restored.
    """
    before, denormals = torch.get_num_threads(), float(torch.tensor(1e-39) * 1.0) != 0.0
    train_alike()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(not denormals)


def train_alike() -> None:
    """Use one torch thread, and flush denormal numbers to zero. Decaying weights reach them, and they slow many processors."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def start_method(device: str | None) -> str:
    """Return "fork" on Linux for the CPU: children share data without copying, and nothing must be picklable.

    Elsewhere, and once torch has threads of autograd, which a forked child cannot use: "spawn".
    """
    names = Path("/proc/self/task").glob("*/comm")  # names of this process's threads
    with contextlib.suppress(OSError):
        if any(name.read_text(encoding="utf-8").startswith("pt_autograd") for name in names):
            return "spawn"
    return "fork" if sys.platform == "linux" and device in (None, "cpu") else "spawn"


def end_with_parent() -> None:
    """Wait until the parent process has ended, then end this process. Run it in a thread."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def devices(device: str) -> list[str]:
    return [part.strip() for part in device.split(",")]


def device_of(device: str, worker: int = 0) -> str:
    found = devices(device)
    return found[worker % len(found)]


def use_exact_arithmetic() -> None:
    """Allow only deterministic operators in this process, and no TF32. An operator without such a version raises an error."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import the compiler
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def exact_arithmetic(wanted: bool) -> Iterator[None]:
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if wanted:
        use_exact_arithmetic()
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def check_device(device: str, *, name: str = "device") -> None:
    """Raise InvalidValueError unless torch can use the device (cpu, cuda, cuda:1, mps), or each of a comma-separated list."""
    for one in devices(device):
        try:
            torch.empty(0, device=one)
        except (RuntimeError, AssertionError) as error:
            told = str(error).partition("\n")[0]
            raise InvalidValueError(f"{name} {one!r} cannot be used: {told}; leave it out to run on the CPU") from error


def describe_environment(*, workers: int, device: str) -> dict[str, Any]:
    """Return versions, settings and hardware that results may depend on, and the present time, as plain JSON values."""
    cuda = device.startswith("cuda")
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sparsekit": __version__,
        "threads": torch.get_num_threads(),
        "workers": workers,
        "device": device,
        "platform": platform.platform(),
        "gpu": [torch.cuda.get_device_name(name) for name in devices(device)] if cuda and torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if cuda else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


registry = Registry(
    "engine",
    {"flower": "sparsekit_fl.flower.engine:GridEngine", "processes": "sparsekit_fl.engines:Processes"},
    group="sparsekit_fl.engines",
)
