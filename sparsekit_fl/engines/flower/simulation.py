"""Flower: the engine that runs clients in Flower's simulation, on this machine's cores or on a Ray cluster."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from typing import Any

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

# Private, since no public entry of Flower 1.41 does what is needed: `run_simulation` is this function after a warning that it
# is deprecated in favour of `flwr run`. That command starts an app from a folder in processes of its own, which cannot be
# handed problems and clients that live in this one, and its federations have no option for the address of a Ray cluster.
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.telemetry import EventType

from sparsekit.errors import InvalidValueError
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.devices import device_of, devices, use_exact_arithmetic
from sparsekit_fl.engines.flower.node import Node, make_app
from sparsekit_fl.engines.flower.pool import GridPool
from sparsekit_fl.engines.flower.post import Carrier
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.options import Checked, Count, Positive
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.processes import one_thread
from sparsekit_fl.spec import RunSpec

_log = logging.getLogger(__name__)
_NODES = 100
_RESTARTS = 3  # of the simulation, after one of its processes died
_OBJECT_STORE_BYTES = 300 * 2**20
_START_SECONDS = 300.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.05


@lru_cache(maxsize=1)
def _node_of(reference: Any) -> Node:
    """Return the node of this process: made at the first message of a run, kept for the others."""
    node: Node = ray.get(reference)()
    return node


@dataclass(frozen=True)
class Flower(Checked):
    """Clients in Flower's simulation: Ray actors, one torch thread each. Gives the same bits as the embedded engine.

    A client that raises is dropped from its round. When an actor dies, the simulation is started anew and what was not
    answered is sent again; clients then start from the memories that they had, so nothing changes but the time.

    Args:
        workers: Actors on this machine; not with `ray_address`, where the cluster's cores decide.
        supernodes: Virtual nodes; None gives each client one, up to 100. Flower looks through all open messages for each of
            them ten times a second, so more cost time. They take the clients of a round in turn.
        ray_address: Head of a running Ray cluster, "host:port"; None starts Ray on this machine. The package must be
            installed on every machine of the cluster, and memories of clients then travel with the messages.
        timeout_seconds: Replies that take longer are given up; None waits.
    """

    workers: Count = 1
    _: KW_ONLY
    supernodes: Count | None = None
    ray_address: str | None = None
    timeout_seconds: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray_address is not None and ":" not in self.ray_address:
            raise InvalidValueError(f"ray_address must be 'host:port' of a Ray cluster's head, got {self.ray_address!r}")

    @contextmanager
    def open(self, spec: RunSpec, clients: Mapping[int, Client], memories: Memories) -> Iterator[GridPool]:
        """Start the simulation beside this thread; leaving the context ends it."""
        # Actors on this machine write memories where the run keeps them; others cannot.
        shared = self.ray_address is None
        here = Memories(memories.folder.resolve(), durable=memories.durable) if shared else None
        session = _Session(self, spec, len(clients), partial(_make_node, spec, clients, here))
        with one_thread():
            try:
                session.start()
                carried = None if shared else memories
                yield GridPool(session, spec, workers=session.actors, carried=carried, timeout_seconds=self.timeout_seconds)
            finally:
                session.close()


def _make_node(spec: RunSpec, clients: Mapping[int, Client], memories: Memories | None) -> Node:
    """Make the node of an actor, whose device Ray has chosen."""
    if spec.config.deterministic:
        use_exact_arithmetic()
    return Node(spec.on(device_of(spec.config.device)), clients, memories)


class _Session(Carrier):
    """A simulation in a thread beside ours, and its grid. It is started anew when one of its processes dies.

    Its processes are Ray's, which supervises them itself, so `processes.Children` has no part in it. `make` makes the node of
    an actor; it goes to every machine once, through Ray's object store.
    """

    devices = False

    def __init__(self, engine: Flower, spec: RunSpec, clients: int, make: Callable[[], Node]) -> None:
        self.actors = engine.workers
        self._engine = engine
        self._device = spec.config.device
        self._make = make
        self._nodes = engine.supernodes or min(clients, _NODES)
        self._left = _RESTARTS
        self._turns: Iterator[int] = iter(())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._began_ray = False

    def node_of(self, client_id: int) -> int:  # noqa: ARG002 - other carriers have to look at it
        # They are all alike, so they take turns and a cohort is spread over them.
        return next(self._turns)

    def start(self) -> None:
        """Start Ray and the simulation, and wait for its nodes; raises WorkerDiedError where they do not come up."""
        self._start_ray()
        reference = ray.put(self._make)
        self._stop = stop = threading.Event()
        # Ray gives each actor its share of the GPUs, and shows it no other.
        gpus = len(devices(self._device)) / self.actors if self._device.startswith("cuda") else 0.0
        server = ServerApp()
        found: list[Grid | BaseException] = []  # what the simulation's thread has to say

        def main(grid: Grid, _: Context) -> None:
            found.append(grid)
            stop.wait()

        server.main()(main)

        def simulate() -> None:
            try:
                resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": gpus}}
                _run_simulation(
                    self._nodes,
                    EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                    make_app(lambda *_: _node_of(reference)),
                    server,
                    backend_config=resources,
                )
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                found.append(error)

        self._thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
        self._thread.start()
        ids: list[int] = []
        end = time.monotonic() + _START_SECONDS
        while len(ids) < self._nodes:
            if time.monotonic() > end:
                raise WorkerDiedError(f"{len(ids)} of {self._nodes} nodes of Flower's simulation came in {_START_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
            for one in found:
                if isinstance(one, BaseException):
                    raise WorkerDiedError(f"Flower's simulation did not start: {one}") from one
                # Nodes are registered after the server's side has begun.
                self.grid, ids = one, sorted(one.get_node_ids())
        self._turns = itertools.cycle(ids)

    def _start_ray(self) -> None:
        address = self._engine.ray_address
        # A Ray that runs already is the user's own; it is used, and Flower disconnects from it at the end.
        self._began_ray = not ray.is_initialized()
        if self._began_ray:
            # Without "local" Ray would join a cluster that it finds on this machine, and refuse the other two.
            here = {"address": "local", "num_cpus": self.actors, "object_store_memory": _OBJECT_STORE_BYTES}
            where: dict[str, Any] = here if address is None else {"address": address}
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **where)
        if address is not None or not self._began_ray:
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            self.actors = max(1, int(resources.get("CPU", 1)))

    def restart(self, reason: str) -> None:
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
