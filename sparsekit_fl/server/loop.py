"""run(): the only loop over rounds."""

from __future__ import annotations

import errno
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.state import StateDict, digest
from sparsekit_fl.client.spec import RunSpec, by_id
from sparsekit_fl.costs.clock import round_cost
from sparsekit_fl.engines.base import ClientPool, Engine, Reply, Unscored
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.errors import ClientError, RunInterrupted, StorageError, TooFewRepliesError, WorkerDiedError
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.results.records import (
    FinalScores,
    Observer,
    RoundRecord,
    RoundScores,
    RunResult,
    RunStart,
    describe_environment,
)
from sparsekit_fl.server.checkpoint import RunFolder, describe_run
from sparsekit_fl.server.server import Aggregated, Server
from sparsekit_fl.state.storage import write_atomically
from sparsekit_fl.state.store import ClientStore
from sparsekit_fl.streams import Streams
from sparsekit_fl.wire.messages import Assignment, Evaluation, Update, WorkCost
from sparsekit_fl.wire.packing import pack

__all__ = ["run"]

_log = logging.getLogger(__name__)
_REPEATS = 2
_MOST_REASONS = 5
# Errors of a file that cannot grow: the disk is full, or a quota, or the limit of a file's size.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run(
    method: Method,
    problem: Problem,
    clients: Sequence[Client],
    config: RunConfig,
    *,
    engine: Engine | None = None,
    observers: Sequence[Observer] = (),
    out: Path | str | None = None,
    resume: bool = False,
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
        observers: Objects that are told what happens.
        out: Folder for the result, the rounds, the checkpoint and the models; None keeps nothing.
        resume: Go on from the checkpoint in `out`, to the same bits as a run that was never interrupted.
        graph: The units of the model, where they are already known.
        experiment: Plain JSON values that go into the result, such as the names of data set and model.
        init: Weights to start from: a state dict, a file of one, or the folder of an earlier run; None: random ones. A run that
            is resumed needs the same.

    Returns:
        Scores, costs and records.

    Raises:
        InvalidValueError: no method, or clients and options that do not fit each other.
        ResumeError: `out` holds another run, or an option changed.
        TooFewRepliesError: too few clients of a round sent a valid update, three times; says who did not and why.
        ClientError: no client could be scored.
        RunInterrupted: Ctrl-C; says how to go on.
        WorkerDiedError: a worker process was killed; says how to go on.
        StorageError: the folder could not be written, as when the disk is full; says how to go on.
    """
    if not isinstance(method, Method):
        raise InvalidValueError(f"method must be a Method, got {method!r}; call the function: fl.methods.fedlps()")
    roster = by_id(clients)
    if len(roster) != len(clients):
        raise InvalidValueError("client ids must be distinct; number them 0, 1, 2, …")
    if config.cohort > len(clients):
        raise InvalidValueError(
            f"cohort is {config.cohort}, but there are only {len(clients)} clients; lower it, or pass more clients"
        )
    if resume and out is None:
        raise InvalidValueError("resume needs out, the folder of the run to go on with")
    spec = RunSpec.build(method, problem, config, graph=graph, init=init)
    experiment = dict(experiment or {})
    folder = None if out is None else RunFolder(Path(out), describe_run(spec, roster, experiment))
    engine = Embedded() if engine is None else engine
    temporary = tempfile.TemporaryDirectory(prefix="sparsekit-") if folder is None else nullcontext(str(folder.path))
    with temporary as base:
        store = ClientStore(Path(base) / "clients", durable=folder is not None)
        loop = _Loop(spec, roster, store, folder, observers, experiment, resume=resume)
        try:
            return engine.run(loop.run, spec=spec.for_clients(), clients=roster, store=store)
        except KeyboardInterrupt:
            raise RunInterrupted(
                f"stopped by the user after round {loop.server.state.round} of {config.rounds}; {loop.hint}"
            ) from None
        except WorkerDiedError as error:
            raise WorkerDiedError(
                f"{error}; round {loop.server.state.round} of {config.rounds} was finished; {loop.hint}"
            ) from error
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise StorageError(
                f"{error}; make room first. Round {loop.saved_round} of {config.rounds} was the last to be saved; {loop.hint}"
            ) from error


class _Attempt(NamedTuple):
    """The replies to a round's assignments, sent out once."""

    replies: list[Reply]
    aggregated: Aggregated
    dropped: dict[int, Exception]

    def text(self, needed: int) -> str:
        """Say why too little came back; the first reasons in full."""
        reasons = [f"client {client_id}: {str(error).rstrip('.')}" for client_id, error in self.dropped.items()]
        more = [f"and {len(reasons) - _MOST_REASONS} clients more"] if len(reasons) > _MOST_REASONS else []
        return (
            f"{len(self.aggregated.updates)} of {len(self.replies)} updates were valid and {needed} are needed (min_replies); "
            + "; ".join([*reasons[:_MOST_REASONS], *more])
        )


