"""run(): a method over a problem and its clients, with its folder, its engine and its errors."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit.rng import torch_scope
from sparsekit_fl.callbacks.base import Callback, Callbacks
from sparsekit_fl.engines.base import Engine
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.engines.spec import RunSpec, by_id
from sparsekit_fl.errors import RunInterrupted, StorageError, WorkerDiedError
from sparsekit_fl.fingerprint import fingerprint_of
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.own_code import own_code
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.state.store import ClientStore
from sparsekit_fl.server.checkpoint import RunFolder, Saved, describe_run
from sparsekit_fl.server.rounds import Rounds

# Errors of a file that cannot grow: the disk is full, or a quota (which Windows lacks), or the limit of a file's size.
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
# Errors of a disk that takes nothing more, for another reason.
_BROKEN = (errno.EROFS, errno.EIO)


def run(
    method: Method,
    problem: Problem,
    clients: Sequence[Client],
    config: RunConfig,
    *,
    engine: Engine | None = None,
    callbacks: Sequence[Callback] = (),
    out: Path | str | None = None,
    resume: bool = False,
    accept_code: bool = False,
    graph: UnitGraph | None = None,
    experiment: Mapping[str, Any] | None = None,
    init: Path | str | StateDict | None = None,
) -> RunResult:
    """Run a method over a problem and its clients.

    A client that fails, and an update that is refused, is dropped: the round goes on without it, and its record says why.
    A round with fewer valid updates than `config.min_replies` changes nothing and is repeated: the same assignments go to
    the same cohort once more, clients start from the memories that they had, and a client that answered before answers the
    same again. Its record then has a note for each attempt that failed, and the work of all attempts is in its cost. After
    two repetitions the run stops; everything up to the round before is saved, and the run can be resumed.

    Args:
        method: The recipe.
        problem: Model, loss and metrics.
        clients: All clients; ids are distinct.
        config: The options.
        engine: What runs clients; None trains them in this process, one after the other.
        callbacks: What happens beside the run: displays, loggers, early stopping; see `Callback`.
        out: Folder for the result, the rounds, the checkpoint and the models; None keeps nothing. One run at a time writes to
            it.
        resume: Go on from the checkpoint in `out`, to the same bits as a run that was never interrupted. A finished run goes
            on where `config.rounds` is more than it had; a method that plans its course by the number of rounds then plans by
            the new one.
        accept_code: Resume a run that another version of this package began, with a warning.
        graph: The units of the model, where they are already known.
        experiment: Plain JSON values that go into the result, such as the names of data set and model.
        init: Weights to start from: a state dict, a file of one, or the folder of an earlier run; None: random ones. A run that
            is resumed needs the same.

    Returns:
        Scores, costs and records.

    Raises:
        InvalidValueError: no method, or clients and options that do not fit each other.
        ResumeError: `out` holds another run, or none to resume, or an option, the code or the data changed.
        FolderInUseError: another run writes to `out`.
        TooFewRepliesError: too few clients of a round sent a valid update, three times; says who did not and why.
        ClientError: no client could be scored.
        RunInterrupted: Ctrl-C; says how to go on.
        WorkerDiedError: a worker process was killed; says how to go on.
        StorageError: the folder could not be written, as when the disk is full; says how to go on.
    """
    if not isinstance(method, Method):
        called = method if isinstance(method, str) else getattr(method, "__name__", "")
        raise InvalidValueError(
            f"method must be a Method, got {method!r}; call a function that makes one:"
            f" fl.methods.{called if called.isidentifier() else 'fedlps'}()"
        )
    roster = by_id(clients)
    if len(roster) != len(clients):
        raise InvalidValueError("client ids must be distinct; number them 0, 1, 2, …")
    if config.cohort > len(clients):
        there = "is only 1 client" if len(clients) == 1 else f"are only {len(clients)} clients"
        raise InvalidValueError(f"cohort is {config.cohort}, but there {there}; lower it, or pass more clients")
    if resume and out is None:
        raise InvalidValueError("resume needs out, the folder of the run to go on with")
    told = Callbacks(callbacks)
    engine = Embedded() if engine is None else engine
    experiment = dict(experiment or {})
    folder = None if out is None else RunFolder(Path(out), resume=resume)
    temporary = tempfile.TemporaryDirectory(prefix="sparsekit-") if folder is None else nullcontext(str(folder.path))
    with folder or nullcontext(), temporary as base:
        spec = RunSpec.build(method, problem, config, graph=graph, init=init)
        fingerprint = fingerprint_of(None if folder is None else roster.values())
        saved = Saved()
        if folder is not None:
            own = own_code(_of_the_user(method, problem))
            fingerprint.update({"own": own} if own else {})
            saved = folder.start(describe_run(spec, roster, experiment), fingerprint, accept_code=accept_code)
        store = ClientStore(Path(base) / "clients", durable=folder is not None)
        loop = Rounds(spec, roster, store, folder, saved, told, experiment, fingerprint)
        try:
            return engine.run(loop.run, spec=spec.for_clients(), clients=roster, store=store)
        except KeyboardInterrupt:
            raise RunInterrupted(f"stopped by the user after round {loop.finished} of {config.rounds}; {loop.hint}") from None
        except WorkerDiedError as error:
            raise WorkerDiedError(f"{error}; round {loop.finished} of {config.rounds} was finished; {loop.hint}") from error
        except OSError as error:
            if error.errno not in (*_FULL, *_BROKEN):
                raise
            remedy = "make room first" if error.errno in _FULL else "mend the disk first"
            raise StorageError(
                f"{error}; {remedy}. Round {loop.finished} of {config.rounds} was the last to be saved; {loop.hint}"
            ) from error


def _of_the_user(method: Method, problem: Problem) -> dict[str, Any]:
    """Return what may hold code of the user's, by the name that a message calls it."""
    with torch_scope(np.random.default_rng(0)):
        model = problem.model()
    return {
        "model": (problem.model, model),
        "loss": problem.loss,
        **{f"metric {name}": metric for name, metric in problem.metrics.items()},
        "read_batch": problem.read_batch,
        "augment": problem.augment,
        **{f"{kind} policy": policy for kind, policy in method.policies().items()},
    }
