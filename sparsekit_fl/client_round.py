"""run_client: what one client does in one round, to train or to be scored. A pure function of its arguments."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sparsekit.allocation import check_ratio
from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitMask
from sparsekit.surgery import save_compact
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client.context import ClientContext, Memory, Purpose, Rngs
from sparsekit_fl.client.messages import Cost, Evaluation, Reply, Request, Update, upload_dtype
from sparsekit_fl.errors import ClientError
from sparsekit_fl.methods.client import Result, Task, keep_model, kept_model, load
from sparsekit_fl.models import model_path
from sparsekit_fl.packing import Kept, Mask, mask_state
from sparsekit_fl.problem.data import CAPABILITY_LEVELS, Client
from sparsekit_fl.spec import RunSpec


def answer(spec: RunSpec, client: Client, request: Request, memories: Memories) -> Reply:
    """Run a client with its memory, and keep its new memory and its model, in the folder `models` next to the memories.

    A failure of the client is a reply too. Otherwise, DataError: its memory cannot be read; OSError: a file cannot be written.
    """
    _ = spec.masked  # made before the time of the client's work begins
    memory = memories.read(client.id, request.memory_round)
    try:
        reply, memory = run_client(spec, client, request, memory, out=memories.folder.parent)
        if request.task == "score" or (not memory and request.memory_round is None):
            return reply
        memories.write(client.id, request.round, memory)
        return replace(reply, stored=True)
    except (ClientError, InvalidValueError) as error:  # the last one is of a memory that cannot be saved
        return Reply(client_id=client.id, error=str(error), traceback=traceback.format_exc())


def run_client(
    spec: RunSpec, client: Client, request: Request, memory: Memory, *, out: Path | None = None
) -> tuple[Reply, Memory]:
    """Let one client train, or score its model: a function of its arguments alone. Scoring changes no memory.

    The memory that was given is not to be used afterwards. The personal model goes into the folder `out`, if the request asks
    for it. Whatever goes wrong is a ClientError, which names the round, the method and the part of it, and carries the cause.
    """
    if request.task == "train":
        return _train(spec, client, request, memory)
    return _score(spec, client, request, memory, out), memory


def make_context(
    spec: RunSpec, client: Client, request: Request, memory: Memory, *, purpose: Purpose = "local"
) -> ClientContext:
    return ClientContext(
        round=request.round,
        rounds=spec.config.rounds,
        client=client,
        capability=request.capability,
        problem=spec.problem,
        graph=spec.graph,
        layers=spec.layers,
        training=spec.config.training_in(request.round),
        costs=spec.costs,
        masked=spec.masked,
        device=spec.config.device,
        rngs=Rngs(spec.config.seed, "client", request.round, client.id),
        memory=memory.setdefault("method", {}),
        purpose=purpose,
        levels=spec.config.capability_levels or CAPABILITY_LEVELS,
        capability_of=spec.config.capability_of,
        deploy=spec.config.deploy,
        trained=spec.trained,
        initial_state=lambda: spec.initial,
        frozen=spec.frozen,
        private=spec.private,
    )


def _train(spec: RunSpec, client: Client, request: Request, memory: Memory) -> tuple[Reply, Memory]:
    began = time.perf_counter()
    ctx, method, graph = make_context(spec, client, request, memory), spec.method, spec.graph
    received = mask_state(graph, request.mask, request.state)
    start = _complete(spec, memory, received)
    ratio = check_ratio(1.0 if request.ratio is None else request.ratio)
    with _named(request, spec, "train"):
        result = method.train(ctx, Task(state=start, mask=request.mask, ratio=ratio, extra=request.extra))
        if spec.config.deploy == "best" and ctx.memory.get("kept", {}).get("round") != ctx.round:
            keep_model(ctx, result)  # the method keeps none itself
        if any(tensor.device.type != "cpu" for tensor in result.state.values()):
            result = replace(result, state={name: tensor.cpu() for name, tensor in result.state.items()})
        ratio = check_ratio(result.ratio)
        delta, upload = _upload(spec, memory, result, received, start)
    work, scored = result.work or ctx.work(result.mask, result.log), sum(ctx.scored)
    cost = Cost(
        flops=work.flops + scored, flops_scoring=scored, flops_paper=work.flops_paper, wall_seconds=time.perf_counter() - began
    )
    update = Update(
        round=request.round,
        client_id=client.id,
        examples=len(client.data.train),
        delta=delta,
        mask=upload,
        ratio=ratio,
        extra=result.extra,
        metrics={**result.log.metrics(), **result.metrics},
        cost=cost,
    )
    return Reply(client_id=client.id, update=update), {kind: own for kind, own in memory.items() if own}


def _upload(
    spec: RunSpec, memory: Memory, result: Result, received: StateDict, start: StateDict
) -> tuple[dict[str, Tensor], Mask | None]:
    """Return trained minus received, of the shared entries that the upload mask keeps; put private entries into memory."""
    graph, upload = spec.graph, result.mask if result.upload is None else result.upload
    private = [name for name in start if name not in received and name not in spec.frozen]
    trained, narrow = result.state, isinstance(result.mask, UnitMask)
    if narrow and (private or upload is not result.mask):
        trained, narrow = Kept(graph, result.mask).scatter_all(trained, start), False
    memory["private"].update({name: trained[name] for name in private})
    kept = Kept(graph, upload)
    delta = {}
    for name in received:
        value = trained[name] if narrow else kept.gather(name, trained[name])
        change = value.detach() - kept.gather(name, start[name])
        delta[name] = change.to(upload_dtype(change.dtype, spec.config.upload))
    return delta, upload


def _score(spec: RunSpec, client: Client, request: Request, memory: Memory, out: Path | None) -> Reply:
    ctx = make_context(spec, client, request, memory, purpose="personal")
    method, state = spec.method, request.state
    with _named(request, spec, "deploy"):
        full = _complete(spec, memory, state)
        best = kept_model(ctx) if ctx.deploy == "best" else None
        model = best or method.deploy(ctx, full)
        load(ctx, model.state, model.mask)
        calibrated = (model.calibrate or best is not None) and ctx.calibrate()
        test, validation = ctx.score("test"), ctx.score("val")
        private = any(name not in state and name not in spec.frozen for name in full)
        is_global = model.state is full and model.mask is None and not private
    if out is not None and request.with_model and (calibrated or not is_global):
        # Of a weight mask, dropped entries are zeros.
        path = model_path(out, client.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_compact(spec.masked.compact(), path, graph=spec.graph, mask=spec.masked.unit_mask())
    shared = test if request.with_shared else None
    if request.with_shared and not is_global:
        with _named(request, spec, "deploy"):
            asked = model if best is None else method.deploy(ctx, full)
            ctx.load({name: state.get(name, tensor) for name, tensor in spec.initial.items()}, None)
            if asked.calibrate:
                ctx.calibrate()
            shared = ctx.score("test")
    evaluation = Evaluation(
        client_id=client.id,
        examples=len(client.data.test),
        personal=test,
        validation=validation,
        shared=shared,
        ratio=None if model.mask is None else model.ratio,
    )
    return Reply(client_id=client.id, evaluation=evaluation)


def _complete(spec: RunSpec, memory: Memory, received: StateDict) -> dict[str, Tensor]:
    """Return the whole dense state: entries from the server, and private ones, at first from round 0."""
    own = memory.setdefault("private", {})
    return {name: received[name] if name in received else own.get(name, tensor) for name, tensor in spec.initial.items()}


@contextmanager
def _named(request: Request, spec: RunSpec, hook: str) -> Iterator[None]:
    """Turn an exception of a method into a ClientError that names the client, the round, the method and the hook."""
    try:
        yield
    except ClientError:
        raise
    except Exception as error:
        raise ClientError(
            f"client {request.client_id} failed in round {request.round} of method {spec.method.name!r}, in {hook}():"
            f" {type(error).__name__}: {error}"
        ) from error
