"""sparsekit_fl: federated learning on top of sparsekit.

The public names are listed in `__all__`; anything else may change. Names are imported when first used: importing this
package needs no GPU, no network and none of the optional packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsekit_fl import callbacks, engines, errors, methods, policies
    from sparsekit_fl.callbacks.base import Callback, RunView
    from sparsekit_fl.context.client import ClientContext
    from sparsekit_fl.context.server import ServerContext
    from sparsekit_fl.costs.devices import DeviceBudgets
    from sparsekit_fl.datasets.base import DataSource
    from sparsekit_fl.engines.base import ClientPool, Engine
    from sparsekit_fl.engines.cohort import Cohort
    from sparsekit_fl.engines.embedded import Embedded
    from sparsekit_fl.experiment.build import build_problem
    from sparsekit_fl.methods.method import Method
    from sparsekit_fl.options.config import RunConfig, TrainingConfig
    from sparsekit_fl.paper.presets import preset_for
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
    from sparsekit_fl.problem import metrics
    from sparsekit_fl.problem.clients import Capability, Client, ClientData
    from sparsekit_fl.problem.data import TensorData
    from sparsekit_fl.problem.problem import Problem
    from sparsekit_fl.results.load import load_result
    from sparsekit_fl.results.records import Observer, RoundRecord, RunResult
    from sparsekit_fl.saved.load import load_model
    from sparsekit_fl.server.loop import run
    from sparsekit_fl.wire.messages import Assignment, Evaluation, Update, WorkCost

_HOME = {
    "AggregatePolicy": "sparsekit_fl.policies",
    "Assignment": "sparsekit_fl.wire.messages",
    "Callback": "sparsekit_fl.callbacks.base",
    "Capability": "sparsekit_fl.problem.clients",
    "Client": "sparsekit_fl.problem.clients",
    "ClientContext": "sparsekit_fl.context.client",
    "ClientData": "sparsekit_fl.problem.clients",
    "ClientPool": "sparsekit_fl.engines.base",
    "Cohort": "sparsekit_fl.engines.cohort",
    "DataSource": "sparsekit_fl.datasets.base",
    "DeviceBudgets": "sparsekit_fl.costs.devices",
    "Embedded": "sparsekit_fl.engines.embedded",
    "Engine": "sparsekit_fl.engines.base",
    "Evaluation": "sparsekit_fl.wire.messages",
    "LocalPolicy": "sparsekit_fl.policies",
    "LocalResult": "sparsekit_fl.policies",
    "MaskPolicy": "sparsekit_fl.policies",
    "Method": "sparsekit_fl.methods.method",
    "Observer": "sparsekit_fl.results.records",
    "PersonalModel": "sparsekit_fl.policies",
    "PersonalPolicy": "sparsekit_fl.policies",
    "Problem": "sparsekit_fl.problem.problem",
    "RatioPolicy": "sparsekit_fl.policies",
    "RoundRecord": "sparsekit_fl.results.records",
    "RunConfig": "sparsekit_fl.options.config",
    "RunResult": "sparsekit_fl.results.records",
    "RunView": "sparsekit_fl.callbacks.base",
    "SamplingPolicy": "sparsekit_fl.policies",
    "ServerContext": "sparsekit_fl.context.server",
    "SharePolicy": "sparsekit_fl.policies",
    "TensorData": "sparsekit_fl.problem.data",
    "TrainingConfig": "sparsekit_fl.options.config",
    "Update": "sparsekit_fl.wire.messages",
    "WorkCost": "sparsekit_fl.wire.messages",
    "build_problem": "sparsekit_fl.experiment.build",
    "callbacks": "sparsekit_fl.callbacks",
    "engines": "sparsekit_fl.engines",
    "errors": "sparsekit_fl.errors",
    "load_model": "sparsekit_fl.saved.load",
    "load_result": "sparsekit_fl.results.load",
    "methods": "sparsekit_fl.methods",
    "metrics": "sparsekit_fl.problem.metrics",
    "policies": "sparsekit_fl.policies",
    "preset_for": "sparsekit_fl.paper.presets",
    "run": "sparsekit_fl.server.loop",
}

__all__ = [
    "AggregatePolicy",
    "Assignment",
    "Callback",
    "Capability",
    "Client",
    "ClientContext",
    "ClientData",
    "ClientPool",
    "Cohort",
    "DataSource",
    "DeviceBudgets",
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
    "RunView",
    "SamplingPolicy",
    "ServerContext",
    "SharePolicy",
    "TensorData",
    "TrainingConfig",
    "Update",
    "WorkCost",
    "build_problem",
    "callbacks",
    "engines",
    "errors",
    "load_model",
    "load_result",
    "methods",
    "metrics",
    "policies",
    "preset_for",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsekit_fl' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted(__all__)
