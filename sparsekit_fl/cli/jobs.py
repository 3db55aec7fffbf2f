"""run_at_once: trials of a comparison in several processes, watched from this one."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from sparsekit.errors import SparsekitError
from sparsekit_fl.cli.progress import Events, TrialsProgress
from sparsekit_fl.cli.trials import Task, TrialPlan, failed_trial, run_trial, tasks
from sparsekit_fl.client.worker import one_thread
from sparsekit_fl.errors import ResumeError, RunInterrupted, WorkerDiedError
from sparsekit_fl.report.trials import Trial

__all__ = ["run_at_once"]

_PATIENCE_SECONDS = 3.0


def run_at_once(plans: Sequence[TrialPlan], board: TrialsProgress, *, jobs: int) -> Generator[Trial]:
    """Run what is not finished, several trials at a time.

    Args:
        plans: Those of one level and seed beside each other.
        board: Told what happens.
        jobs: How many at a time.

    Yields:
        One trial per plan, in the order in which they end.

    Raises:
        ResumeError: a folder holds a trial of other settings.
        RunInterrupted: Ctrl-C; all that is finished is kept.
        SparsekitError: the very first trial cannot be set up, so the options are wrong.
    """
    # Before the first operation: threads of torch do not survive a fork.
    one_thread()
    with _Jobs(jobs, board) as running:
        yield from running.run(tasks(plans))


def _send(connection: Connection, event: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(event).encode())


class _Sayings(logging.Handler):
    """Log messages go to the process that draws."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        _send(self._connection, {"said": prefix + record.getMessage()})


def _child(task: Task, connection: Connection, others: Sequence[Connection]) -> None:
    """The life of a process that runs one trial."""
    for other in others:
        # A forked process inherits the ends of its siblings; while it holds them, nobody sees a pipe close.
        other.close()
    one_thread()
    for package in ("sparsekit", "sparsekit_fl"):
        logging.getLogger(package).handlers = [_Sayings(connection)]
    warnings.showwarning = lambda message, *_, **__: _send(connection, {"said": f"warning: {message}"})
    # Where nobody listens any more, the trial stops; it goes on when its command line is given again.
    with contextlib.suppress(BrokenPipeError):
        try:
            trial = run_trial(task, [Events(lambda event: _send(connection, event))])
            _send(connection, {"result": trial.result})
        except (RunInterrupted, KeyboardInterrupt) as error:
            _send(connection, {"interrupted": str(error) or "stopped by the user"})
        except ResumeError as error:
            _send(connection, {"refused": str(error)})
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - anybody's method may fail in any way; the other trials go on
            text = str(error) if isinstance(error, SparsekitError) else f"{type(error).__name__}: {error}"
            _send(connection, {"failed": text})


class _Jobs:
    """Processes, each with a trial."""

    def __init__(self, jobs: int, board: TrialsProgress) -> None:
        self._jobs = jobs
        self._board = board
        self._busy: dict[Connection, tuple[Task, Any]] = {}

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        """Let what still runs save itself and end."""
        for connection in self._busy:
            # Nobody reads any more; a child that still writes would wait for ever.
            connection.close()
        processes = [process for _, process in self._busy.values()]
        began, told = time.monotonic(), False
        while any(process.is_alive() for process in processes):
            time.sleep(0.05)
            waited = time.monotonic() - began
            alive = [process for process in processes if process.is_alive()]
            if waited > 5 * _PATIENCE_SECONDS:
                for process in alive:
                    process.kill()
            elif waited > _PATIENCE_SECONDS and not told:
                # Ctrl-C reaches every process of a terminal; a signal to this process alone is passed on here.
                told = True
                for process in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join()

    def run(self, pending: Iterator[Task]) -> Iterator[Trial]:
        """Start trials as processes become free; yield each as it ends."""
        more = True
        while more or self._busy:
            while more and len(self._busy) < self._jobs:
                task = next(pending, None)
                if task is None:
                    more = False
                elif task.trial is None:
                    self._start(task)
                else:
                    self._board.end(task.plan.label, task.trial, ran=False)
                    yield task.trial
            for connection in wait(list(self._busy), timeout=0.25):
                assert isinstance(connection, Connection)
                trial = self._receive(connection)
                if trial is not None:
                    yield trial
            self._board.tick()

    def _start(self, task: Task) -> None:
        forks = sys.platform == "linux" and task.plan.options.device in (None, "cpu")
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        ours, theirs = context.Pipe(duplex=False)
        others = [*self._busy, ours] if forks else []
        # Not a daemon, since it starts workers of its own.
        process = context.Process(target=_child, args=(task, theirs, others))
        process.start()
        theirs.close()
        self._busy[ours] = task, process
        self._board.begin(task.plan.label)

    def _receive(self, connection: Connection) -> Trial | None:
        """Read one event; the trial, if it was the last."""
        task, process = self._busy[connection]
        try:
            event = json.loads(connection.recv_bytes())
        except EOFError:
            process.join()
            error = WorkerDiedError(
                f"its process was killed (exit code {process.exitcode}); it goes on where it stopped when the same"
                " command is given again"
            )
            return self._end(connection, failed_trial(task.plan, task.described, error))
        if "refused" in event:
            raise ResumeError(event["refused"])
        if "interrupted" in event:
            raise RunInterrupted(event["interrupted"])
        if "result" in event:
            return self._end(connection, Trial.of(event["result"]))
        if "failed" in event:
            return self._end(connection, failed_trial(task.plan, task.described, SparsekitError(event["failed"])))
        self._board.event(task.plan.label, event)
        return None

    def _end(self, connection: Connection, trial: Trial) -> Trial:
        task, process = self._busy.pop(connection)
        connection.close()
        process.join()
        self._board.end(task.plan.label, trial, ran=True)
        return trial
