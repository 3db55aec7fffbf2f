"""Names of the federated layer that sparsekit 0.3 removes: each still works, and its warning says what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsekit.deprecations import warn_renamed

__all__ = ["REMOVED_KEYS", "RENAMED_POLICIES", "RenamedHooks"]

_POLICIES = {
    "ExceptHead": "PrivateHead",
    "OwnModel": "LocalModel",
    "OwnStatistics": "RecalibratedBatchNorm",
    "ServerPattern": "ServerCriterion",
    "UnitPattern": "UnitCriterion",
}

RENAMED_POLICIES: Mapping[str, tuple[str, str]] = {
    old: (f"sparsekit_fl.policies:{new}", f"sparsekit_fl.policies.{new}") for old, new in _POLICIES.items()
}
"""Old public name of `sparsekit_fl.policies` → where its object is, and the new name."""

REMOVED_KEYS: Mapping[str, str] = {
    "flops_compact_training": "flops_compact",
    "simulated_seconds_training": "simulated_seconds",
}
"""Key of `cost` in a result that counts training alone, as results of version 0.1 do → the number that contains scoring. A file
cannot warn: these keys are written until 0.3."""


class RenamedHooks:
    """Base of the policies whose hook `vet` is called `validate`: a subclass that defines the old one still works."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "vet" in vars(cls) and "validate" not in vars(cls):
            warn_renamed(f"the hook {cls.__name__}.vet", "validate")
            cls.validate = cls.vet  # type: ignore[attr-defined]
