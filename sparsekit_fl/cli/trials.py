"""Trials of a comparison: run those that are not finished, here or several at once in processes of their own.

A finished trial is never run again, a half-finished one continues, and one that fails is recorded and stops no other.
"""

import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from sparsekit.cli import log_to
from sparsekit.errors import SparsekitError
from sparsekit_fl.callbacks import Callback, RunView
from sparsekit_fl.checkpoint import differences, holds_run, write_atomically
from sparsekit_fl.cli.experiment import Experiment
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.cli.progress import Events, TrialsProgress
from sparsekit_fl.errors import ResumeError, RunInterrupted, WorkerDiedError
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.processes import end_with_parent
from sparsekit_fl.stored import read_result
from sparsekit_fl.trials import TRIAL_FILE, Trial

_POLL_SECONDS = 0.25
_STOP_SECONDS = 15.0
_KILLED = (
    "its process was killed; often the system is out of memory: try fewer --jobs. It continues after its last saved round when"
    " the same command is given again"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One trial.

    Args:
        method: The method as the user wrote it.
        name: The method's own name.
        options: Options with the seed and the level of this trial.
        folder: Folder for its files; None keeps nothing.
        described: Settings that make a trial the same one: `config` and `policies`, plain JSON values.
    """

    method: str
    name: str
    options: RunOptions
    folder: Path | None
    described: Mapping[str, Any] = field(default_factory=lambda: {"config": {}, "policies": {}})

    @property
    def label(self) -> str:
        """Method, level and seed, as in `fedavg, low, lacks 4, seed 0`."""
        lack = self.options.lack_classes
        parts = (self.name, self.options.heterogeneity, None if lack is None else f"lacks {lack}", f"seed {self.options.seed}")
        return ", ".join(filter(None, parts))


@lru_cache(maxsize=1)
def _experiment(options: RunOptions) -> Experiment:
    """Load data and settings of a trial; the newest stay in memory, since neighbouring trials share them."""
    return Experiment.of(options)


def _set_up(task: Task, *, first: bool) -> Task | Trial:
    """Load a task's data and read its folder.

    Args:
        task: What to run, those of one level and seed beside each other.
        first: It is the very first one; where that cannot be set up, the options are wrong.

    Returns:
        What to run or to go on with; a trial where there is nothing to run: it is finished, or cannot even be set up.

    Raises:
        ResumeError: a folder holds a trial of other settings.
        SparsekitError: the first trial cannot be set up.
    """
    try:
        experiment = _experiment(task.options)
    except SparsekitError as error:
        if first:
            raise
        return _failed(task, error)
    method = make_method(task.method)
    config = {**method.configure(experiment.config).to_dict(), "experiment": dict(experiment.described)}
    task = replace(task, described=json.loads(json.dumps({"config": config, "policies": method.describe()})))
    if task.folder is None or not (task.folder / "result.json").exists():
        # A half-finished one has a checkpoint, with which the run compares all this.
        return task
    raw = read_result(task.folder)
    saved = Trial.of(raw)
    changed = differences({"config": dict(saved.config), "policies": dict(saved.policies)}, task.described)
    if changed:
        raise ResumeError(
            f"{task.folder} holds {task.label} with other settings ({'; '.join(changed)});"
            " pass the options it was run with, or another --out"
        )
    if raw["fingerprint"].get("data") not in (None, experiment.data_fingerprint):
        raise ResumeError(f"{task.folder} holds {task.label} on other data; restore the data, or pass another --out")
    return saved


def _record(task: Task, error: str | None) -> None:
    if task.folder is not None:
        task.folder.mkdir(parents=True, exist_ok=True)
        raw = {"method": task.name, "seed": task.options.seed, **task.described, "error": error}
        write_atomically(task.folder / TRIAL_FILE, (json.dumps(raw, indent=1) + "\n").encode())


def error_text(error: Exception) -> str:
    """The message of an error, with its kind where it is none of ours."""
    return str(error) if isinstance(error, SparsekitError) else f"{type(error).__name__}: {error}"


def _failed(task: Task, error: Exception) -> Trial:
    """Record a failed trial in its folder, and return it."""
    text = error_text(error)
    _record(task, text)
    return Trial(method=task.name, seed=task.options.seed or 0, **task.described, error=text)


def _ended(task: Task, send: Callable[[Any], None]) -> Trial:
    """Run one trial in this process, from its last checkpoint to its end, which for one that fails is the error.

    Args:
        task: What to run.
        send: Receives its events.

    Raises:
        RunInterrupted, KeyboardInterrupt: it was stopped.
        ResumeError: its folder holds a trial of other settings.
    """

    class Begun(Callback):
        """Notes the trial in its folder, once that is known to hold no other."""

        def on_run_start(self, run: RunView) -> None:
            del run
            _record(task, None)

    try:
        options = task.options.replaced(out=task.folder)
        callbacks = [Begun(), *options.callbacks(), Events(send)]
        resume = task.folder is not None and holds_run(task.folder)
        result = _experiment(task.options).run(make_method(task.method), options, callbacks, resume=resume)
        if task.folder is not None:
            (task.folder / TRIAL_FILE).unlink(missing_ok=True)
        return Trial.of(result.to_dict())
    except (RunInterrupted, ResumeError):
        raise
    except Exception as error:  # noqa: BLE001 - anybody's method may fail in any way; the other trials go on
        return _failed(task, error)


def run_trials(tasks: Sequence[Task], board: TrialsProgress, *, jobs: int) -> Generator[Trial]:
    """Run what is not finished, in this process or several trials at a time in processes of their own.

    Args:
        tasks: What to run, those of one level and seed next to each other.
        board: Display that receives their events.
        jobs: Number of trials at a time.

    Yields:
        One trial per task, in the order in which they end.

    Raises:
        ResumeError: a folder holds a trial of other settings.
        RunInterrupted, KeyboardInterrupt: Ctrl-C; all that is finished is kept.
        SparsekitError: the very first trial cannot be set up, so the options are wrong.
    """
    pending, idle, busy = deque(tasks), list[_Worker](), dict[Future[Trial], tuple[_Worker, Task]]()
    try:
        while pending or busy:
            while pending and len(busy) < jobs:
                task = pending.popleft()
                found, label = _set_up(task, first=len(pending) == len(tasks) - 1), task.label
                if isinstance(found, Task):
                    board.begin(label)
                    if jobs > 1:
                        worker = idle.pop() if idle else _Worker()
                        busy[worker.pool.submit(_run_one, found)] = worker, found
                        continue
                    trial = _ended(found, partial(board.event, label))
                else:
                    trial = found
                board.end(label, trial, ran=trial is not found)
                yield trial
            done = wait(busy, _POLL_SECONDS, FIRST_COMPLETED).done
            for future, (worker, task) in list(busy.items()):
                while not worker.events.empty():
                    board.event(task.label, worker.events.get())
                if future not in done:
                    continue
                del busy[future]
                try:
                    trial = future.result()
                    idle.append(worker)
                except BrokenProcessPool:
                    trial = _failed(task, WorkerDiedError(_KILLED))
                board.end(task.label, trial, ran=True)
                yield trial
            board.tick()
    finally:
        for worker in (*idle, *(worker for worker, _ in busy.values())):
            worker.close()


class _Worker:
    """A process that runs one trial after the other. It has an executor of its own, so that its death is that of one trial."""

    def __init__(self) -> None:
        context = get_context("spawn")  # executors have threads, which a fork does not survive
        before = set(active_children())
        self.events = context.SimpleQueue()
        self.pool = ProcessPoolExecutor(1, context, _begin, (self.events,))
        # Ctrl-C reaches every process of a terminal; a worker, which inherits this, hears of it from this process alone.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.pool.submit(int)
        finally:
            signal.signal(signal.SIGINT, handler)
        self._processes = set(active_children()) - before

    def close(self) -> None:
        """End the process; a run in it is interrupted, which keeps its finished rounds."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_STOP_SECONDS)
            process.kill()
        self.pool.shutdown()


def _begin(events: Any) -> None:
    """Begin a worker process, which ends with its parent."""
    global _events
    _events = events
    log_to(lambda line: events.put({"said": line}))
    threading.Thread(target=end_with_parent, daemon=True).start()


_events: Any
"""Of a worker process: where events go."""


def _run_one(task: Task) -> Trial:
    """Run one trial in a worker process. SIGTERM interrupts it as Ctrl-C does, then ends the process."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return _ended(task, _events.put)
    except (RunInterrupted, KeyboardInterrupt):
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
