"""What policies may look at: Setup of a run, ClientContext on a client, ServerContext on the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import nn

from sparsekit.errors import NoUnitsError
from sparsekit.masks.mask import UnitMask, WeightMask
from sparsekit.rng import Streams, torch_scope
from sparsekit.session import CompactSession
from sparsekit.state import StateDict, clone
from sparsekit.units.graph import UnitGraph
from sparsekit_fl.client import Capability, Client
from sparsekit_fl.config import RunConfig, TrainingConfig
from sparsekit_fl.messages import Scores
from sparsekit_fl.problem import Problem
from sparsekit_fl.sparse import Mask
from sparsekit_fl.training import Batches, Examples, Step, TrainingLog, evaluate, fit

if TYPE_CHECKING:
    from sparsekit_fl.method import Method

__all__ = ["ClientContext", "ClientInfo", "CostModel", "Memory", "Roster", "ServerContext", "Setup", "Work", "Workspace"]

Memory = dict[str, Any]
"""State that lives from round to round: tensors, numbers, strings, None, and lists and string-keyed dicts of these."""

Split = Literal["train", "val", "test"]
PolicyKind = Literal["sampling", "ratio", "mask", "local", "share", "aggregate", "personal"]


def rngs_by_kind(rng: np.random.Generator) -> dict[str, np.random.Generator]:
    """An independent generator for each kind of policy."""
    kinds = get_args(PolicyKind)
    return dict(zip(kinds, rng.spawn(len(kinds)), strict=True))


class CostModel(Protocol):
    """Forward FLOPs of one example under a mask; see `sparsekit.cost`."""

    @property
    def parameters(self) -> frozenset[str]:
        """State-dict keys of parameters, tied ones once."""
        ...

    def forward_flops(self, mask: UnitMask | None) -> int:
        """Of the compact model; 2 per multiply-add."""
        ...

    def rowmask_flops(self, mask: UnitMask | WeightMask | None) -> int:
        """By the paper's convention: only the rows of removed units vanish."""
        ...

    def part_flops(self, weights: Collection[str], *, bias: bool = False) -> int:
        """Of the uses of some weights of the whole model, with the bias entries that the paper's convention counts."""
        ...


@dataclass(frozen=True)
class Work:
    """FLOPs of training, forward and backward; see `WorkCost` for the two conventions. Work adds up."""

    flops_compact: int = 0
    flops_rowmask: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops_compact + other.flops_compact, self.flops_rowmask + other.flops_rowmask)


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """What is fixed for a whole run and the same for every client.

    Args:
        method: The recipe.
        problem: As `method.local.prepare` returned it.
        graph: The units of the problem's model, and its layers.
        costs: Its FLOPs.
        config: The options, as the method left them.
        initial: The global state of round 0, dense, on the CPU.
    """

    method: Method
    problem: Problem
    graph: UnitGraph
    costs: CostModel
    config: RunConfig
    initial: StateDict

    @staticmethod
    def build(method: Method, problem: Problem, config: RunConfig, *, graph: UnitGraph | None = None) -> Setup:
        """Make the model from the run's seed, trace its units and its costs.

        Args:
            method: The recipe.
            problem: The user's.
            config: The options.
            graph: The units, where they are already known.
        """
        from sparsekit.cost import trace_cost
        from sparsekit.units.layers import trace_layers
        from sparsekit.units.trace import trace_units

        config = method.configure(config)
        problem = method.local.prepare(problem)
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
        for policy in (method.ratio, method.mask, method.local, method.share):
            policy.check(problem, graph)
        costs = trace_cost(model, *problem.example_inputs, graph=graph)
        return Setup(method=method, problem=problem, graph=graph, costs=costs, config=config, initial=clone(model.state_dict()))

    def shared_names(self) -> list[str]:
        """Keys of the state that travel, in the order of the state."""
        return [name for name in self.initial if self.method.share.is_shared(name, self.graph)]

    def for_clients(self) -> Setup:
        """The same without what the server keeps to itself: the seed of a private run's noise."""
        if self.config.dp_noise_seed is None:
            return self
        return dataclasses.replace(self, config=dataclasses.replace(self.config, dp_noise_seed=None))

    def training(self, round: int) -> TrainingConfig:
        """Options of training with the learning rate of this round."""
        factor = self.config.lr_decay ** (round - 1)
        return dataclasses.replace(self.config.training, lr=self.config.training.lr * factor)


