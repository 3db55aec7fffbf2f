"""ClientExecutor: trains and scores client after client, in a process of any engine; OpenRound: what one does in a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sparsekit.allocation import check_ratio
from sparsekit.graph import StateDict, UnitMask
from sparsekit.rng import torch_scope
from sparsekit.surgery import save_compact
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.client.context import ClientContext, Memory, RngsByKind
from sparsekit_fl.client.costs import client_seconds
from sparsekit_fl.client.messages import Assignment, Evaluation, Update, WorkCost, assignment_bytes, update_bytes
from sparsekit_fl.client.packing import Kept, Mask, mask_state, upload_dtype
from sparsekit_fl.devices import device_of, use_exact_arithmetic
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError, MemoryStateError
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies.context import Roster
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.policies.personal import PersonalModel
from sparsekit_fl.problem.clients import Capability, Client
from sparsekit_fl.results.state.models import model_path, save_whole, write_recipe
from sparsekit_fl.results.state.store import MemoryStore
from sparsekit_fl.streams import Streams

_SPLITS = ("train", "val", "test")


class ClientExecutor:
    """Runs clients in the process that it is made in. The model is made once and used for all of them.

    Args:
        spec: The fixed parts of the run.
        clients: Client id → client, at least those that will be asked for.
        store: The memories of the clients; may be replaced between two calls.
        device: Where they train; None takes the first device of the run.
        home: Folder of this device, where the models that its clients deploy stay after the last round, for `load_model`; None
            where the server collects them.
    """

    def __init__(
        self,
        spec: RunSpec,
        clients: Mapping[int, Client],
        store: MemoryStore,
        *,
        device: str | None = None,
        home: Path | None = None,
    ) -> None:
        self.spec, self.home, self.store = spec, home, store
        self._global: object = None
        self.clients = dict(clients)
        self._device = device_of(spec.config.device) if device is None else device
        if spec.config.deterministic:
            use_exact_arithmetic()
        with torch_scope(Streams(spec.config.seed).model()):
            model = spec.problem.model().to(self._device)
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
        spec, streams = self.spec, Streams(self.spec.config.seed)
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
            device=self._device,
            rngs=RngsByKind(streams.client(round, client.id)),
            memories=memory,
            extra=extra or {},
            received=received,
            initial_state=lambda: spec.initial,
            cache={},
            frozen=spec.frozen,
            reading=lambda split: streams.reading(round, client.id).spawn(3)[_SPLITS.index(split)],
        )

    def train(self, assignment: Assignment, version: int | None) -> tuple[Update, bool]:
        """Train one client for one round.

        Args:
            assignment: The server's message.
            version: The round of the memory that counts; None for an empty memory.

        Returns:
            The update, and whether a memory was written.

        Raises:
            ClientError: the client failed; its memory is as it was.
            DataError: its memory cannot be read.
        """
        return OpenRound(self, assignment, version).close()

    def evaluate(
        self,
        state: StateDict,
        client_id: int,
        version: int | None,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Evaluation:
        """Score a client's personal model, and the global one where asked, on the client's own data.

        Args:
            state: The shared global state.
            client_id: The client.
            version: The round of the memory that counts; None for an empty memory. Changes to it are not kept.
            round: The last finished round.
            with_shared: Score the global model too.
            export: Folder in which to write the personal model, where it differs from the global one.

        Raises:
            ClientError: the personal policy failed.
        """
        spec, module = self.spec, self.masked.model
        personal, client = spec.method.personal, self.clients[client_id]
        ctx = self.context(
            client=client,
            round=round,
            capability=Roster(self.clients, spec.config, round)[client_id].capability,
            memory=self.store.read(client_id, version),
        ).scoped("personal")
        with _blame(ctx, spec.method, "personal"):
            full = _complete(ctx, state)
            model = personal.model(ctx, full)
            _load(ctx, model)
            calibrated = personal.calibrate(ctx, module)
            deploying = sum(ctx.deploying)
            test, validation = ctx.score(module, "test"), ctx.score(module, "val")
            private = any(name not in state and name not in spec.frozen for name in full)
            is_global = model.state is full and model.mask is None and not private
            if export is not None and (calibrated or not is_global):
                # As it was scored, and with the mask; what a weight mask drops is saved as zeros.
                small, mask = ctx.masked.compact(), ctx.masked.unit_mask()
                save_compact(small, export / f"client-{client_id}.safetensors", graph=spec.graph, mask=mask)
            shared = test if with_shared else None
            if with_shared and not is_global:
                ctx.load({name: state.get(name, tensor) for name, tensor in spec.initial.items()}, None)
                personal.calibrate(ctx, module)
                shared = ctx.score(module, "test")
        return Evaluation(
            client_id=client_id,
            examples=len(client.data.test),
            personal=test,
            validation=validation,
            shared=shared,
            ratio=model.ratio,
            flops_deploying=deploying,
        )

    def keep(self, shared: StateDict) -> Path | None:
        """Make `home` a folder that `load_model` reads: the global model, and how models are made again.

        Args:
            shared: The shared global state; written once where the same one comes for several clients.

        Returns:
            Where the models of clients go; None without a home.
        """
        if self.home is None:
            return None
        models = model_path(self.home, "global").parent
        if shared is not self._global:
            models.mkdir(parents=True, exist_ok=True)
            save_whole(model_path(self.home, "global"), self.spec.model({**self.spec.initial, **shared}))
            write_recipe(self.home, {**self.spec.recipe, "personal": True, "clients": sorted(self.clients)})
            self._global = shared
        return models


def _load(ctx: ClientContext, model: PersonalModel) -> None:
    state = model.state
    if isinstance(model.mask, UnitMask):
        # What is dropped never runs, so it may hold anything of the right shape.
        state = Kept(ctx.graph, model.mask).scatter_all(state, ctx.initial_state())
    ctx.load(state, model.mask)


@contextmanager
def _blame(ctx: ClientContext, method: Method, policy: str) -> Iterator[None]:
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


def _complete(ctx: ClientContext, received: StateDict) -> dict[str, Tensor]:
    """Return the whole dense state: entries from the server, and private ones, which are those of round 0 at first."""
    own = ctx.scoped("share").memory
    initial = ctx.initial_state()
    return {name: received[name] if name in received else own.get(name, tensor) for name, tensor in initial.items()}


class OpenRound:
    """A round of a client that has begun, and stands where the local policy trains.

    Its `ctx`, `start`, `mask` and `ratio` are the arguments of that policy's `train`.

    Args:
        executor: The executor.
        assignment: The server's message.
        version: The round of the memory that counts; None for an empty memory.

    Raises:
        ClientError: a policy failed; names it, and carries the cause.
        DataError: the client's memory cannot be read.
    """

    def __init__(self, executor: ClientExecutor, assignment: Assignment, version: int | None) -> None:
        # What is written to this memory counts once all is done.
        self._store, self._memory = executor.store, executor.store.read(assignment.client_id, version)
        self._began = time.perf_counter()
        self._spec, self.assignment = executor.spec, assignment
        self._ctx = ctx = executor.context(
            client=executor.clients[assignment.client_id],
            round=assignment.round,
            capability=assignment.capability,
            memory=self._memory,
            extra=assignment.extra,
            received=assignment.mask,
        )
        method, graph = self._spec.method, self._spec.graph
        with _blame(ctx, method, "share"):
            self._received = mask_state(graph, assignment.mask, assignment.state)
            self._completed = _complete(ctx, self._received)
        with _blame(ctx, method, "ratio"):
            self.ratio = check_ratio(method.ratio.choose(ctx.scoped("ratio"), assignment.ratio))
        with _blame(ctx, method, "share"):
            self.start = method.share.enter(ctx.scoped("share"), self._completed)
        with _blame(ctx, method, "mask"):
            self.mask = method.mask.choose(ctx.scoped("mask"), self.ratio, self.start)
            if self.mask is not None:
                self.mask.check(graph)
        self.ctx = ctx.scoped("local")

    def close(self, train: Callable[[], LocalResult] | None = None) -> tuple[Update, bool]:
        """Let the local policy train, or `train` in its place; see `ClientExecutor.train` for the rest."""
        ctx, method, assignment, ratio = self._ctx, self._spec.method, self.assignment, self.ratio
        with _blame(ctx, method, "local"):
            result = method.local.train(self.ctx, self.start, self.mask, ratio) if train is None else train()
            if any(tensor.device.type != "cpu" for tensor in result.state.values()):
                result = replace(result, state={name: tensor.cpu() for name, tensor in result.state.items()})
            ratio = ratio if result.ratio is None else check_ratio(result.ratio)
        with _blame(ctx, method, "mask"):
            method.mask.keep(ctx.scoped("mask"), result)
        with _blame(ctx, method, "personal"):
            method.personal.keep(ctx.scoped("personal"), result, ratio)
        with _blame(ctx, method, "share"):
            delta, upload = self._upload(result)
        work = result.work or ctx.work(result.mask, result.log)
        scored = sum(ctx.scored)
        cost = WorkCost(flops=work.flops + scored, flops_paper=work.flops_paper, flops_scoring=scored)
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
        cost = replace(
            cost,
            uplink_bytes=update_bytes(update),
            downlink_bytes=assignment_bytes(assignment, ctx.graph),
            wall_seconds=time.perf_counter() - self._began,
        )
        cost = replace(cost, seconds=client_seconds(cost, assignment.capability))
        try:
            stored = self._store.write(update.client_id, update.round, self._memory)
        except MemoryStateError as error:
            who = f"client {update.client_id} failed in round {update.round} of method {method.name!r}"
            raise ClientError(f"{who}: {error}") from error
        return replace(update, cost=cost), stored

    def _upload(self, result: LocalResult) -> tuple[dict[str, Tensor], Mask | None]:
        """Return trained minus received, of the shared entries that the upload mask keeps; put private entries into memory."""
        spec, ctx, completed = self._spec, self._ctx.scoped("share"), self._completed
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
