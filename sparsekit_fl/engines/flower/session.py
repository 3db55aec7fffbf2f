"""Session: Flower's simulation in a thread beside ours, started anew when one of its processes dies."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from sparsekit_fl.client.executor import ClientExecutor
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.engines.flower.node import Node, make_app
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.state.store import CarriedMemory, ClientStore, MemoryStore

__all__ = ["Bundle", "Session"]

_log = logging.getLogger(__name__)
# `run_simulation` is what Flower has for programs; it advises its command line instead, at every call.
logging.getLogger("flwr").addFilter(lambda record: "DEPRECATED FEATURE" not in record.getMessage())
_START_SECONDS = 300.0
_STOP_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class Bundle:
    """What an actor needs once; it goes to every machine once, through Ray's object store.

    Args:
        spec: Of the run.
        clients: All of them.
        folder: Where memories are; None where they travel with the messages.
    """

    spec: RunSpec
    clients: Mapping[int, Client]
    folder: str | None


_node: tuple[bytes, Node] | None = None


def _node_of(reference: Any) -> Node:
    """The node of this process: made at the first message of a run, kept for the others."""
    global _node
    key = reference.binary()
    if _node is None or _node[0] != key:
        bundle: Bundle = ray.get(reference)
        store: MemoryStore = CarriedMemory() if bundle.folder is None else ClientStore(Path(bundle.folder), durable=False)
        _node = (key, Node(ClientExecutor(bundle.spec, bundle.clients, store)))
    return _node[1]


def _app_for(reference: Any) -> ClientApp:
    return make_app(lambda _: _node_of(reference))


def _cluster_cores() -> int:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return max(1, int(resources.get("CPU", 1)))


class Session:
    """A running simulation and its grid.

    Args:
        bundle: For the actors.
        nodes: Virtual nodes.
        workers: Actors on this machine.
        ray_address: Of a cluster; None for this machine.
        restarts: How often it may be started anew.
        object_store_bytes: Of Ray on this machine.
    """

    grid: Grid

    def __init__(
        self,
        bundle: Bundle,
        *,
        nodes: int,
        workers: int,
        ray_address: str | None,
        restarts: int,
        object_store_bytes: int,
    ) -> None:
        self.actors = workers
        self._bundle = bundle
        self._nodes = nodes
        self._address = ray_address
        self._left = restarts
        self._object_store_bytes = object_store_bytes
        self._turns: Iterator[int] = iter(())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._began_ray = False

    def node_of(self, client_id: int) -> int:  # noqa: ARG002 - other carriers have to look at it
        """A node to serve a client. They are all alike, so they take turns and a cohort is spread over them."""
        return next(self._turns)

    def start(self) -> None:
        """Start Ray and the simulation, and wait for its nodes.

        Raises:
            WorkerDiedError: it did not come up.
        """
        self._start_ray()
        reference = ray.put(self._bundle)
        app = _app_for(reference)
        ready: queue.Queue[Grid | BaseException] = queue.Queue()
        self._stop = stop = threading.Event()
        server = ServerApp()

        def main(grid: Grid, _: Context) -> None:
            ready.put(grid)
            stop.wait()

        server.main()(main)

        def simulate() -> None:
            try:
                run_simulation(
                    server, app, self._nodes, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": self._gpus()}}
                )
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                ready.put(error)

        self._thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
        self._thread.start()
        try:
            found = ready.get(timeout=_START_SECONDS)
        except queue.Empty:
            raise WorkerDiedError(f"Flower's simulation did not start within {_START_SECONDS:g} seconds") from None
        if isinstance(found, BaseException):
            raise WorkerDiedError(f"Flower's simulation did not start: {found}") from found
        self.grid = found
        self._await_nodes(ready)

    def _await_nodes(self, ready: queue.Queue[Any]) -> None:
        # The server's side runs before the nodes are registered.
        waited = threading.Event()
        for _ in range(int(_START_SECONDS / 0.05)):
            ids = sorted(self.grid.get_node_ids())
            if len(ids) >= self._nodes:
                self._turns = itertools.cycle(ids)
                return
            if not ready.empty():
                error = ready.get()
                raise WorkerDiedError(f"Flower's simulation stopped while starting: {error}") from error
            waited.wait(0.05)
        raise WorkerDiedError(f"only {len(ids)} of {self._nodes} nodes came up within {_START_SECONDS:g} seconds")

    def _gpus(self) -> float:
        return 1.0 / self.actors if self._bundle.spec.config.device.startswith("cuda") else 0.0

    def _start_ray(self) -> None:
        if ray.is_initialized():
            # The user's own; it is used, and Flower disconnects from it at the end.
            self.actors = _cluster_cores()
            return
        # Without "local" Ray would join a cluster that it finds on this machine, and refuse the other two.
        here = {"address": "local", "num_cpus": self.actors, "object_store_memory": self._object_store_bytes}
        where: dict[str, Any] = here if self._address is None else {"address": self._address}
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **where)
        if self._address is not None:
            self.actors = _cluster_cores()
        self._began_ray = True

    def refresh(self) -> None:
        """The nodes stay as long as the simulation does."""

    def news(self) -> list[str]:
        """None."""
        return []

    def restart(self, reason: str) -> None:
        """Start anew after a process died.

        Raises:
            WorkerDiedError: that happened too often.
        """
        if self._left == 0:
            raise WorkerDiedError(f"{reason}; Flower's simulation was started anew too often, so this is the end")
        self._left -= 1
        _log.warning("%s; Flower's simulation is started anew, and what was not answered is sent again", reason)
        self.close()
        self.start()

    def close(self) -> None:
        """End the simulation and, where it was started here, Ray."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=_STOP_SECONDS)
            self._thread = None
        if self._began_ray and ray.is_initialized():
            ray.shutdown()
        self._began_ray = False