class Workspace:
    """What one worker process keeps from client to client: the setup and one compact session.

    Args:
        setup: Of the run.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        with torch_scope(Streams(setup.config.seed).model()):
            model = setup.problem.model().to(setup.config.device)
        self.session = CompactSession(model, setup.graph)

    def context(
        self,
        *,
        client: Client,
        round: int,
        capability: Capability,
        memory: Memory,
        extra: StateDict | None = None,
        received: Mask | None = None,
    ) -> ClientContext:
        """The context of one client in one round."""
        setup = self.setup
        return ClientContext(
            round=round,
            rounds=setup.config.rounds,
            client=client,
            capability=capability,
            problem=setup.problem,
            graph=setup.graph,
            training=setup.training(max(round, 1)),
            costs=setup.costs,
            session=self.session,
            device=setup.config.device,
            rngs=rngs_by_kind(Streams(setup.config.seed).client(round, client.id)),
            memory=memory,
            extra=extra or {},
            received=received,
            initial_state=lambda: setup.initial,
            cache={},
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientContext:
    """What a policy sees on a client.

    Args:
        round: The server round, counted from 1; when evaluating, the last finished one.
        rounds: How many rounds there will be.
        client: Id and data.
        capability: What the client can do in this round.
        problem: Model, loss, metrics.
        graph: The units of the model.
        training: Options, with the learning rate of this round.
        costs: FLOPs of the model.
        session: The narrow model of this process; load it before use.
        device: Where the session trains.
        rngs: Kind of policy → its generator for this client in this round; what one draws changes nothing for the others.
        memory: Private to this kind of policy and this client; what is put here is there in the next round.
        extra: Further tensors that the server sent.
        received: The mask under which the server sent the state: what it drops came as zero; None: everything came.
        initial_state: Gives the global state of round 0.
        cache: For this call only: examples that were already read.
        kind: Whose context this is.
        root: The client's whole memory, of which `memory` is one part.
    """

    round: int
    rounds: int
    client: Client
    capability: Capability
    problem: Problem
    graph: UnitGraph
    training: TrainingConfig
    costs: CostModel
    session: CompactSession
    device: str
    rngs: Mapping[str, np.random.Generator] = field(repr=False)
    memory: Memory
    extra: StateDict
    initial_state: Callable[[], StateDict]
    cache: dict[str, Examples] = field(repr=False)
    received: Mask | None = None
    kind: PolicyKind = "local"
    root: Memory | None = field(default=None, repr=False)

    def scoped(self, kind: PolicyKind) -> ClientContext:
        """The same context with the memory and the generator of one kind of policy."""
        root = self.memory if self.root is None else self.root
        return dataclasses.replace(self, memory=root.setdefault(kind, {}), kind=kind, root=root)

    def peek(self, kind: PolicyKind) -> Mapping[str, Any]:
        """What another kind of policy of this client keeps, to be looked at and not changed."""
        return MappingProxyType((self.memory if self.root is None else self.root).get(kind, {}))

    @property
    def rng(self) -> np.random.Generator:
        """The generator of this kind of policy."""
        return self.rngs[self.kind]

    def examples(self, split: Split) -> Examples:
        """One split of the client's data, decoded once per call of `client_round`."""
        if split not in self.cache:
            self.cache[split] = Examples(self.problem, getattr(self.client.data, split), device=self.device)
        return self.cache[split]

    def batches(self, *, epochs: int | None = None, batch_size: int | None = None) -> Batches:
        """Shuffled training batches; the defaults are those of the run."""
        return Batches(
            self.examples("train"),
            epochs=self.training.local_epochs if epochs is None else epochs,
            batch_size=self.training.batch_size if batch_size is None else batch_size,
            rng=self.rng,
        )

    def fit(self, module: nn.Module, batches: Batches, step: Step) -> TrainingLog:
        """Run `step` over `batches`; see `training.fit`."""
        return fit(module, batches, step, metrics=self.problem.metrics, rng=self.rng)

    def work(self, mask: UnitMask | WeightMask | None, log: TrainingLog) -> Work:
        """FLOPs of a fit under one mask: forward and a backward that costs twice as much.

        A weight mask saves entries on the wire and nothing when computing, so its compact cost is that of the whole model.
        """
        compact = self.costs.forward_flops(mask if isinstance(mask, UnitMask) else None)
        return Work(3 * compact * log.examples, 3 * self.costs.rowmask_flops(mask) * log.padded_examples)

    def score(self, module: nn.Module, split: Split, *, predict: Callable[..., Any] | None = None) -> Scores:
        """Scores of a module on one split of this client; empty where the split is."""
        return evaluate(module, self.problem, self.examples(split), predict=predict)


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows about a client.

    Args:
        examples: Training examples.
        capability: In this round.
    """

    examples: int
    capability: Capability


class Roster(Mapping[int, ClientInfo]):
    """Client id → `ClientInfo` of one round; levels are drawn when asked for, so ten thousand clients cost nothing.

    Args:
        clients: All clients of the run.
        config: Decides whether and how capability levels are drawn.
        round: The round, counted from 1.
    """

    def __init__(self, clients: Mapping[int, Client], config: RunConfig, round: int) -> None:
        self._clients = clients
        self._config = config
        self._round = round

    def __getitem__(self, client_id: int) -> ClientInfo:
        client = self._clients[client_id]
        capability = client.capability
        levels = self._config.capability_levels
        if levels is not None:
            round = self._round if self._config.capability == "dynamic" else 0
            rng = Streams(self._config.seed).capability(round, client_id)
            level = levels[int(rng.integers(len(levels)))]
            capability = capability.at(level)
        return ClientInfo(len(client.data.train), capability)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


@dataclass(frozen=True, eq=False, kw_only=True)
class ServerContext:
    """What a policy sees on the server.

    Args:
        round: The round, counted from 1.
        rounds: How many there will be.
        roster: Every client: examples, capability of this round.
        cohort_size: How many clients to sample, C.
        rngs: Kind of policy → its generator in this round; what one draws changes nothing for the others.
        memory: Private to this kind of policy.
        graph: The units of the model.
        state: The shared global state at the start of the round.
        kind: Whose context this is.
        costs: FLOPs of the model; None in a context that no run made.
    """

    round: int
    rounds: int
    roster: Mapping[int, ClientInfo]
    cohort_size: int
    rngs: Mapping[str, np.random.Generator] = field(repr=False)
    memory: Memory
    graph: UnitGraph
    state: StateDict
    kind: PolicyKind = "sampling"
    costs: CostModel | None = None

    def scoped(self, kind: PolicyKind) -> ServerContext:
        """The same context with the memory and the generator of one kind of policy."""
        return dataclasses.replace(self, memory=self.memory.setdefault(kind, {}), kind=kind)

    @property
    def rng(self) -> np.random.Generator:
        """The generator of this kind of policy."""
        return self.rngs[self.kind]


def one_thread() -> int:
    """Set torch to one thread, on which results must depend; returns the number before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    return before


def by_id(clients: Sequence[Client]) -> dict[int, Client]:
    """Client id → client, ascending."""
    return {client.id: client for client in sorted(clients, key=lambda client: client.id)}
