"""run_at_once: trials of a comparison in several processes, watched from this one."""

from __future__ import annotations

import contextlib
import logging
import signal
import warnings
from collections.abc import Generator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from sparsekit.errors import SparsekitError
from sparsekit_fl.cli.progress import Events, TrialsProgress
from sparsekit_fl.cli.trials import Task, TrialPlan, failed_trial, run_trial, tasks
from sparsekit_fl.errors import ResumeError, RunInterrupted, WorkerDiedError
from sparsekit_fl.processes import KILL, Child, Children, end_with_parent, one_thread, start_method
from sparsekit_fl.results.report.trials import Trial

_POLL_SECONDS = 0.25
# Ctrl-C reaches every process of a terminal, which then saves itself; a signal to this process alone is passed on.
_GOODBYE = ((3.0, signal.SIGINT), (15.0, KILL))


class _LogToPipe(logging.Handler):
    """Sends log messages to the process that draws."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._connection.send({"said": prefix + record.getMessage()})


def _run_one(connection: Connection, task: Task) -> None:
    """Run one trial, in a process of its own, and send events; the last one is how the trial ended."""
    end_with_parent()
    for package in ("sparsekit", "sparsekit_fl"):
        logging.getLogger(package).handlers = [_LogToPipe(connection)]
    warnings.showwarning = lambda message, *_, **__: connection.send({"said": f"warning: {message}"})
    # Where nobody listens any more, the trial stops; it goes on when its command line is given again.
    with contextlib.suppress(BrokenPipeError):
        try:
            connection.send({"result": run_trial(task, [Events(connection.send)]).result})
        except (RunInterrupted, KeyboardInterrupt) as error:
            connection.send({"interrupted": str(error) or "stopped by the user"})
        except ResumeError as error:
            connection.send({"refused": str(error)})
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - anybody's method may fail in any way; the other trials go on
            text = str(error) if isinstance(error, SparsekitError) else f"{type(error).__name__}: {error}"
            connection.send({"failed": text})


def _ended(child: Child, event: Mapping[str, Any] | None) -> Trial | None:
    """Return the trial where an event was the last of its process; None for the event of a child that died."""
    task: Task = child.task
    if event is None:
        child.process.join()
        error = WorkerDiedError(
            f"its process was killed (exit code {child.process.exitcode}); it goes on where it stopped when the same command"
            " is given again"
        )
        return failed_trial(task.plan, task.described, error)
    if "refused" in event:
        raise ResumeError(event["refused"])
    if "interrupted" in event:
        raise RunInterrupted(event["interrupted"])
    if "failed" in event:
        return failed_trial(task.plan, task.described, SparsekitError(event["failed"]))
    return Trial.of(event["result"]) if "result" in event else None


def run_at_once(plans: Sequence[TrialPlan], board: TrialsProgress, *, jobs: int) -> Generator[Trial]:
    """Run what is not finished, several trials at a time.

    Args:
        plans: Those of one level and seed beside each other.
        board: Told what happens.
        jobs: Number of trials at a time.

    Yields:
        One trial per plan, in the order in which they end.

    Raises:
        ResumeError: a folder holds a trial of other settings.
        RunInterrupted: Ctrl-C; all that is finished is kept.
        SparsekitError: the very first trial cannot be set up, so the options are wrong.
    """
    method = start_method(plans[0].options.device if plans else None)
    # One thread before the first operation: threads of torch do not survive a fork. No daemons: trials start workers.
    with one_thread(), Children(method, _GOODBYE, daemon=False) as children:
        pending, more = tasks(plans), True
        while more or len(children):
            while more and len(children) < jobs:
                task = next(pending, None)
                if task is None:
                    more = False
                elif task.trial is None:
                    children.start(_run_one, task, task=task)
                    board.begin(task.plan.label)
                else:
                    board.end(task.plan.label, task.trial, ran=False)
                    yield task.trial
            for child, event in children.poll(_POLL_SECONDS):
                label, trial = child.task.plan.label, _ended(child, event)
                if trial is None:
                    board.event(label, event)
                else:
                    children.remove(child)
                    board.end(label, trial, ran=True)
                    yield trial
            board.tick()
