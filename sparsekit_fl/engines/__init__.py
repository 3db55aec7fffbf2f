"""Engines: who runs clients. `registry` finds them by name."""

from sparsekit.graph import StateDict
from sparsekit.registry import Registry
from sparsekit_fl.engines.base import ClientPool, Engine, Reply, Unscored
from sparsekit_fl.engines.cohort import Cohort
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.engines.executor import ClientExecutor
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.processes import one_thread
from sparsekit_fl.results.state.store import ClientStore, MemoryRounds

# With these an engine can be written elsewhere.
__all__ = [
    "ClientExecutor",
    "ClientPool",
    "ClientStore",
    "Cohort",
    "Embedded",
    "Engine",
    "MemoryRounds",
    "Reply",
    "RunSpec",
    "StateDict",
    "Unscored",
    "one_thread",
    "registry",
]

registry = Registry(
    "engine",
    {
        "cohort": "sparsekit_fl.engines.cohort:Cohort",
        "embedded": "sparsekit_fl.engines.embedded:Embedded",
        "flower": "sparsekit_fl.engines.flower.simulation:Flower",
    },
    group="sparsekit_fl.engines",
)
