"""`run` trains a model with a federated method, round by round, scores it, and saves records, checkpoints and models."""

import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict
from sparsekit.surgery import save_compact
from sparsekit_fl.checkpoint import RunFolder, State
from sparsekit_fl.client.context import stream
from sparsekit_fl.client.messages import Cost, Reply, Request, Update, request_bytes
from sparsekit_fl.config import RunConfig
from sparsekit_fl.engines import Engine, Processes, RunClients, describe_environment
from sparsekit_fl.errors import ClientError, RunInterrupted, StorageError, TooFewRepliesError, UpdateError, WorkerDiedError
from sparsekit_fl.methods.base import Method, ServerContext
from sparsekit_fl.models import model_path, write_recipe
from sparsekit_fl.packing import clone, digest
from sparsekit_fl.problem.data import Client
from sparsekit_fl.problem.problem import Problem, check_fit
from sparsekit_fl.results import (
    Callback,
    ClientScores,
    FinalScores,
    RoundRecord,
    RoundScores,
    RunResult,
    RunView,
    load_result,
)
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec, by_id
from sparsekit_fl.stored import ids_text, primary_metric

_log = logging.getLogger(__name__)

# Errors of a disk that cannot be written: it is full, a quota (not on Windows) or the largest file size is reached, or it
# is broken.
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG, errno.EROFS, errno.EIO)
_MAX_REASONS = 5


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
    experiment: Mapping[str, Any] | None = None,
    init: Path | str | StateDict | None = None,
) -> RunResult:
    """Train a model over clients with a federated method, and score it.

    Model, loss and metrics are first tried on two examples, so that mistakes show at once.

    If a client fails or its update is invalid, the round continues without it, and the record of the round has the reason.
    A round with fewer valid updates than `config.min_replies` is discarded and ends the run; a resumed run repeats it.

    Args:
        method: The method, such as `fl.methods.fedlps()`.
        problem: Model, loss and metrics.
        clients: All clients, with distinct ids. A resumed run may have other clients; known ids continue from their
            memories. Empty for an engine whose clients are elsewhere, such as Flower's on devices.
        config: The options.
        engine: Runs the clients; None trains them in this process, one after the other.
        callbacks: Displays, loggers, early stopping; see `Callback`.
        out: Folder for the result, the rounds, the checkpoint and the models; None keeps nothing. Only one run
            at a time can use it. A new run needs a folder without files of another run.
        resume: Continue from the checkpoint in `out`; the result is identical to an uninterrupted run's.
        experiment: JSON values to store in the result, such as the names of data set and model.
        init: Weights to start from: a state dict, a file with one, or the folder of an earlier run; None for
            random weights. A resumed run needs the same value.

    Returns:
        Scores, costs and records.

    Raises:
        InvalidValueError: `method` is not a method, or clients and options do not fit each other.
        ResumeError: `out` holds another run, or none to resume; another run writes to it; an option or the model changed; or
            the clients are the same, but their data or devices changed.
        TooFewRepliesError: too few clients of a round sent a valid update; says which ones did not, and why.
        DataError: model, loss, metrics and data do not fit each other; see `check_fit`.
        ClientError: no client could be scored.
        RunInterrupted: Ctrl-C; says how to continue.
        WorkerDiedError: a worker process was killed; says how to continue.
        StorageError: the folder could not be written, as when the disk is full; says how to continue.
    """
    roster = _checked(method, clients, callbacks)
    check_fit(problem, list(roster.values()))
    engine = Processes() if engine is None else engine
    with RunFolder.open(out, resume=resume) as folder:
        spec = RunSpec.build(method, problem, config, init=init)
        there = partial(engine.clients, spec, roster)
        if not resume and there() is roster and config.cohort > len(roster):
            raise InvalidValueError(
                f"cohort is {config.cohort}, but the number of clients is {len(roster)}; lower it, or pass more clients"
            )
        described = spec.describe(roster, experiment or {})
        state, lines = folder.load(described, State(0, clone(spec.initial)))
        if (finished := _finished(folder, state, config)) is not None:
            return finished
        server = Server(spec, roster, state, folder.remembered)
        view = _view(server, folder, [RoundRecord.from_dict(line) for line in lines])
        for record in view.records:
            server.recall(record)
        with _explained(view), engine.open(spec, roster, folder.memories) as run_clients:
            final = _train(server, view, run_clients, folder, callbacks, there)
            if final is None:
                # Resumed after the last round, or stopped by a callback: the scores of each client were not saved.
                server.meet(there())
                ids, _ = _scored_after(config.rounds, list(server.clients), config)
                final, _ = _score(server, ids, run_clients, with_shared=True, with_model=folder.durable)
            # A worker of a killed run may have written another memory after this run began.
            folder.clean()
            result = _result(server, view, final, workers=engine.workers, experiment=described["experiment"])
            if folder.durable:
                _save(result, view, server, folder.path, personal=not getattr(engine, "keeps_models", False))
            return result


