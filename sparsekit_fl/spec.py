"""RunSpec: the fixed parts of a run, the same for every client."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit.graph import StateDict, UnitGraph, clone, digest
from sparsekit.measure import CostModel, cost_model
from sparsekit.rng import torch_scope
from sparsekit.tracing import trace_layers, trace_units
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.client.fit import check_training
from sparsekit_fl.config import RunConfig, TrainingConfig
from sparsekit_fl.devices import devices
from sparsekit_fl.methods.base import Method
from sparsekit_fl.models import read_initial
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.streams import Streams


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSpec:
    """The fixed parts of a run, the same for every client.

    Args:
        method: The recipe.
        problem: Model, loss and metrics, as `method.prepare` returned them.
        graph: The units of the model, and its layers.
        costs: The FLOPs of the model.
        config: The options, as `method.configure` returned them.
        initial: The global state of round 0, dense, on the CPU.
        parameters: State-dict keys of what trains; the rest are buffers, and what is frozen.
        frozen: Those of parameters that need no gradient: they neither travel nor are kept for each client.
        recipe: How another process makes the model again; see `Problem.recipe`.
    """

    method: Method
    problem: Problem
    graph: UnitGraph
    costs: CostModel
    config: RunConfig
    initial: StateDict
    parameters: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def build(
        method: Method,
        problem: Problem,
        config: RunConfig,
        *,
        graph: UnitGraph | None = None,
        init: Path | str | StateDict | None = None,
    ) -> RunSpec:
        """Make the model from the run's seed, trace its units and its costs.

        Args:
            method: The recipe.
            problem: Model, loss and metrics, as the user gave them.
            config: The options.
            graph: The units of the model, where they are already known.
            init: Weights to start from; see `state.initial.read_initial`. None: those of the fresh model.
        """
        config = method.configure(config)
        check_training(config.training)
        given, problem = problem, method.prepare(problem)
        # A method that needs another architecture makes it of the user's.
        recipe = {**given.recipe(), "prepared_by": None if problem is given else method.name}
        with torch_scope(Streams(config.seed).model()):
            model = problem.model()
        if graph is None:
            try:
                graph = trace_units(model, *problem.example_inputs)
            except NoUnitsError:
                # Methods that train the whole model need no units; the others say so when they choose a mask.
                graph = UnitGraph(groups={}, shapes={name: t.shape for name, t in model.state_dict().items()})
        graph.check_state(model.state_dict())
        graph = dataclasses.replace(graph, layers=trace_layers(model, *problem.example_inputs))
        method.check(problem, graph)
        costs = cost_model(model, *problem.example_inputs, graph=graph)
        initial = clone(model.state_dict())
        leaves = dict(model.named_parameters(remove_duplicate=False))
        return RunSpec(
            method=method,
            problem=problem,
            graph=graph,
            costs=costs,
            config=config,
            initial=initial if init is None else read_initial(init, initial),
            parameters=frozenset(name for name, leaf in leaves.items() if leaf.requires_grad),
            frozen=frozenset(name for name, leaf in leaves.items() if not leaf.requires_grad),
            recipe=recipe,
        )

    def shared_names(self) -> list[str]:
        """Return the keys of the state that travel, in the order of the state."""
        private = self.method.private(self.graph)
        return [name for name in self.initial if name not in self.frozen and name not in private]

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells one model from another: digests of its entries, of its units and of its frozen values.

        Frozen values never travel, so that server and clients must have the same ones.
        """
        shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in self.initial.items()]
        groups = [list(pair) for pair in self.graph.fingerprint()]
        frozen = digest({name: self.initial[name] for name in sorted(self.frozen)})[:16]
        return {"entries": len(shapes), "shapes": short_digest(shapes), "units": short_digest(groups), "frozen": frozen}

    def on(self, device: str) -> RunSpec:
        """Return the same spec for one device. Its narrow model is made anew, when it is first used."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, device=device))

    @cached_property
    def masked(self) -> LearnableMask:
        """The narrow model of this process, on the device of the options. All clients use it, one after the other."""
        with torch_scope(Streams(self.config.seed).model()):
            model = self.problem.model().to(self.config.device)
        return LearnableMask(model, graph=self.graph, learning=GradientImportance(explore=0.0))

    def model(self, state: StateDict) -> nn.Module:
        """Make a module that holds a whole dense state."""
        with torch_scope(Streams(self.config.seed).model()):
            model = self.problem.model()
        model.load_state_dict(state)
        return model

    def training(self, round: int) -> TrainingConfig:
        """Return the options of training, with the learning rate of this round."""
        return dataclasses.replace(self.config.training, lr=self.config.training.lr * self.config.round_factor(round))


def short_digest(value: Any) -> str:
    """Return a digest of plain JSON values, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def by_id(clients: Sequence[Client]) -> dict[int, Client]:
    """Return the clients by id, ascending."""
    return {client.id: client for client in sorted(clients, key=lambda client: client.id)}


def check_device(device: str, *, name: str = "device") -> None:
    """Raise InvalidValueError unless this machine has a device (cpu, cuda, cuda:1, mps), or all of several by commas."""
    for one in devices(device):
        try:
            asked = torch.device(one)
        except RuntimeError as error:
            raise InvalidValueError(f"{name} must be cpu, cuda, cuda:N or mps, or several by commas, got {device!r}") from error
        if asked.type == "mps" and not torch.backends.mps.is_available():
            raise InvalidValueError(f"{name} {device}: this torch sees no Metal device; leave it out to run on the CPU")
        if asked.type != "cuda":
            continue
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InvalidValueError(f"{name} {device}: this torch sees no CUDA device; leave it out to run on the CPU")
        if asked.index is not None and asked.index >= count:
            raise InvalidValueError(f"{name} {device}: this machine has {count}, cuda:0 to cuda:{count - 1}; take one of these")
