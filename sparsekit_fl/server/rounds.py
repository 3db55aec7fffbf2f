"""Rounds: the only loop over rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from sparsekit.graph import digest
from sparsekit_fl.callbacks.base import Callbacks, RunView
from sparsekit_fl.client.messages import Evaluation, Update, WorkCost
from sparsekit_fl.engines.base import ClientPool, Unscored
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError, TooFewRepliesError
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.metrics import lower_is_better
from sparsekit_fl.results.environment import describe_environment
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.results.scores import FinalScores, RoundScores
from sparsekit_fl.results.state.models import global_file, save_whole, write_recipe
from sparsekit_fl.results.state.store import ClientStore
from sparsekit_fl.server.asynchronous import Simulated, Wall
from sparsekit_fl.server.checkpoint import RunFolder, Saved
from sparsekit_fl.server.server import Server
from sparsekit_fl.server.steps import Steps, Synchronous, shortened
from sparsekit_fl.streams import Streams

_log = logging.getLogger(__name__)


class Rounds:
    """The rounds of one run."""

    def __init__(
        self,
        spec: RunSpec,
        clients: Mapping[int, Client],
        store: ClientStore,
        folder: RunFolder | None,
        saved: Saved,
        callbacks: Callbacks,
        experiment: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
    ) -> None:
        self.spec = spec
        self.server = Server(spec, clients, saved.server)
        self._memory_rounds, self._records = saved.memory_rounds, saved.records
        self._clients = clients
        self._store = store
        self._folder = folder
        self._callbacks = callbacks
        self._saved_states = saved.callbacks
        self._reasons: dict[int, str] = {}  # client id → why it was last dropped, so that a repetition is short
        self._experiment = experiment
        self._fingerprint = fingerprint if folder is None else folder.fingerprint
        self._export = None if folder is None else folder.path / "models"
        self.finished = self.server.state.round
        metrics = spec.problem.metrics
        self._lower = frozenset(name for name in (*metrics, "loss") if lower_is_better(name, metrics.get(name)))
        self._view = RunView(
            method=spec.method.name,
            config=spec.config,
            clients=len(clients),
            round=self.finished,
            cost=self._cost,
            out=None if folder is None else folder.path,
            metrics=(*metrics, "loss") if "loss" not in metrics else tuple(metrics),
            lower=self._lower,
            state=lambda: self.server.state.state,
            model=self._model,
        )
        store.keep_only(self._memory_rounds)

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
        """Run what is left of the rounds, and write the result."""
        try:
            self._callbacks.start(self._view, self._saved_states)
            self._pool, self._steps = pool, self._make_steps(pool)
            result = self._run()
        except BaseException:
            try:
                self._callbacks.tell("on_run_end", self._view, None)
            except Exception:  # noqa: BLE001 - anybody's callback; what ended the run is what matters
                _log.exception("a callback failed when it was told that the run has ended")
            raise
        self._callbacks.tell("on_run_end", self._view, result)
        return result

    def _make_steps(self, pool: ClientPool) -> Steps:
        config = self.spec.config
        kind: type[Steps] = Synchronous
        if config.async_buffer is not None:
            kind = Wall if config.async_clock == "wall" else Simulated
        return kind(self.server, pool, lambda *trained: self._callbacks.tell("on_client_end", self._view, *trained))

    def _run(self) -> RunResult:
        final: list[Evaluation] | None = None
        for round in range(self.server.state.round + 1, self.spec.config.rounds + 1):
            if self._view.stopped:
                break
            final = self._round(round)
        if final is None:
            # Resumed after the last round: its scores were saved, those of each client were not. Or a callback ended the run
            # after a round in which not all were scored.
            final, _ = self._evaluate(self.server.state.round, list(self._clients), last=True)
            self._records[-1] = self._records[-1].model_copy(update={"evaluation": self._scores(final)})
        return self._finish(final)

    def _round(self, round: int) -> list[Evaluation] | None:
        """Run a round; return what every client scored, where this is the last one."""
        began = time.perf_counter()
        try:
            step = self._steps.step(round, self._memory_rounds, ids=list(self._clients))
        except TooFewRepliesError as error:
            raise TooFewRepliesError(f"{error}; {self.hint}") from error.__cause__
        self._warn(round, step.dropped)
        # Asynchronously a client may have started in an earlier round, after which its memory is named.
        valid = {update.client_id: update.round for update in step.received}
        stored = [reply.client_id for reply in step.replies if reply.stored and reply.client_id in valid]
        newest = {client_id: valid[client_id] for client_id in stored}
        stale = {client_id: self._memory_rounds[client_id] for client_id in newest if client_id in self._memory_rounds}
        self._memory_rounds = {**self._memory_rounds, **newest}
        self._view.round = round
        scores, unscored, final = self._score(round)
        if final is not None and (left := self._steps.under_way):
            unscored.append(f"asynchronous: the run ended while clients were under way, whose work does not count: {left}")
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
        if self._folder is not None:
            self._store.sync()
            self._folder.append(record)
            states = self._callbacks.states()
            self._folder.save(self.server.state, self._memory_rounds, states)
        self.finished = round
        self._view.cost = record.cost
        # Only now does no checkpoint on the disk need the older memories.
        self._store.remove(stale)
        try:
            self._callbacks.tell("on_round_end", self._view, record)
        finally:
            if self._folder is not None and self._callbacks.states() != states:
                self._folder.save(self.server.state, self._memory_rounds, self._callbacks.states())
        return final

    def _score(self, round: int) -> tuple[RoundScores | None, list[str], list[Evaluation] | None]:
        """Score where it is time; the evaluations come back where all clients were scored for the end of the run."""
        config = self.spec.config
        last = round == config.rounds
        every = config.eval_global_every
        whole = last or (every is not None and round % every == 0)  # the global model is scored too
        if not whole and round % (config.eval_every or 1):
            return None, [], None
        ids = list(self._clients) if last else self._scored(round)
        # Asynchronously others are at work, and nobody waits for them.
        free = ids if last else self._steps.free(ids)
        busy = [f"asynchronous: {len(free)} of {len(ids)} clients were scored; the nodes of the others were at work"]
        unscored = busy if len(free) < len(ids) else []
        if not free:
            return None, unscored, None
        found, silent = self._evaluate(round, free, last=last, with_shared=whole)
        unscored = [*unscored, *silent]
        scores = self._scores(found)
        self._callbacks.tell("on_evaluation", self._view, scores)
        if self._view.stopped and not last:
            found, unscored = self._evaluate(round, list(self._clients), last=True)
            scores, last = self._scores(found), True
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
            self._callbacks.tell("on_client_end", self._view, evaluation.client_id, evaluation)
            found.append(evaluation)
        if unscored:
            _log.warning("after round %d, %d clients were not scored: %s", round, len(unscored), shortened(unscored))
        if not found:
            raise ClientError(f"no client could be scored after round {round}: {shortened(unscored)}; {self.hint}")
        return found, unscored

    def _scored(self, round: int) -> list[int]:
        """Draw the clients to score before the last round, from seed and round: the same for any engine and method."""
        ids, most = list(self._clients), self.spec.config.eval_clients
        if most is None or most >= len(ids):
            return ids
        places = Streams(self.spec.config.seed).evaluation(round).choice(len(ids), size=most, replace=False)
        return [ids[place] for place in sorted(places)]

    def _finish(self, evaluations: Sequence[Evaluation]) -> RunResult:
        # A worker that outlived a killed run may have written once more after this one began.
        self._store.keep_only(self._memory_rounds)
        spec, scores = self.spec, RoundScores.of(evaluations, lower=self._lower)
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
                weighted=scores.weighted,
                worst=scores.worst,
            ),
            cost=replace(self._cost, flops_deploying=sum(one.flops_deploying for one in evaluations)),
            environment=describe_environment(workers=self._pool.workers, device=spec.config.device),
            experiment=self._experiment,
            state=state,
            note=spec.method.note,
            privacy={} if self.server.privacy is None else asdict(self.server.privacy),
            fingerprint=self._fingerprint,
            stopped=self._view.stopped,
            extended=() if self._folder is None else tuple(self._folder.extended),
        )
        if self._folder is not None and self._export is not None:
            save_whole(global_file(self._folder.path), self._model())
            # A pool may leave personal models on their devices.
            recipe = {**spec.recipe, "personal": getattr(self._pool, "exports", True), "clients": list(self._clients)}
            write_recipe(self._folder.path, recipe)
            result.save(self._folder.path / "result.json")
        return result

    def _model(self) -> nn.Module:
        """Make a module that holds the global state."""
        return self.spec.model(self.server.state.state)


def _mean(updates: Sequence[Update], name: str) -> float | None:
    found = [(update.metrics[name], update.examples) for update in updates if name in update.metrics]
    if not found:
        return None
    return sum(value * examples for value, examples in found) / sum(examples for _, examples in found)
