"""Flower: the engine that runs clients in Flower's simulation, on this machine's cores or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.client.worker import one_thread
from sparsekit_fl.engines.base import ClientPool
from sparsekit_fl.engines.flower.pool import GridPool
from sparsekit_fl.engines.flower.session import Bundle, Session
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.state.store import ClientStore

__all__ = ["Flower"]

_NODES = 100


class Flower:
    """Clients in Flower's simulation: Ray actors, one torch thread each. Gives the same bits as the embedded engine.

    A client that raises is dropped from its round. When an actor dies, the simulation is started anew and what was not
    answered is sent again; clients then start from the memories that they had, so nothing changes but the time.

    Args:
        workers: Actors on this machine; not with `ray_address`, where the cluster's cores decide.
        supernodes: Virtual nodes; None gives each client one, up to 100. Flower looks through all open messages for each of
            them ten times a second, so more cost time. They take the clients of a round in turn.
        ray_address: Of a running Ray cluster, "host:port"; None starts Ray on this machine. The package must be installed
            on every machine of the cluster, and memories of clients then travel with the messages.
        timeout_seconds: Replies that take longer are given up; None waits.
        restarts: How often the simulation is started anew before giving up.
        object_store_bytes: Of Ray on this machine.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        supernodes: int | None = None,
        ray_address: str | None = None,
        timeout_seconds: float | None = None,
        restarts: int = 3,
        object_store_bytes: int = 300 * 2**20,
    ) -> None:
        for name, value in (("workers", workers), ("supernodes", supernodes), ("object_store_bytes", object_store_bytes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidValueError(f"{name} must be an integer >= 1, got {value!r}")
        if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
            raise InvalidValueError(f"restarts must be an integer >= 0, got {restarts!r}")
        if ray_address is not None and ":" not in ray_address:
            raise InvalidValueError(f"ray_address must be 'host:port' of a Ray cluster's head, got {ray_address!r}")
        self.workers = workers
        self.supernodes = supernodes
        self.ray_address = ray_address
        self._timeout = timeout_seconds
        self._restarts = restarts
        self._object_store_bytes = object_store_bytes

    def run(
        self,
        rounds: Callable[[ClientPool], RunResult],
        *,
        spec: RunSpec,
        clients: Mapping[int, Client],
        store: ClientStore,
    ) -> RunResult:
        """Run the loop in this thread, beside the simulation."""
        before = one_thread()
        # Actors on this machine write memories where the run keeps them; others cannot.
        folder = None if self.ray_address is not None else str(Path(store.folder).resolve())
        session = Session(
            Bundle(spec=spec, clients=clients, folder=folder),
            nodes=self.supernodes or min(len(clients), _NODES),
            workers=self.workers,
            ray_address=self.ray_address,
            restarts=self._restarts,
            object_store_bytes=self._object_store_bytes,
        )
        try:
            session.start()
            pool = GridPool(
                session,
                spec,
                store,
                memory="server" if folder is None else "nodes",
                workers=session.actors,
                timeout_seconds=self._timeout,
            )
            return rounds(pool)
        finally:
            session.close()
            torch.set_num_threads(before)
