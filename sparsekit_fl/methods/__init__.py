"""Methods: one file per paper. `registry` finds them by name; each is also a function of this module."""

from __future__ import annotations

from typing import Any

from sparsekit.registry import Registry

# Imported here and not when asked for: a submodule that is imported later would take its function's name.
from sparsekit_fl.methods.fedavg import fedavg
from sparsekit_fl.methods.fedlps import fedlps, fedlps_paper
from sparsekit_fl.methods.local import local

__all__ = ["fedavg", "fedlps", "fedlps_paper", "local", "registry"]

registry = Registry(
    "method",
    {
        "fedavg": "sparsekit_fl.methods.fedavg:fedavg",
        "fedlps": "sparsekit_fl.methods.fedlps:fedlps",
        "fedlps-paper": "sparsekit_fl.methods.fedlps:fedlps_paper",
        "local": "sparsekit_fl.methods.local:local",
    },
    group="sparsekit_fl.methods",
)


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and name.replace("_", "-") in registry:
        return registry[name.replace("_", "-")]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; methods: {', '.join(registry)}")
