"""sparsekit_fl: federated learning on top of sparsekit.

The public names are listed in `__all__`; anything else may change. Names are imported when first used: importing this
package needs no GPU, no network and none of the optional packages.
"""

# ruff: noqa: I001 - one line for each module

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names

if TYPE_CHECKING:
    from sparsekit_fl import callbacks as callbacks, engines as engines, errors as errors, methods as methods
    from sparsekit_fl.client.context import ClientContext as ClientContext
    from sparsekit_fl.problem.datasets import datasets as datasets, DataSource as DataSource
    from sparsekit_fl.engines import Engine as Engine, Processes as Processes
    from sparsekit_fl.paper.build import build_problem as build_problem
    from sparsekit_fl.methods.adapters import Adapter as Adapter, adapters as adapters
    from sparsekit_fl.methods.base import Method as Method, ServerContext as ServerContext, Setup as Setup
    from sparsekit_fl.methods.base import mean as mean, units as units
    from sparsekit_fl.methods.client import sgd as sgd, Model as Model, Result as Result, Task as Task
    from sparsekit_fl.config import RunConfig as RunConfig, TrainingConfig as TrainingConfig
    from sparsekit_fl.config import option as option
    from sparsekit_fl.paper.presets import preset_for as preset_for
    from sparsekit_fl.problem.partition import partitions as partitions, Partition as Partition
    from sparsekit_fl.problem import metrics as metrics
    from sparsekit_fl.problem.data import Capability as Capability, Client as Client, ClientData as ClientData
    from sparsekit_fl.problem.data import TensorData as TensorData
    from sparsekit_fl.problem.problem import Problem as Problem
    from sparsekit_fl.comparison import Comparison as Comparison
    from sparsekit_fl.results import load_result as load_result, RoundRecord as RoundRecord, RunResult as RunResult
    from sparsekit_fl.results import Callback as Callback, RunView as RunView
    from sparsekit_fl.models import load_model as load_model
    from sparsekit_fl.rounds import run as run
    from sparsekit_fl.client.messages import Evaluation as Evaluation, Reply as Reply, Request as Request
    from sparsekit_fl.client.messages import Update as Update, Cost as Cost

_HOMES = {
    "sparsekit_fl": "callbacks errors methods",
    "sparsekit_fl.comparison": "Comparison",
    "sparsekit_fl.paper.build": "build_problem",
    "sparsekit_fl.methods.base": "Method",
    "sparsekit_fl.config": "RunConfig TrainingConfig",
    "sparsekit_fl.paper.presets": "preset_for",
    "sparsekit_fl.problem": "metrics",
    "sparsekit_fl.problem.data": "Capability Client ClientData TensorData",
    "sparsekit_fl.problem.problem": "Problem",
    "sparsekit_fl.results": "load_result RunResult",
    "sparsekit_fl.models": "load_model",
    "sparsekit_fl.rounds": "run",
}
"""Module → public names that scripts can rely on."""
_FURTHER = {
    "sparsekit_fl": "engines",
    "sparsekit_fl.client.context": "ClientContext",
    "sparsekit_fl.methods.adapters": "Adapter adapters",
    "sparsekit_fl.methods.base": "ServerContext Setup mean units",
    "sparsekit_fl.problem.datasets": "datasets DataSource",
    "sparsekit_fl.engines": "Engine Processes",
    "sparsekit_fl.methods.client": "sgd Model Result Task",
    "sparsekit_fl.config": "option",
    "sparsekit_fl.problem.partition": "partitions Partition",
    "sparsekit_fl.results": "Callback RoundRecord RunView",
    "sparsekit_fl.client.messages": "Evaluation Reply Request Update Cost",
}
"""Module → further names, for authors of plug-ins and for sparsekit itself. These names may change."""
__all__, __getattr__ = lazy_names(__name__, _HOMES, _FURTHER)


def __dir__() -> list[str]:
    return sorted(__all__)
