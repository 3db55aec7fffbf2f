"""RunSpec: the fixed parts of a run, the same for every client."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch import nn

from sparsekit.errors import NoUnitsError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit.measure import CostModel, cost_model
from sparsekit.pruning import signs_of_training
from sparsekit.rng import torch_scope
from sparsekit.tracing import trace_units
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.client.context import stream
from sparsekit_fl.client.fit import check_training
from sparsekit_fl.config import RunConfig
from sparsekit_fl.layers import Layer, trace_layers
from sparsekit_fl.methods.base import Method, Setup
from sparsekit_fl.models import read_initial
from sparsekit_fl.packing import clone, digest, plain_bytes
from sparsekit_fl.problem.data import Client, TensorData
from sparsekit_fl.problem.problem import Problem

_DIGITS = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSpec:
    """The fixed parts of a run, the same for every client; problem and options are as `method.check` returned them.

    Args:
        initial: The global state of round 0, dense, on the CPU.
        parameters: State-dict keys of parameters that train; the others are buffers or frozen parameters.
        frozen: State-dict keys of parameters without gradient. They are neither sent nor kept for each client.
        private: State-dict keys of the entries that stay on each client.
        trained: Whether the global state of round 0 was trained before: it was given, or shows signs of it.
    """

    method: Method
    problem: Problem
    graph: UnitGraph
    layers: tuple[Layer, ...]
    costs: CostModel
    config: RunConfig
    initial: StateDict
    parameters: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    trained: bool = False

    @classmethod
    def build(cls, method: Method, problem: Problem, config: RunConfig, *, init: Path | str | StateDict | None = None) -> Self:
        """Make the model from the run's seed or from `init` (see `read_initial`), and trace its units and costs."""
        check_training(config.training)
        model, graph, layers = _traced(problem, config)
        setup = method.check(Setup(problem=problem, graph=graph, layers=layers, config=config))
        if setup.problem is not problem:
            model, graph, layers = _traced(setup.problem, config)
        costs = cost_model(model, setup.problem.example_inputs, graph)
        initial = clone(model.state_dict())
        leaves = dict(model.named_parameters(remove_duplicate=False))
        return cls(
            method=method,
            problem=setup.problem,
            graph=graph,
            layers=layers,
            costs=costs,
            config=setup.config,
            initial=initial if init is None else read_initial(init, initial),
            parameters=frozenset(name for name, leaf in leaves.items() if leaf.requires_grad),
            frozen=frozenset(name for name, leaf in leaves.items() if not leaf.requires_grad),
            private=frozenset(setup.private),
            trained=init is not None or signs_of_training(model) is not None,
        )

    def shared_names(self) -> list[str]:
        """Return the keys of the state that travel, in the order of the state."""
        return [name for name in self.initial if name not in self.frozen and name not in self.private]

    def fingerprint(self) -> str:
        """Return a digest of entries, units and frozen values, which never travel: server and clients must have the same."""
        shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in self.initial.items()]
        frozen = digest({name: self.initial[name] for name in self.frozen})
        return short_digest([shapes, self.graph.fingerprint(), frozen])

    def describe(self, clients: Mapping[int, Client], experiment: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain JSON values that must be equal when a run is resumed."""
        devices = [[client.id, *dataclasses.astuple(client.capability)] for client in clients.values()]
        return {
            "method": self.method.describe(),
            "config": self.config.to_dict(),
            "experiment": dict(experiment),
            "clients": {
                "count": len(clients),
                "capabilities": short_digest(devices),
                "data": data_fingerprint(clients.values()),
            },
            "model": {"fingerprint": self.fingerprint(), "initial": digest(self.initial)[:_DIGITS]},
        }

    def on(self, device: str) -> Self:
        """Return the same spec for one device. Its narrow model is made again when it is first used."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, device=device))

    @cached_property
    def masked(self) -> LearnableMask:
        """The narrow model of this process, on the device of the options. All clients use it, one after the other."""
        with torch_scope(stream(self.config.seed, "model")):
            model = self.problem.model().to(self.config.device)
        return LearnableMask(model, graph=self.graph, learning=GradientImportance())

    def model(self, state: StateDict) -> nn.Module:
        with torch_scope(stream(self.config.seed, "model")):
            model = self.problem.model()
        model.load_state_dict(state)
        return model


def _traced(problem: Problem, config: RunConfig) -> tuple[nn.Module, UnitGraph, tuple[Layer, ...]]:
    with torch_scope(stream(config.seed, "model")):
        model = problem.model()
    try:
        graph = trace_units(model, problem.example_inputs)
    except NoUnitsError:
        # Methods that train the whole model need no units; the others say so before the run.
        graph = UnitGraph(groups={}, shapes={name: t.shape for name, t in model.state_dict().items()})
    return model, graph, trace_layers(model, problem.example_inputs)


def short_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_DIGITS]


def by_id(clients: Sequence[Client]) -> dict[int, Client]:
    return {client.id: client for client in sorted(clients, key=lambda client: client.id)}


def data_fingerprint(clients: Iterable[Client]) -> str:
    """Return a hash of ids, sizes, and of `TensorData` all labels and the first example; other changes go unnoticed."""
    sha = hashlib.sha256()
    for client in sorted(clients, key=lambda client: client.id):
        for split in (client.data.train, client.data.val, client.data.test):
            sha.update(f"{client.id} {type(split).__qualname__} {len(split)};".encode())
            if isinstance(split, TensorData) and len(split):
                first = 0 if split.index is None else split.index[:1]
                for tensor in (split.labels(), *(own[first] for own in split.inputs)):
                    sha.update(plain_bytes(tensor))
    return sha.hexdigest()[:_DIGITS]
