"""client_round() and client_evaluate(): the work of a client, the same under every engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsekit.allocation import check_ratio
from sparsekit.graph import StateDict
from sparsekit.rng import torch_scope
from sparsekit.surgery import save_compact
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.costs import client_seconds
from sparsekit_fl.client.kept import Kept, Mask, mask_state
from sparsekit_fl.client.memory import Memory, rngs_by_kind
from sparsekit_fl.client.messages import Assignment, Evaluation, Update, WorkCost, assignment_bytes, update_bytes
from sparsekit_fl.client.packing import upload_dtype
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError
from sparsekit_fl.options.devices import device_of, use_exact_arithmetic
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.policies.personal import PersonalModel
from sparsekit_fl.problem.clients import Capability, Client
from sparsekit_fl.streams import Streams

_SPLITS = ("train", "val", "test")


class WorkerState:
    """The part of a worker process that lives from client to client: the spec and one learnable mask, loaded for each client.

    Args:
        spec: The fixed parts of the run.
        device: Where the model trains; None takes the first device of the run.
    """

    def __init__(self, spec: RunSpec, device: str | None = None) -> None:
        self.spec = spec
        self.device = device_of(spec.config.device) if device is None else device
        if spec.config.deterministic:
            use_exact_arithmetic()
        with torch_scope(Streams(spec.config.seed).model()):
            model = spec.problem.model().to(self.device)
        self.masked = LearnableMask(model, graph=spec.graph, learning=GradientImportance(explore=0.0))

    def context(
        self,
        *,
        client: Client,
        round: int,
        capability: Capability,
        memory: Memory,
        extra: StateDict | None = None,
        received: Mask | None = None,
    ) -> ClientContext:
        """Make the context of one client in one round."""
        spec = self.spec
        return ClientContext(
            round=round,
            rounds=spec.config.rounds,
            client=client,
            capability=capability,
            problem=spec.problem,
            graph=spec.graph,
            training=spec.training(max(round, 1)),
            costs=spec.costs,
            masked=self.masked,
            device=self.device,
            rngs=rngs_by_kind(Streams(spec.config.seed).client(round, client.id)),
            memory=memory,
            extra=extra or {},
            received=received,
            initial_state=lambda: spec.initial,
            cache={},
            frozen=spec.frozen,
            reading=lambda split: Streams(spec.config.seed).reading(round, client.id).spawn(3)[_SPLITS.index(split)],
        )


@contextmanager
def _blame(method: str, policy: str, round: int, client_id: int) -> Iterator[None]:
    try:
        yield
    except ClientError:
        raise
    except Exception as error:
        raise ClientError(
            f"client {client_id} failed in round {round} of method {method!r}, in its {policy} policy:"
            f" {type(error).__name__}: {error}"
        ) from error


def _complete(worker: WorkerState, ctx: ClientContext, received: StateDict) -> dict[str, Any]:
    """Return the whole dense state: entries from the server, and private ones, which are those of round 0 at first."""
    own = ctx.scoped("share").memory
    return {name: received[name] if name in received else own.get(name, tensor) for name, tensor in worker.spec.initial.items()}


class Asked(NamedTuple):
    """What a local policy is asked to train: the arguments of its `train`."""

    ctx: ClientContext
    start: StateDict
    mask: Mask | None
    ratio: float


class OpenRound:
    """A round of a client that has begun, and stands where the local policy trains.

    Args:
        worker: The spec and the narrow model of this process.
        assignment: The server's message.
        client: The client, with its data.
        memory: The client's memory; written to. When anything raises, throw the memory away.

    Raises:
        ClientError: a policy failed; names it, and carries the cause.
    """

    def __init__(self, worker: WorkerState, assignment: Assignment, client: Client, memory: Memory) -> None:
        self.assignment = assignment
        self.memory = memory
        self._steps = _steps(worker, assignment, client, memory)
        self.asked = next(self._steps)

    def close(self, train: Callable[[], LocalResult]) -> Update:
        """Let the client be trained, and return its update.

        Args:
            train: Trains what was asked.

        Raises:
            ClientError: a policy, or `train`, failed.
        """
        try:
            self._steps.send(train)
        except StopIteration as end:
            update: Update = end.value
            return update
        raise AssertionError("a round stops once")


def client_round(worker: WorkerState, assignment: Assignment, client: Client, memory: Memory) -> Update:
    """Train one client for one round. The work of every engine.

    Args:
        worker: The spec and the narrow model of this process.
        assignment: The server's message.
        client: The client, with its data.
        memory: The client's memory; written to. When this raises, throw the memory away.

    Returns:
        The update.

    Raises:
        ClientError: a policy failed; names it, and carries the cause.
    """
    opened = OpenRound(worker, assignment, client, memory)
    return opened.close(lambda: worker.spec.method.local.train(*opened.asked))


def _steps(
    worker: WorkerState, assignment: Assignment, client: Client, memory: Memory
) -> Generator[Asked, Callable[[], LocalResult], Update]:
    """The work of a client; it is given what trains."""
    began = time.perf_counter()
    spec = worker.spec
    method, graph = spec.method, spec.graph

    def blame(policy: str) -> Any:
        return _blame(method.name, policy, assignment.round, client.id)

    ctx = worker.context(
        client=client,
        round=assignment.round,
        capability=assignment.capability,
        memory=memory,
        extra=assignment.extra,
        received=assignment.mask,
    )
    with blame("share"):
        received = mask_state(graph, assignment.mask, assignment.state)
        completed = _complete(worker, ctx, received)
    with blame("ratio"):
        ratio = check_ratio(method.ratio.choose(ctx.scoped("ratio"), assignment.ratio))
    with blame("share"):
        training_start = method.share.enter(ctx.scoped("share"), completed)
    with blame("mask"):
        mask = method.mask.choose(ctx.scoped("mask"), ratio, training_start)
        if mask is not None:
            mask.check(graph)
    with blame("local"):
        train = yield Asked(ctx.scoped("local"), training_start, mask, ratio)
        result = _on_cpu(train())
        ratio = ratio if result.ratio is None else check_ratio(result.ratio)
    with blame("mask"):
        method.mask.keep(ctx.scoped("mask"), result)
    with blame("personal"):
        method.personal.keep(ctx.scoped("personal"), result, ratio)
    with blame("share"):
        delta, upload = _upload(ctx, worker, result, completed, received)
    work = result.work or ctx.work(result.mask, result.log)
    scored = sum(ctx.scored)
    update = Update(
        round=assignment.round,
        client_id=client.id,
        examples=len(client.data.train),
        delta=delta,
        mask=upload,
        ratio=ratio,
        extra=result.extra,
        metrics={**result.log.metrics(), **result.metrics},
        cost=WorkCost(flops_compact=work.flops_compact + scored, flops_rowmask=work.flops_rowmask, flops_scoring=scored),
    )
    cost = dataclasses.replace(
        update.cost,
        uplink_bytes=update_bytes(update),
        downlink_bytes=assignment_bytes(assignment, graph),
        wall_seconds=time.perf_counter() - began,
    )
    cost = dataclasses.replace(cost, seconds=client_seconds(cost, assignment.capability))
    return dataclasses.replace(update, cost=cost)


def _on_cpu(result: LocalResult) -> LocalResult:
    if all(tensor.device.type == "cpu" for tensor in result.state.values()):
        return result
    return dataclasses.replace(result, state={name: tensor.cpu() for name, tensor in result.state.items()})


def _upload(
    ctx: ClientContext, worker: WorkerState, result: LocalResult, completed: StateDict, received: StateDict
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return trained minus received, of the shared entries that the upload mask keeps; put private entries into memory."""
    graph = ctx.graph
    share, scoped = worker.spec.method.share, ctx.scoped("share")
    upload = share.upload_mask(scoped, result)
    private = [name for name in completed if name not in received and name not in worker.spec.frozen]
    trained, narrow = result.state, result.narrow
    if narrow and (private or upload is not result.mask):
        trained, narrow = Kept(graph, result.mask).scatter_all(trained, completed), False
    scoped.memory.update({name: trained[name] for name in private})
    kept = Kept(graph, upload)
    delta = {}
    for name in received:
        value = trained[name] if narrow else kept.gather(name, trained[name])
        before = kept.gather(name, completed[name])
        change = share.leave(scoped, name, value.detach(), before) - before
        delta[name] = change.to(upload_dtype(change.dtype, worker.spec.config.upload))
    return delta, upload