class _Loop:
    """The rounds of one run."""

    def __init__(
        self,
        spec: RunSpec,
        clients: Mapping[int, Client],
        store: ClientStore,
        folder: RunFolder | None,
        observers: Sequence[Observer],
        experiment: Mapping[str, Any],
        *,
        resume: bool,
    ) -> None:
        saved = None if folder is None else folder.start(resume=resume)
        self.spec = spec
        self.server = Server(spec, clients, None if saved is None else saved.server)
        self._versions = {} if saved is None else saved.versions
        self._records = [] if saved is None else saved.records
        self._clients = clients
        self._store = store
        self._folder = folder
        self._observers = observers
        self._reasons: dict[int, str] = {}  # client id → why it was last dropped, so that a repetition is short
        self._experiment = experiment
        self._export = None if folder is None else folder.path / "models"
        self.saved_round = self.server.state.round
        store.keep_only(self._versions)

    @property
    def hint(self) -> str:
        """Tell how to go on."""
        if self._folder is None:
            return "nothing was kept, since the run had no output folder (out=, --out DIR)"
        return f"the state is in {self._folder.path}; go on with resume=True (--resume)"

    @property
    def _cost(self) -> WorkCost:
        return self._records[-1].cost if self._records else WorkCost()

    def run(self, pool: ClientPool) -> RunResult:
        config = self.spec.config
        start = RunStart(
            method=self.spec.method.name,
            config=config,
            clients=len(self._clients),
            round=self.server.state.round,
            cost=self._cost,
        )
        for observer in self._observers:
            observer.on_start(start)
        evaluations: list[Evaluation] | None = None
        for round in range(self.server.state.round + 1, config.rounds + 1):
            evaluations = self._round(pool, round)
        if evaluations is None:
            # Resumed after the last round: its scores were saved, those of each client were not.
            evaluations, _ = self._evaluate(pool, config.rounds)
        return self._finish(pool, evaluations)

    def _round(self, pool: ClientPool, round: int) -> list[Evaluation] | None:
        began = time.perf_counter()
        assignments = self.server.assign(round)
        attempts = self._attempts(pool, round, assignments)
        replies, aggregated, dropped = attempts[-1]
        valid = {update.client_id for update in aggregated.updates}
        newest = {reply.client_id: round for reply in replies if reply.stored and reply.client_id in valid}
        stale = {client_id: self._versions[client_id] for client_id in newest if client_id in self._versions}
        self._versions = {**self._versions, **newest}
        due = round % self.spec.config.eval_every == 0 or round == self.spec.config.rounds
        evaluations, unscored = self._evaluate(pool, round) if due else (None, [])
        cost = WorkCost()
        for one in attempts:
            done = [reply.update.cost for reply in one.replies if reply.update is not None]
            cost += round_cost(done, wall_seconds=0.0, seconds=one.aggregated.seconds)
            cost += WorkCost(memory_bytes=sum(reply.memory_bytes for reply in one.replies))
        cost = replace(cost, wall_seconds=time.perf_counter() - began)
        sampled = self.spec.config.eval_clients is not None
        record = RoundRecord(
            round=round,
            cohort=tuple(assignment.client_id for assignment in assignments),
            dropped=tuple((client_id, str(error)) for client_id, error in dropped.items()),
            loss=_mean(aggregated.updates, "loss"),
            accuracy=_mean(aggregated.updates, "accuracy"),
            ratios={update.client_id: update.ratio for update in aggregated.updates},
            cost=self._cost + cost,
            seconds=cost.seconds,
            evaluation=None if evaluations is None else RoundScores.of(evaluations, sampled=sampled),
            notes=(
                *(f"repeated, since {one.text(self._needed(assignments))}" for one in attempts[:-1]),
                *(reply.note for reply in replies if reply.note),
                *unscored,
            ),
        )
        self._records.append(record)
        if self._folder is not None:
            self._store.sync()
            self._folder.append(record)
            self._folder.save(self.server.state, self._versions)
            self.saved_round = round
        # Only now does no checkpoint on the disk need the older memories.
        self._store.remove(stale)
        for observer in self._observers:
            observer.on_round(record)
        return evaluations

    def _needed(self, assignments: Sequence[Assignment]) -> int:
        return self.spec.config.needed_replies(len(assignments))

    def _attempts(self, pool: ClientPool, round: int, assignments: Sequence[Assignment]) -> list[_Attempt]:
        """Send out until enough valid updates came back; the last attempt is the one that counts.

        Raises:
            TooFewRepliesError: there was none.
        """
        needed = self._needed(assignments)
        attempts: list[_Attempt] = []
        for _ in range(1 + _REPEATS):
            replies: list[Reply] = []
            for reply in pool.map(assignments, self._versions):
                for observer in self._observers:
                    observer.on_client(round, reply.client_id, reply.update)
                replies.append(reply)
            aggregated = self.server.aggregate([reply.update for reply in replies if reply.update is not None], needed=needed)
            dropped: dict[int, Exception] = {reply.client_id: reply.error for reply in replies if reply.error is not None}
            dropped.update(aggregated.refused)
            attempts.append(_Attempt(replies, aggregated, dropped))
            if len(aggregated.updates) >= needed:
                for client_id, error in dropped.items():
                    reason = str(error.__cause__ or error)
                    again = self._reasons.get(client_id) == reason
                    self._reasons[client_id] = reason
                    told = "for the same reason as before" if again else str(error)
                    _log.warning("round %d goes on without client %d: %s", round, client_id, told)
                return attempts
            _log.warning("round %d does not count: %s", round, attempts[-1].text(needed))
        raise TooFewRepliesError(
            f"round {round} was sent out {len(attempts)} times, and still {attempts[-1].text(needed)}."
            f" Nothing of that round counted; {self.hint}"
        ) from next(iter(attempts[-1].dropped.values()), None)

    def _evaluate(self, pool: ClientPool, round: int) -> tuple[list[Evaluation], list[str]]:
        """Score a sample of the clients, or all; after the last round all. Return a text for each that could not be scored.

        Raises:
            ClientError: none could.
        """
        last = round == self.spec.config.rounds
        if last and self._export is not None:
            self._export.mkdir(exist_ok=True)
        found: list[Evaluation] = []
        unscored: list[str] = []
        for evaluation in pool.evaluate(
            self.server.shared(),
            list(self._clients) if last else self._scored(round),
            self._versions,
            round=round,
            with_shared=last,
            export=self._export if last else None,
        ):
            if isinstance(evaluation, Unscored):
                unscored.append(f"client {evaluation.client_id} was not scored: {evaluation.reason}")
                continue
            for observer in self._observers:
                observer.on_evaluation(round, evaluation.client_id, evaluation)
            found.append(evaluation)
        if unscored:
            more = f"; and {len(unscored) - _MOST_REASONS} clients more" if len(unscored) > _MOST_REASONS else ""
            _log.warning(
                "after round %d, %d clients were not scored: %s%s",
                round,
                len(unscored),
                "; ".join(unscored[:_MOST_REASONS]),
                more,
            )
        if not found:
            raise ClientError(
                f"no client could be scored after round {round}: {'; '.join(unscored[:_MOST_REASONS])}; {self.hint}"
            )
        return found, unscored

    def _scored(self, round: int) -> list[int]:
        """Draw the clients to score before the last round, from seed and round: the same for any engine and method."""
        ids, most = list(self._clients), self.spec.config.eval_clients
        if most is None or most >= len(ids):
            return ids
        places = Streams(self.spec.config.seed).evaluation(round).choice(len(ids), size=most, replace=False)
        return [ids[place] for place in sorted(places)]

    def _finish(self, pool: ClientPool, evaluations: Sequence[Evaluation]) -> RunResult:
        # A worker that outlived a killed run may have written once more after this one began.
        self._store.keep_only(self._versions)
        spec, scores = self.spec, RoundScores.of(evaluations)
        state = self.server.state.state
        result = RunResult(
            method=spec.method.describe(),
            config=spec.config,
            rounds=tuple(self._records),
            final=FinalScores(
                personal=scores.personal,
                shared=scores.shared or {},
                per_client=tuple(evaluations),
                state_sha256=digest(state),
            ),
            cost=self._cost,
            environment=describe_environment(workers=pool.workers, device=spec.config.device),
            experiment=self._experiment,
            state=state,
            note=spec.method.note,
            privacy={} if self.server.privacy is None else asdict(self.server.privacy),
        )
        if self._folder is not None and self._export is not None:
            meta = {"method": spec.method.name, "round": self.server.state.round}
            write_atomically(self._export / "global.safetensors", pack(state, meta))
            result.save(self._folder.path / "result.json")
        for observer in self._observers:
            observer.on_end(result)
        return result


def _mean(updates: Sequence[Update], name: str) -> float | None:
    found = [(update.metrics[name], update.examples) for update in updates if name in update.metrics]
    if not found:
        return None
    return sum(value * examples for value, examples in found) / sum(examples for _, examples in found)
