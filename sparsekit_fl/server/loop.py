"""run(): a method over a problem and its clients, with its folder, its engine and its errors."""

import errno
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, digest
from sparsekit_fl.callbacks.base import Callback, Callbacks, RunView
from sparsekit_fl.client.messages import Evaluation, Update, WorkCost
from sparsekit_fl.config import RunConfig
from sparsekit_fl.engines.base import ClientPool, Engine, Unscored
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.engines.spec import RunSpec, by_id
from sparsekit_fl.errors import ClientError, RunInterrupted, StorageError, TooFewRepliesError, WorkerDiedError
from sparsekit_fl.fingerprint import fingerprint_of
from sparsekit_fl.methods.adapter import policies_of
from sparsekit_fl.methods.base import Method as OneClass
from sparsekit_fl.methods.method import Method
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.metrics import lower_is_better
from sparsekit_fl.problem.problem import Problem, check_fit
from sparsekit_fl.results.records import RunResult, describe_environment
from sparsekit_fl.results.scores import FinalScores, RoundRecord, RoundScores
from sparsekit_fl.results.state.models import model_path, save_whole, write_recipe
from sparsekit_fl.results.state.store import ClientStore
from sparsekit_fl.server.checkpoint import RunFolder, Saved, describe_run
from sparsekit_fl.server.server import Server
from sparsekit_fl.server.steps import Synchronous, shortened
from sparsekit_fl.streams import Streams

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Rounds:
    """The rounds of one run."""

    spec: RunSpec
    clients: Mapping[int, Client]
    store: ClientStore
    folder: RunFolder | None
    saved: Saved
    callbacks: Callbacks
    experiment: Mapping[str, Any]

    def __post_init__(self) -> None:
        spec, folder = self.spec, self.folder
        self.server = Server(spec, self.clients, self.saved.server)
        self._memory_rounds, self._records = self.saved.memory_rounds, self.saved.records
        self._reasons: dict[int, str] = {}  # client id → why it was last dropped, so that a repetition is short
        self._export = None if folder is None else folder.path / "models"
        self.finished = self.server.state.round
        metrics = spec.problem.metrics
        self._lower = frozenset(name for name in (*metrics, "loss") if lower_is_better(name, metrics.get(name)))
        self._view = RunView(
            method=spec.method.name,
            config=spec.config,
            clients=len(self.clients),
            round=self.finished,
            cost=self._cost,
            out=None if folder is None else folder.path,
            metrics=(*metrics, "loss") if "loss" not in metrics else tuple(metrics),
            lower=self._lower,
            state=lambda: self.server.state.state,
            model=self._model,
        )
        self.store.keep_only(self._memory_rounds)

    @property
    def hint(self) -> str:
        """Tell how to go on."""
        if self.folder is None:
            return "nothing was kept, since the run had no output folder (out=, --out DIR)"
        return f"the state is in {self.folder.path}; go on with resume=True (--resume)"

    @property
    def _cost(self) -> WorkCost:
        return self._records[-1].cost if self._records else WorkCost()

    def run(self, pool: ClientPool) -> RunResult:
        """Run what is left of the rounds, and write the result."""
        try:
            self.callbacks.start(self._view, self.saved.callbacks)
            self._pool = pool
            self._steps = Synchronous(
                self.server, pool, lambda *trained: self.callbacks.tell("on_client_end", self._view, *trained)
            )
            result = self._run()
        except BaseException:
            try:
                self.callbacks.tell("on_run_end", self._view, None)
            except Exception:  # noqa: BLE001 - anybody's callback; what ended the run is what matters
                _log.exception("a callback failed when it was told that the run has ended")
            raise
        self.callbacks.tell("on_run_end", self._view, result)
        return result

    def _run(self) -> RunResult:
        final: list[Evaluation] | None = None
        for round in range(self.server.state.round + 1, self.spec.config.rounds + 1):
            if self._view.stopped:
                break
            final = self._round(round)
        if final is None:
            # Resumed after the last round: its scores were saved, those of each client were not. Or a callback ended the run
            # after a round in which not all were scored.
            final, _ = self._evaluate(self.server.state.round, list(self.clients), last=True)
            if self._records:  # none where a callback ended the run before the first round
                self._records[-1] = self._records[-1].model_copy(update={"evaluation": self._scores(final)})
        return self._finish(final)

    def _round(self, round: int) -> list[Evaluation] | None:
        """Run a round; return what every client scored, where this is the last one."""
        began = time.perf_counter()
        try:
            step = self._steps.step(round, self._memory_rounds)
        except TooFewRepliesError as error:
            raise TooFewRepliesError(f"{error}; {self.hint}") from error.__cause__
        self._warn(round, step.dropped)
        valid = {update.client_id for update in step.received}
        newest = {reply.client_id: round for reply in step.replies if reply.stored and reply.client_id in valid}
        stale = {client_id: self._memory_rounds[client_id] for client_id in newest if client_id in self._memory_rounds}
        self._memory_rounds = {**self._memory_rounds, **newest}
        self._view.round = round
        scores, unscored, final = self._score(round)
        cost = replace(step.cost, wall_seconds=time.perf_counter() - began)
        record = RoundRecord(
            round=round,
            cohort=tuple(assignment.client_id for assignment in step.started),
            dropped=tuple((client_id, str(error)) for client_id, error in step.dropped.items()),
            loss=_mean(step.updates, "loss"),
            accuracy=_mean(step.updates, "accuracy"),
            ratios={update.client_id: update.ratio for update in step.updates},
            capabilities={one.client_id: one.capability.ratio for one in step.started},
            cost=self._cost + cost,
            seconds=cost.simulated_seconds,
            evaluation=scores,
            notes=(
                *step.notes,
                *(reply.note for reply in step.replies if reply.note),
                *unscored,
            ),
        )
        self._records.append(record)
        states: list[tuple[str, dict[str, Any]]] = []
        if self.folder is not None:
            self.store.sync()
            self.folder.append(record)
            states = self.callbacks.states()
            self.folder.save(self.server.state, self._memory_rounds, states)
        self.finished = round
        self._view.cost = record.cost
        # Only now does no checkpoint on the disk need the older memories.
        self.store.remove(stale)
        try:
            self.callbacks.tell("on_round_end", self._view, record)
        finally:
            if self.folder is not None and self.callbacks.states() != states:
                self.folder.save(self.server.state, self._memory_rounds, self.callbacks.states())
        return final

    def _score(self, round: int) -> tuple[RoundScores | None, list[str], list[Evaluation] | None]:
        """Score where it is time; the evaluations come back where all clients were scored for the end of the run."""
        config = self.spec.config
        last = round == config.rounds
        every = config.eval_global_every
        whole = last or (every is not None and round % every == 0)  # the global model is scored too
        if not whole and round % (config.eval_every or 1):
            return None, [], None
        ids = list(self.clients) if last else self._scored(round)
        found, unscored = self._evaluate(round, ids, last=last, with_shared=whole)
        scores = self._scores(found)
        self.callbacks.tell("on_evaluation", self._view, scores)
        return scores, unscored, found if last else None

    def _scores(self, evaluations: Sequence[Evaluation]) -> RoundScores:
        return RoundScores.of(evaluations, sampled=self.spec.config.eval_clients is not None, lower=self._lower)

    def _warn(self, round: int, dropped: Mapping[int, Exception]) -> None:
        for client_id, error in dropped.items():
            reason = str(error.__cause__ or error)
            again = self._reasons.get(client_id) == reason
            self._reasons[client_id] = reason
            told = "for the same reason as before" if again else str(error)
            _log.warning("round %d goes on without client %d: %s", round, client_id, told)

    def _evaluate(
        self, round: int, ids: Sequence[int], *, last: bool, with_shared: bool = True
    ) -> tuple[list[Evaluation], list[str]]:
        """Score clients; for the end of the run write their models. Return a text for each that could not be scored.

        Raises:
            ClientError: none could.
        """
        if last and self._export is not None:
            self._export.mkdir(exist_ok=True)
        found: list[Evaluation] = []
        unscored: list[str] = []
        for evaluation in self._pool.evaluate(
            self.server.shared(),
            ids,
            self._memory_rounds,
            round=round,
            with_shared=with_shared,
            export=self._export if last else None,
        ):
            if isinstance(evaluation, Unscored):
                unscored.append(f"client {evaluation.client_id} was not scored: {evaluation.reason}")
                continue
            self.callbacks.tell("on_client_end", self._view, evaluation.client_id, evaluation)
            found.append(evaluation)
        if unscored:
            _log.warning("after round %d, %d clients were not scored: %s", round, len(unscored), shortened(unscored))
        if not found:
            raise ClientError(f"no client could be scored after round {round}: {shortened(unscored)}; {self.hint}")
        return found, unscored

    def _scored(self, round: int) -> list[int]:
        """Draw the clients to score before the last round, from seed and round: the same for any engine and method."""
        ids, most = list(self.clients), self.spec.config.eval_clients
        if most is None or most >= len(ids):
            return ids
        places = Streams(self.spec.config.seed).evaluation(round).choice(len(ids), size=most, replace=False)
        return [ids[place] for place in sorted(places)]

    def _finish(self, evaluations: Sequence[Evaluation]) -> RunResult:
        # A worker that outlived a killed run may have written once more after this one began.
        self.store.keep_only(self._memory_rounds)
        spec, scores = self.spec, RoundScores.of(evaluations, lower=self._lower)
        state = self.server.state.state
        result = RunResult(
            method=spec.method.describe(),
            config=spec.config,
            rounds=tuple(self._records),
            final=FinalScores(
                personal=scores.personal,
                validation=scores.validation,
                shared=scores.shared or {},
                per_client=tuple(evaluations),
                state_sha256=digest(state),
                weighted=scores.weighted,
                worst_decile=scores.worst_decile,
            ),
            cost=replace(self._cost, flops_deploying=sum(one.flops_deploying for one in evaluations)),
            environment=describe_environment(workers=self._pool.workers, device=spec.config.device),
            experiment=self.experiment,
            state=state,
            note=spec.method.note,
            fingerprint=self.saved.fingerprint,
            stopped=self._view.stopped,
            extended=self.saved.extended,
        )
        if self.folder is not None and self._export is not None:
            save_whole(model_path(self.folder.path, "global"), self._model())
            # A pool may leave personal models on their devices.
            recipe = {**spec.recipe, "personal": getattr(self._pool, "exports", True), "clients": list(self.clients)}
            write_recipe(self.folder.path, recipe)
            result.save(self.folder.path / "result.json")
        return result

    def _model(self) -> nn.Module:
        """Make a module that holds the global state."""
        return self.spec.model(self.server.state.state)


