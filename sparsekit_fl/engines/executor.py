"""ClientExecutor: trains and scores client after client, in a process of any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import Assignment, Evaluation, Update
from sparsekit_fl.engines.round import OpenRound, WorkerState, client_evaluate
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.errors import ClientError, MemoryStateError
from sparsekit_fl.policies.context import Roster
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.state.models import global_file, save_whole, write_recipe
from sparsekit_fl.results.state.store import MemoryStore


class ClientExecutor:
    """Runs clients in the process that it is made in. The model is made once and used for all of them.

    Args:
        spec: The fixed parts of the run.
        clients: Client id → client, at least those that will be asked for.
        store: The memories of the clients; a call may bring another.
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
        self._store = store

    def add(self, clients: Mapping[int, Client]) -> None:
        """Have further clients, which will be asked for."""
        self._clients.update(clients)

    def train(self, assignment: Assignment, version: int | None, *, store: MemoryStore | None = None) -> tuple[Update, bool]:
        """Train one client for one round.

        Args:
            assignment: The server's message.
            version: The round of the memory that counts; None for an empty memory.
            store: Another store of memories, for this call.

        Returns:
            The update, and whether a memory was written.

        Raises:
            ClientError: the client failed; its memory is as it was.
            DataError: its memory cannot be read.
        """
        opened = self.open(assignment, version, store=store)
        return self.close(opened, lambda: self.spec.method.local.train(*opened.asked), store=store)

    def open(self, assignment: Assignment, version: int | None, *, store: MemoryStore | None = None) -> OpenRound:
        """Begin what `train` does, up to where the local policy trains."""
        memory = (store or self._store).read(assignment.client_id, version)
        return OpenRound(self._worker, assignment, self._clients[assignment.client_id], memory)

    def close(
        self, opened: OpenRound, train: Callable[[], LocalResult], *, store: MemoryStore | None = None
    ) -> tuple[Update, bool]:
        """End what `train` does.

        Args:
            opened: A round that has begun.
            train: Does what the local policy would do.
            store: Another store of memories, for this call.
        """
        update = opened.close(train)
        try:
            return update, (store or self._store).write(update.client_id, update.round, opened.memory)
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
        store: MemoryStore | None = None,
    ) -> Evaluation:
        """Score one client; see `client_evaluate`."""
        store = store or self._store
        return client_evaluate(
            self._worker,
            state,
            self._clients[client_id],
            store.read(client_id, version),
            round=round,
            capability=Roster(self._clients, self.spec.config, round)[client_id].capability,
            with_shared=with_shared,
            export=export,
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
