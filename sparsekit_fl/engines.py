"""Engines by name, and what an engine that is written elsewhere needs."""

from sparsekit.registry import Registry
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client_round import answer, run_client
from sparsekit_fl.engine import Engine, Processes, RunClients
from sparsekit_fl.processes import one_thread
from sparsekit_fl.spec import RunSpec

__all__ = [
    "Engine",
    "Memories",
    "Processes",
    "RunClients",
    "RunSpec",
    "answer",
    "one_thread",
    "registry",
    "run_client",
]

registry = Registry(
    "engine",
    {
        "flower": "sparsekit_fl.flower.engine:GridEngine",
        "processes": "sparsekit_fl.engine:Processes",
    },
    group="sparsekit_fl.engines",
)