def _mean(updates: Sequence[Update], name: str) -> float | None:
    found = [(update.metrics[name], update.examples) for update in updates if name in update.metrics]
    if not found:
        return None
    return sum(value * examples for value, examples in found) / sum(examples for _, examples in found)


# Errors of a file that cannot grow: the disk is full, or a quota (which Windows lacks), or the limit of a file's size.
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
# Errors of a disk that takes nothing more, for another reason.
_BROKEN = (errno.EROFS, errno.EIO)


def run(
    method: Method | OneClass,
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
    method = policies_of(method) if isinstance(method, OneClass) else method
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
    check_fit(problem, clients)
    if resume and out is None:
        raise InvalidValueError("resume needs out, the folder of the run to go on with")
    told = Callbacks(callbacks)
    engine = Embedded() if engine is None else engine
    experiment = dict(experiment or {})
    folder = None if out is None else RunFolder(Path(out), resume=resume)
    temporary = tempfile.TemporaryDirectory(prefix="sparsekit-") if folder is None else nullcontext(str(folder.path))
    with nullcontext() if folder is None else closing(folder), temporary as base:
        spec = RunSpec.build(method, problem, config, graph=graph, init=init)
        fingerprint = fingerprint_of(None if folder is None else roster.values())
        saved = Saved(fingerprint)
        if folder is not None:
            saved = folder.start(describe_run(spec, roster, experiment), fingerprint, accept_code=accept_code)
        store = ClientStore(Path(base) / "clients", durable=folder is not None)
        loop = Rounds(spec, roster, store, folder, saved, told, experiment)
        try:
            return engine.run(loop.run, spec=spec, clients=roster, store=store)
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
