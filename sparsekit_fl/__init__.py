"""sparsekit_fl: federated learning on top of sparsekit.

The public names are listed in `__all__`; anything else may change. Names are imported when first used: importing this
package needs no GPU, no network and none of the optional packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsekit_fl import errors, methods, metrics, policies
    from sparsekit_fl.client import Capability, Client, ClientData
    from sparsekit_fl.config import RunConfig, TrainingConfig
    from sparsekit_fl.context import ClientContext, ServerContext
    from sparsekit_fl.data import TensorData
    from sparsekit_fl.engines.base import ClientPool, Engine
    from sparsekit_fl.engines.embedded import Embedded
    from sparsekit_fl.messages import Assignment, Evaluation, Update, WorkCost
    from sparsekit_fl.method import Method
    from sparsekit_fl.policies import (
        AggregatePolicy,
        LocalPolicy,
        LocalResult,
        MaskPolicy,
        PersonalModel,
        PersonalPolicy,
        RatioPolicy,
        SamplingPolicy,
        SharePolicy,
    )
    from sparsekit_fl.problem import Problem
    from sparsekit_fl.results import Observer, RoundRecord, RunResult
    from sparsekit_fl.runner import run

_HOME = {
    "AggregatePolicy": "sparsekit_fl.policies",
    "Assignment": "sparsekit_fl.messages",
    "Capability": "sparsekit_fl.client",
    "Client": "sparsekit_fl.client",
    "ClientContext": "sparsekit_fl.context",
    "ClientData": "sparsekit_fl.client",
    "ClientPool": "sparsekit_fl.engines.base",
    "Embedded": "sparsekit_fl.engines.embedded",
    "Engine": "sparsekit_fl.engines.base",
    "Evaluation": "sparsekit_fl.messages",
    "LocalPolicy": "sparsekit_fl.policies",
    "LocalResult": "sparsekit_fl.policies",
    "MaskPolicy": "sparsekit_fl.policies",
    "Method": "sparsekit_fl.method",
    "Observer": "sparsekit_fl.results",
    "PersonalModel": "sparsekit_fl.policies",
    "PersonalPolicy": "sparsekit_fl.policies",
    "Problem": "sparsekit_fl.problem",
    "RatioPolicy": "sparsekit_fl.policies",
    "RoundRecord": "sparsekit_fl.results",
    "RunConfig": "sparsekit_fl.config",
    "RunResult": "sparsekit_fl.results",
    "SamplingPolicy": "sparsekit_fl.policies",
    "ServerContext": "sparsekit_fl.context",
    "SharePolicy": "sparsekit_fl.policies",
    "TensorData": "sparsekit_fl.data",
    "TrainingConfig": "sparsekit_fl.config",
    "Update": "sparsekit_fl.messages",
    "WorkCost": "sparsekit_fl.messages",
    "errors": "sparsekit_fl.errors",
    "methods": "sparsekit_fl.methods",
    "metrics": "sparsekit_fl.metrics",
    "policies": "sparsekit_fl.policies",
    "run": "sparsekit_fl.runner",
}

__all__ = [
    "AggregatePolicy",
    "Assignment",
    "Capability",
    "Client",
    "ClientContext",
    "ClientData",
    "ClientPool",
    "Embedded",
    "Engine",
    "Evaluation",
    "LocalPolicy",
    "LocalResult",
    "MaskPolicy",
    "Method",
    "Observer",
    "PersonalModel",
    "PersonalPolicy",
    "Problem",
    "RatioPolicy",
    "RoundRecord",
    "RunConfig",
    "RunResult",
    "SamplingPolicy",
    "ServerContext",
    "SharePolicy",
    "TensorData",
    "TrainingConfig",
    "Update",
    "WorkCost",
    "errors",
    "methods",
    "metrics",
    "policies",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsekit_fl' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if _HOME[name] == f"sparsekit_fl.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
