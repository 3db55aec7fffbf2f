"""Children: processes of this machine whose death is seen at once; and the number of torch threads of each process."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PicklingError
from typing import Any

import cloudpickle
import torch

from sparsekit.errors import InvalidValueError

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_log = logging.getLogger(__name__)

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no other than the latter, which kills there


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Train as worker processes do meanwhile: with one torch thread, so that results do not depend on the number of cores, and
    without denormal numbers. The process is as it was afterwards, since it is the user's."""
    before, denormals = torch.get_num_threads(), float(torch.tensor(1e-39) * 1.0) != 0.0
    train_alike()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(not denormals)


def train_alike() -> None:
    """Use one torch thread, and flush denormal numbers to zero.

    Weights that decay towards 0 become denormal, and many processors compute several times more slowly with such numbers.
    """
    torch.set_num_threads(1)
    if not torch.set_flush_denormal(True):
        _log.info("this processor cannot flush denormal numbers; training slows down where weights are below 1e-38")


def start_method(device: str | None) -> str:
    """Return how processes start.

    Args:
        device: Where models train; None for the default.

    Returns:
        "fork" on Linux for the CPU, where children share data with this process without copying and nothing must be
        picklable; "spawn" elsewhere, and where torch has threads of autograd, which exist once a gradient was taken on a
        machine with a GPU: no child of a fork can take one then.
    """
    return "fork" if sys.platform == "linux" and device in (None, "cpu") and not _autograd_threads() else "spawn"


def _autograd_threads() -> bool:
    """Whether torch has started a thread of autograd for a device; the system knows them by name."""
    names = Path("/proc/self/task").glob("*/comm")
    with contextlib.suppress(OSError):
        return any(name.read_text(encoding="utf-8").startswith("pt_autograd") for name in names)
    return False


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, then end this one; for a thread of a worker process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def interrupt_with_parent() -> None:
    """Let this process be interrupted, as by Ctrl-C, when the one that started it dies; on Linux alone.

    Elsewhere it stops when it writes to a pipe that nobody reads.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGINT)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Knows what multiprocessing and torch have registered before what cloudpickle knows. Python asks the class alone."""

    dispatch_table = ChainMap(ForkingPickler._extra_reducers, cloudpickle.Pickler.dispatch_table)  # type: ignore[attr-defined]


class Sent:
    """What a process gets that is spawned: pickled with the classes and functions of a notebook, or of a script, by value.

    Tensors are shared and pipes are handed over, as multiprocessing does.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(self.value)
        return _received, (buffer.getvalue(),)


def _received(payload: bytes) -> Sent:
    return Sent(cloudpickle.loads(payload))


@dataclass(eq=False)
class Child:
    """A process that this one started, this end of its pipe, and what it works on; None while it is idle."""

    process: Any
    connection: Connection
    task: Any = None

    def ending(self) -> str:
        """Wait for the end of the process, and describe it: its exit code, or the signal that killed it."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        how = f"signal {-code} ({signal.Signals(-code).name})"
        return f"{how}; often the system is out of memory: try fewer workers" if -code == KILL else how


# What `close` sends to those that are still alive, after so many seconds. A daemon in the middle of a task would finish it
# first, and nobody waits for that result.
_GOODBYE = {True: ((0.0, signal.SIGTERM), (5.0, KILL)), False: ((3.0, signal.SIGINT), (15.0, KILL))}


class Children:
    """Processes that this one started, each with a pipe to it.

    The executors of `concurrent.futures` and of loky say of a killed worker only that some worker died, neither which task it
    had nor which signal ended it, and their tasks cannot send anything before they end. So this is our own.

    Args:
        start_method: One of `multiprocessing`'s.
        daemon: Whether the children end with this process, and have nothing to save; they then may not start processes of their
            own.
    """

    def __init__(self, start_method: str, *, daemon: bool) -> None:
        self._context: Any = multiprocessing.get_context(start_method)
        self._daemon = daemon
        self._children: list[Child] = []

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children))

    def __len__(self) -> int:
        return len(self._children)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, target: Callable[..., None], *arguments: Any, task: Any = None) -> Child:
        """Start a process, in which `target` is called with its end of the pipe and `arguments`; `task` is what it works on.

        Where processes do not fork, arguments are what cloudpickle can pickle, so also what a notebook defines.

        Raises:
            InvalidValueError: the arguments cannot be pickled.
        """
        forks = self._context.get_start_method() == "fork"
        ours, theirs = self._context.Pipe()
        inherited = [child.connection for child in self] + [ours] if forks else []
        work: Any = (target, arguments) if forks else Sent((target, arguments))
        process = self._context.Process(target=_begin, args=(theirs, inherited, work), daemon=self._daemon)
        try:
            process.start()
        except (TypeError, AttributeError, PicklingError) as error:
            raise InvalidValueError(
                f"model, data or method cannot be sent to a worker process: {error}; keep locks, open files and generators"
                " out of them, or run with workers=1 (--workers 1)"
            ) from error
        theirs.close()
        child = Child(process, ours, task)
        self._children.append(child)
        return child

    def poll(self, timeout: float | None = None) -> Iterator[tuple[Child, Any]]:
        """Wait until children that have a task send something, or die; yield each, and what it sent; None where it died."""
        busy = {child.connection: child for child in self if child.task is not None}
        for ready in wait(list(busy), timeout):
            assert isinstance(ready, Connection)
            try:
                message = ready.recv()
            except (EOFError, OSError):
                message = None
            yield busy[ready], message

    def remove(self, child: Child) -> None:
        """Wait for the end of a child that has nothing more to say."""
        self._children.remove(child)
        child.connection.close()
        child.process.join()

    def close(self) -> None:
        """Close all pipes, end the children that do not end by themselves, and wait for all, so that no zombie is left."""
        for child in self._children:
            # Nobody reads any more; a child that still writes would wait for ever.
            child.connection.close()
        alive, began = [child.process for child in self._children], time.monotonic()
        for seconds, number in _GOODBYE[self._daemon]:
            while (alive := [process for process in alive if process.is_alive()]) and time.monotonic() - began < seconds:
                time.sleep(0.01)
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        while self._children:
            self._children.pop().process.join()


def _begin(connection: Connection, inherited: Sequence[Connection], work: Any) -> None:
    for other in inherited:
        # A forked process inherits the ends of its siblings; while it holds them, nobody sees a pipe close.
        other.close()
    train_alike()
    target, arguments = work.value if isinstance(work, Sent) else work
    target(connection, *arguments)
