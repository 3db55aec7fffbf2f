"""Engines: who runs clients. `registry` finds them by name."""

from sparsekit.registry import Registry
from sparsekit_fl.engines.base import ClientPool, Engine, Reply
from sparsekit_fl.engines.embedded import Embedded

__all__ = ["ClientPool", "Embedded", "Engine", "Reply", "registry"]

registry = Registry(
    "engine",
    {
        "embedded": "sparsekit_fl.engines.embedded:Embedded",
        "flower": "sparsekit_fl.engines.flower:Flower",
    },
    group="sparsekit_fl.engines",
)