def _finished(folder: RunFolder, state: State, config: RunConfig) -> RunResult | None:
    """Return the saved result of a resumed run without remaining rounds; None if it is missing, or of fewer rounds."""
    if state.round < config.rounds or not (folder.path / "result.json").exists():
        return None
    saved = load_result(folder.path)
    return replace(saved, state=state.model) if len(saved.rounds) == state.round else None


def _view(server: Server, folder: RunFolder, records: list[RoundRecord]) -> RunView:
    return RunView(
        method=server.spec.method.name,
        config=server.spec.config,
        metrics=server.spec.problem.metrics,
        records=records,
        out=folder.path if folder.durable else None,
        model=lambda: server.spec.model(server.state.model),
    )


def _train(
    server: Server,
    view: RunView,
    run_clients: RunClients,
    folder: RunFolder,
    callbacks: Sequence[Callback],
    there: Callable[[], Mapping[int, Client]],
) -> list[ClientScores] | None:
    """Run the remaining rounds. Return the clients' scores after the last round, or None if this call did not run it."""
    final: list[ClientScores] | None = None
    for one in callbacks:
        one.on_run_start(view)
    while view.round < view.config.rounds and not view.stopped:
        changes = server.meet(there())
        record, final = _run_round(server, view, run_clients)
        record = replace(record, **changes)
        folder.save(server.state, record.to_dict())
        view.records = [*view.records, record]
        for one in callbacks:
            one.on_round_end(view, record)
    return final


def _result(
    server: Server, view: RunView, final: Sequence[ClientScores], *, workers: int, experiment: Mapping[str, Any]
) -> RunResult:
    spec, state = server.spec, server.state.model
    scores = FinalScores.of(
        final,
        lower=spec.problem.lower,
        per_client=tuple(final),
        state_sha256=digest(state),
        primary_metric=primary_metric((*spec.problem.metrics, "loss")),
    )
    return RunResult(
        method=spec.method.name,
        method_options=spec.method.describe(),
        config=spec.config,
        rounds=tuple(view.records),
        final=scores,
        clients=len(server.seen),
        cost=view.cost,
        environment=describe_environment(workers=workers, device=spec.config.device),
        experiment=experiment,
        state=state,
        note="\n".join(filter(None, (spec.method.note, server.note()))),
        stopped=view.stopped,
    )


def _save(result: RunResult, view: RunView, server: Server, out: Path, *, personal: bool) -> None:
    (out / "models").mkdir(exist_ok=True)
    save_compact(view.model(), model_path(out, "global"))
    write_recipe(out, server.spec.problem.model, sorted(server.seen), personal=personal)
    result.save(out / "result.json")


def _checked(method: Method, clients: Sequence[Client], callbacks: Sequence[Callback]) -> dict[int, Client]:
    if not isinstance(method, Method):
        raise InvalidValueError(f"method must be a Method, got {method!r}; call what makes one, as in fl.methods.fedlps()")
    for one in callbacks:
        if not isinstance(one, Callback):
            raise InvalidValueError(
                f"callbacks must be objects of classes that inherit from sparsekit_fl.Callback, got {one!r}"
            )
    roster = by_id(clients)
    if len(roster) != len(clients):
        raise InvalidValueError("client ids must be distinct; number them 0, 1, 2, …")
    return roster


@contextmanager
def _explained(view: RunView) -> Iterator[None]:
    """Add to errors the last saved round and how to continue."""
    try:
        yield
    except (KeyboardInterrupt, TooFewRepliesError, WorkerDiedError, OSError) as error:
        kind: type[BaseException] = type(error)
        told, cause = str(error), None if isinstance(error, KeyboardInterrupt) else error
        if isinstance(error, KeyboardInterrupt):
            kind, told = RunInterrupted, "stopped by the user"
        elif isinstance(error, OSError):
            if error.errno not in _FULL:
                raise
            kind, told = StorageError, f"{error}; make room first"
        hint = "nothing was kept, since the run had no output folder (out=, --out DIR)"
        if view.out is not None:
            hint = f"the state is in {view.out}; continue with resume=True (--resume)"
        raise kind(f"{told}; round {view.round} of {view.config.rounds} was the last to be finished; {hint}") from cause


def _run_round(server: Server, view: RunView, run_clients: RunClients) -> tuple[RoundRecord, list[ClientScores] | None]:
    """Run one round: train the cohort, aggregate, and score clients if due. Return its record, and scores of the last round."""
    began, spec, round = time.perf_counter(), server.spec, view.round + 1
    ctx = server.context(round)
    if len(ctx.roster) < (spec.config.min_replies or 1):
        raise TooFewRepliesError(
            f"round {round}: {len(ctx.roster)} clients are there, and min_replies is {spec.config.min_replies}"
        )
    requests = server.requests(ctx)
    skipped = [f"clients {ids_text(server.skipped)} are too small, and were not asked"] if server.skipped else []
    replies, good, dropped = _collect(server, ctx, requests, run_clients)
    seconds = server.aggregate(ctx, good, replies)
    ids, whole = _scored_after(round, list(server.clients), spec.config)
    last = round == spec.config.rounds
    found, unscored = _score(server, ids, run_clients, with_shared=whole, with_model=last and view.out is not None)
    done = [reply.update.cost for reply in replies if reply.update is not None]
    # The bytes sent to clients that failed still count.
    lost = [request for request, reply in zip(requests, replies, strict=True) if reply.update is None]
    cost = round_cost(done, wall_seconds=time.perf_counter() - began, until=seconds)
    cost += Cost(downlink_bytes=sum(request_bytes(request, spec.graph) for request in lost))
    record = RoundRecord(
        round=round,
        cohort=tuple(request.client_id for request in requests),
        dropped=tuple((client_id, str(error)) for client_id, error in dropped.items()),
        loss=_mean("loss", good),
        accuracy=_mean("accuracy", good),
        ratios={update.client_id: update.share for update in good},
        cost=view.cost + cost,
        seconds=cost.simulated_seconds,
        evaluation=RoundScores.of(found, lower=spec.problem.lower) if found else None,
        notes=(*skipped, *(reply.note for reply in replies if reply.note), *unscored),
    )
    return record, found if last else None


