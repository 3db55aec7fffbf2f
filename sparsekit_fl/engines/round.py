"""OpenRound: the work of a client in one round, the same under every engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from sparsekit.allocation import check_ratio
from sparsekit.graph import StateDict, UnitMask
from sparsekit.rng import torch_scope
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.client.context import ClientContext, Memory, rngs_by_kind
from sparsekit_fl.client.costs import client_seconds
from sparsekit_fl.client.kept import Kept, Mask, mask_state
from sparsekit_fl.client.messages import Assignment, Update, WorkCost, assignment_bytes, update_bytes
from sparsekit_fl.client.packing import upload_dtype
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options.devices import device_of, use_exact_arithmetic
from sparsekit_fl.policies.local import LocalResult
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
def blame(ctx: ClientContext, method: Method, policy: str) -> Iterator[None]:
    """Turn what a policy raises into a ClientError that says whose policy it was, and when."""
    try:
        yield
    except ClientError:
        raise
    except Exception as error:
        raise ClientError(
            f"client {ctx.client.id} failed in round {ctx.round} of method {method.name!r}, in its {policy} policy:"
            f" {type(error).__name__}: {error}"
        ) from error


def completed(ctx: ClientContext, received: StateDict) -> dict[str, Tensor]:
    """Return the whole dense state: entries from the server, and private ones, which are those of round 0 at first."""
    own = ctx.scoped("share").memory
    initial = ctx.initial_state()
    return {name: received[name] if name in received else own.get(name, tensor) for name, tensor in initial.items()}


class OpenRound:
    """A round of a client that has begun, and stands where the local policy trains.

    Its `ctx`, `start`, `mask` and `ratio` are the arguments of that policy's `train`.

    Args:
        worker: The spec and the narrow model of this process.
        assignment: The server's message.
        client: The client, with its data.
        memory: The client's memory; written to. When anything raises, throw the memory away.

    Raises:
        ClientError: a policy failed; names it, and carries the cause.
    """

    def __init__(self, worker: WorkerState, assignment: Assignment, client: Client, memory: Memory) -> None:
        self._began = time.perf_counter()
        self._worker = worker
        self.assignment, self.memory = assignment, memory
        self._ctx = ctx = worker.context(
            client=client,
            round=assignment.round,
            capability=assignment.capability,
            memory=memory,
            extra=assignment.extra,
            received=assignment.mask,
        )
        method, graph = worker.spec.method, worker.spec.graph
        with blame(ctx, method, "share"):
            self._received = mask_state(graph, assignment.mask, assignment.state)
            self._completed = completed(ctx, self._received)
        with blame(ctx, method, "ratio"):
            self.ratio = check_ratio(method.ratio.choose(ctx.scoped("ratio"), assignment.ratio))
        with blame(ctx, method, "share"):
            self.start = method.share.enter(ctx.scoped("share"), self._completed)
        with blame(ctx, method, "mask"):
            self.mask = method.mask.choose(ctx.scoped("mask"), self.ratio, self.start)
            if self.mask is not None:
                self.mask.check(graph)
        self.ctx = ctx.scoped("local")

    def train(self) -> LocalResult:
        """Let the local policy train."""
        return self._worker.spec.method.local.train(self.ctx, self.start, self.mask, self.ratio)

    def close(self, train: Callable[[], LocalResult]) -> Update:
        """Let the client be trained, and return its update.

        Args:
            train: `train` of this round, or what does the same.

        Raises:
            ClientError: a policy, or `train`, failed.
        """
        ctx, method, assignment, ratio = self._ctx, self._worker.spec.method, self.assignment, self.ratio
        with blame(ctx, method, "local"):
            result = _on_cpu(train())
            ratio = ratio if result.ratio is None else check_ratio(result.ratio)
        with blame(ctx, method, "mask"):
            method.mask.keep(ctx.scoped("mask"), result)
        with blame(ctx, method, "personal"):
            method.personal.keep(ctx.scoped("personal"), result, ratio)
        with blame(ctx, method, "share"):
            delta, upload = self._upload(result)
        work = result.work or ctx.work(result.mask, result.log)
        scored = sum(ctx.scored)
        cost = WorkCost(flops_compact=work.flops_compact + scored, flops_rowmask=work.flops_rowmask, flops_scoring=scored)
        update = Update(
            round=assignment.round,
            client_id=assignment.client_id,
            examples=len(ctx.client.data.train),
            delta=delta,
            mask=upload,
            ratio=ratio,
            extra=result.extra,
            metrics={**result.log.metrics(), **result.metrics},
            cost=cost,
        )
        cost = dataclasses.replace(
            cost,
            uplink_bytes=update_bytes(update),
            downlink_bytes=assignment_bytes(assignment, ctx.graph),
            wall_seconds=time.perf_counter() - self._began,
        )
        cost = dataclasses.replace(cost, seconds=client_seconds(cost, assignment.capability))
        return dataclasses.replace(update, cost=cost)

    def _upload(self, result: LocalResult) -> tuple[dict[str, Tensor], Mask | None]:
        """Return trained minus received, of the shared entries that the upload mask keeps; put private entries into memory."""
        spec, ctx, completed = self._worker.spec, self._ctx.scoped("share"), self._completed
        share, graph = spec.method.share, spec.graph
        upload = share.upload_mask(ctx, result)
        private = [name for name in completed if name not in self._received and name not in spec.frozen]
        trained, narrow = result.state, isinstance(result.mask, UnitMask)
        if narrow and (private or upload is not result.mask):
            trained, narrow = Kept(graph, result.mask).scatter_all(trained, completed), False
        ctx.memory.update({name: trained[name] for name in private})
        kept = Kept(graph, upload)
        delta = {}
        for name in self._received:
            value = trained[name] if narrow else kept.gather(name, trained[name])
            before = kept.gather(name, completed[name])
            change = share.leave(ctx, name, value.detach(), before) - before
            delta[name] = change.to(upload_dtype(change.dtype, spec.config.upload))
        return delta, upload


def client_round(worker: WorkerState, assignment: Assignment, client: Client, memory: Memory) -> Update:
    """Train one client for one round: `OpenRound` with what its local policy does."""
    opened = OpenRound(worker, assignment, client, memory)
    return opened.close(opened.train)


def _on_cpu(result: LocalResult) -> LocalResult:
    if all(tensor.device.type == "cpu" for tensor in result.state.values()):
        return result
    return dataclasses.replace(result, state={name: tensor.cpu() for name, tensor in result.state.items()})
