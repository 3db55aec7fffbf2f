"""ClientExecutor: trains and scores client after client, in a process of any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sparsekit.graph import StateDict, UnitMask
from sparsekit.surgery import save_compact
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.kept import Kept
from sparsekit_fl.client.messages import Assignment, Evaluation, Update
from sparsekit_fl.engines.round import OpenRound, WorkerState, blame, completed
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError, MemoryStateError
from sparsekit_fl.policies.context import Roster
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.policies.personal import PersonalModel
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.state.models import global_file, save_whole, write_recipe
from sparsekit_fl.results.state.store import MemoryStore


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
        self.spec, self.home = spec, home
        self._global: object = None
        self._worker = WorkerState(spec, device)
        self._clients = dict(clients)
        self.store = store

    def add(self, clients: Mapping[int, Client]) -> None:
        """Have further clients, which will be asked for."""
        self._clients.update(clients)

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
        opened = self.open(assignment, version)
        return self.close(opened, opened.train)

    def open(self, assignment: Assignment, version: int | None) -> OpenRound:
        """Begin what `train` does, up to where the local policy trains."""
        memory = self.store.read(assignment.client_id, version)
        return OpenRound(self._worker, assignment, self._clients[assignment.client_id], memory)

    def close(self, opened: OpenRound, train: Callable[[], LocalResult]) -> tuple[Update, bool]:
        """End what `train` does, once `train` has done what the local policy would do."""
        update = opened.close(train)
        try:
            return update, self.store.write(update.client_id, update.round, opened.memory)
        except MemoryStateError as error:
            who = f"client {update.client_id} failed in round {update.round} of method {self.spec.method.name!r}"
            raise ClientError(f"{who}: {error}") from error

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
        spec, module = self.spec, self._worker.masked.model
        personal, client = spec.method.personal, self._clients[client_id]
        ctx = self._worker.context(
            client=client,
            round=round,
            capability=Roster(self._clients, spec.config, round)[client_id].capability,
            memory=self.store.read(client_id, version),
        ).scoped("personal")
        with blame(ctx, spec.method, "personal"):
            full = completed(ctx, state)
            model = personal.model(ctx, full)
            _load(ctx, model)
            personal.calibrate(ctx, module)
            deploying = sum(ctx.deploying)
            predict = personal.predictor(ctx, module)
            test = ctx.score(module, "test", predict=predict)
            validation = ctx.score(module, "val", predict=predict)
            private = any(name not in state and name not in spec.frozen for name in full)
            is_global = model.state is full and model.mask is None and predict is module and not private
            shared = test if with_shared else None
            if with_shared and not is_global:
                ctx.load({name: state.get(name, tensor) for name, tensor in spec.initial.items()}, None)
                personal.calibrate(ctx, module)
                shared = ctx.score(module, "test", predict=personal.predictor(ctx, module))
            if export is not None and not is_global:
                _load(ctx, model)  # scoring may have calibrated it, or loaded the global one
                # With the mask; what a weight mask drops is saved as zeros.
                small, mask = ctx.masked.compact(), ctx.masked.unit_mask()
                save_compact(small, export / f"client-{client_id}.safetensors", graph=spec.graph, mask=mask)
        return Evaluation(
            client_id=client_id,
            examples=len(client.data.test),
            personal=test,
            validation=validation,
            shared=shared,
            ratio=model.ratio,
            flops_deploying=deploying,
        )

    def keep(self, home: Path, shared: StateDict) -> Path:
        """Make a folder of this device one that `load_model` reads: the global model, and how models are made again.

        Args:
            home: The folder; made if absent.
            shared: The shared global state; written once where the same one comes for several clients.

        Returns:
            Where the models of clients go.
        """
        models = global_file(home).parent
        if shared is not self._global:
            models.mkdir(parents=True, exist_ok=True)
            save_whole(global_file(home), self.spec.model({**self.spec.initial, **shared}))
            write_recipe(home, {**self.spec.recipe, "personal": True, "clients": sorted(self._clients)})
            self._global = shared
        return models


def _load(ctx: ClientContext, model: PersonalModel) -> None:
    state = model.state
    if isinstance(model.mask, UnitMask):
        # What is dropped never runs, so it may hold anything of the right shape.
        state = Kept(ctx.graph, model.mask).scatter_all(state, ctx.initial_state())
    ctx.load(state, model.mask)