def _collect(
    server: Server, ctx: ServerContext, requests: Sequence[Request], run_clients: RunClients
) -> tuple[list[Reply], list[Update], dict[int, Exception]]:
    """Return the replies, the valid updates, and client id → why an update is missing; or raise TooFewRepliesError."""
    replies, good, dropped = list[Reply](), list[Update](), dict[int, Exception]()
    for request, reply in zip(requests, run_clients(requests), strict=True):
        replies.append(server.priced(request, reply))
        try:
            good.append(server.validate(ctx, request, replies[-1]))
        except (ClientError, UpdateError) as error:
            dropped[request.client_id] = error
            _log.warning("round %d continues without client %d: %s", ctx.round, request.client_id, error)
    needed = server.spec.config.needed_replies(len(requests))
    if len(good) < needed:
        reasons = _shortened([f"client {id}: {str(error).rstrip('.')}" for id, error in dropped.items()])
        raise TooFewRepliesError(
            f"round {ctx.round}: {len(good)} of {len(requests)} updates were valid and {needed} are needed"
            f" (min_replies); {reasons}. Nothing of that round counted"
        ) from next(iter(dropped.values()), None)
    return replies, good, dropped


def _scored_after(round: int, ids: list[int], config: RunConfig) -> tuple[list[int], bool]:
    """Return the ids of the clients to score after a round, if any, and whether the global model is scored too."""
    every, last = config.eval_global_every, round == config.rounds
    count = config.final_clients if last else config.eval_clients
    whole = last or (every is not None and round % every == 0)
    if not whole and round % (config.eval_every or 1):
        return [], False
    if count is not None and count < len(ids):
        # Drawn from seed and round, so that the sample is the same for any engine and method.
        positions = stream(config.seed, "evaluation", round).choice(len(ids), size=count, replace=False)
        ids = [ids[position] for position in sorted(positions)]
    return ids, whole


def _score(
    server: Server, ids: list[int], run_clients: RunClients, *, with_shared: bool, with_model: bool
) -> tuple[list[ClientScores], list[str]]:
    """Return the scores of the clients, and a message for each client that could not be scored."""
    with_shared = with_shared and bool(server.spec.shared_names())  # without shared entries, there is no global model to score
    replies = list(run_clients(server.scoring(ids, with_shared=with_shared, with_model=with_model))) if ids else []
    known = {*server.spec.problem.metrics, "loss"}
    found = [ClientScores.read(reply.evaluation, known) for reply in replies if reply.evaluation is not None]
    unscored = [f"client {one.client_id} was not scored: {one.error}" for one in replies if one.evaluation is None]
    if unscored:
        text = "after round %d, %d clients were not scored: %s"
        _log.warning(text, server.state.round, len(unscored), _shortened(unscored))
    if ids and not found:
        raise ClientError(f"no client could be scored after round {server.state.round}: {_shortened(unscored)}")
    return found, unscored


def _mean(name: str, updates: Sequence[Update]) -> float | None:
    """Return the mean of a training metric over the updates that have it, weighted by examples."""
    found = [(update.metrics[name], update.examples) for update in updates if name in update.metrics]
    return sum(value * examples for value, examples in found) / sum(examples for _, examples in found) if found else None


def round_cost(costs: Iterable[Cost], *, wall_seconds: float, until: float | None = None) -> Cost:
    """Add up the costs of all clients of a round.

    Simulated seconds are those of the slowest client, or `until`, if given. Clients work at the same time, so `wall_seconds` of
    the whole round replaces theirs.
    """
    costs = list(costs)
    slowest = max((cost.simulated_seconds for cost in costs), default=0.0) if until is None else until
    # With scoring time, another client may be the slowest.
    scoring = slowest - max((cost.seconds for cost in costs), default=0.0) if until is None else 0.0
    whole = sum(costs, Cost())
    return replace(whole, simulated_seconds=slowest, simulated_seconds_scoring=scoring, wall_seconds=wall_seconds)


def _shortened(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - _MAX_REASONS} more clients"] if len(texts) > _MAX_REASONS else []
    return "; ".join([*texts[:_MAX_REASONS], *more])