def client_evaluate(
    worker: WorkerState,
    state: StateDict,
    client: Client,
    memory: Memory,
    *,
    round: int,
    capability: Capability,
    with_shared: bool = False,
    export: Path | None = None,
) -> Evaluation:
    """Score a client's personal model, and the global one where asked, on the client's own data.

    Args:
        worker: The spec and the narrow model of this process.
        state: The shared global state.
        client: The client, with its data.
        memory: The client's memory; changes to it are not kept.
        round: The last finished round.
        capability: The client's capability in that round.
        with_shared: Score the global model too.
        export: Folder in which to write the personal model, where it differs from the global one.

    Raises:
        ClientError: the personal policy failed.
    """
    spec = worker.spec
    personal = spec.method.personal
    ctx = worker.context(client=client, round=round, capability=capability, memory=memory).scoped("personal")
    whole = dataclasses.replace(ctx, memory=memory)
    with _blame(spec.method.name, "personal", round, client.id):
        full = _complete(worker, whole, state)
        model = personal.model(ctx, full)
        _load(ctx, spec.initial, model)
        module = worker.masked.model
        personal.calibrate(ctx, module)
        deploying = sum(ctx.deploying)
        predict = personal.predictor(ctx, module)
        test = ctx.score(module, "test", predict=predict)
        validation = ctx.score(module, "val", predict=predict)
        private = any(name not in state and name not in spec.frozen for name in full)
        is_global = model.state is full and model.mask is None and predict is module
        shared = None
        if with_shared:
            shared = test
            if not is_global or private:
                globally = {name: state.get(name, tensor) for name, tensor in spec.initial.items()}
                ctx.load(globally, None)
                personal.calibrate(ctx, module)
                shared = ctx.score(module, "test", predict=personal.predictor(ctx, module))
        if export is not None and not (is_global and not private):
            _load(ctx, spec.initial, model)  # scoring may have calibrated it, or loaded the global one
            _export(export, client.id, worker.masked)
    return Evaluation(
        client_id=client.id,
        examples=len(client.data.test),
        personal=test,
        validation=validation,
        shared=shared,
        ratio=model.ratio,
        flops_deploying=deploying,
    )


def _load(ctx: ClientContext, initial: StateDict, model: PersonalModel) -> None:
    state = model.state
    if model.narrow:
        # What is dropped never runs, so it may hold anything of the right shape.
        state = Kept(ctx.graph, model.mask).scatter_all(state, initial)
    ctx.load(state, model.mask)


def _export(folder: Path, client_id: int, masked: LearnableMask) -> None:
    """Write a file for `load_compact`, with the mask; what a weight mask drops is saved as zeros."""
    save_compact(masked.compact(), folder / f"client-{client_id}.safetensors", graph=masked.graph, mask=masked.unit_mask())
