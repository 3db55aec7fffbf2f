"""`Setup` and `ServerContext`: a method's view of a run and of the server; `mean`: the mean of clients' changes.

Sums are in float64, in the order of the updates.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparsekit.errors import NoUnitsError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit.measure import CostModel
from sparsekit_fl.client.context import Memory, width_of
from sparsekit_fl.client.messages import Update
from sparsekit_fl.config import CapabilityOf, RunConfig
from sparsekit_fl.methods.client import Task
from sparsekit_fl.packing import Kept
from sparsekit_fl.problem.data import Capability, Client
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.streams import Streams

_LEAST_OFFER = 1e-3


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """Parts of a run.

    Args:
        problem: Model, loss, metrics.
        graph: The units of the model. If a method replaces `problem`, the new model is traced afterwards.
        config: The options of the run.
        private: State-dict keys of entries that stay on each client from round to round; at first with the values of round 0.
    """

    problem: Problem
    graph: UnitGraph
    config: RunConfig
    private: Collection[str] = ()

    def require_units(self, name: str) -> None:
        """Raise NoUnitsError if the model has no units; `name` is the method's, for the message."""
        if not self.graph.groups:
            raise NoUnitsError(
                f"the model has no units, so {name} has nothing to choose from; `sparsekit units` shows why; or run a method"
                " that trains the whole model"
            )


@dataclass(frozen=True)
class ClientInfo:
    """A client as the server sees it: its number of training examples, and what the device can do in this round."""

    examples: int
    capability: Capability


class Roster(Mapping[int, ClientInfo]):
    """Client id → `ClientInfo` of one round, from 1; a level is drawn when first read, so ten thousand clients cost nothing."""

    def __init__(self, clients: Mapping[int, Client], config: RunConfig, round: int) -> None:
        self._clients = clients
        self._config = config
        self._round = round
        self._read: dict[int, ClientInfo] = {}

    def __getitem__(self, client_id: int) -> ClientInfo:
        if client_id not in self._read:
            client, config = self._clients[client_id], self._config
            capability = client.capability
            if config.capability_levels is not None:
                rng = Streams(config.seed).capability(self._round if config.redraw_capability else 0, client_id)
                capability = capability.at(config.capability_levels[int(rng.integers(len(config.capability_levels)))])
            self._read[client_id] = ClientInfo(len(client.data.train), capability)
        return self._read[client_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._clients

    @property
    def was_read(self) -> bool:
        """Whether somebody has looked a client up."""
        return bool(self._read)

    def __len__(self) -> int:
        return len(self._clients)


@dataclass(frozen=True, eq=False, kw_only=True)
class ServerContext:
    """A method's view of the server.

    Args:
        round: The round, counted from 1.
        rounds: Number of rounds of the run.
        roster: Client id → examples and capability of this round.
        cohort_size: Number of clients to sample, C.
        rngs: Purpose, such as "sampling", "ratio" and "mask" → its generator in this round; they draw independently.
        memory: State of the method, which lives from round to round; all of it is written in every round.
        client: Client id → state of the method that belongs to one client; read when it is first asked for, written where it is
            not empty. Ask for clients of the cohort alone, so that a round costs the same with any number of clients.
        graph: The units of the model.
        state: The shared global state at the start of the round.
        costs: FLOPs of the model.
        parameters: State-dict keys of the shared entries that train; the others are buffers.
        capability_of: The whole of a ratio: FLOPs or units.
        trained: Whether the global state of round 0 was trained before.
        tasks: Client id → its task in this round; complete in `aggregate`.
        failed: Client id → ratio, of the clients whose own code raised an exception in this round; complete in `aggregate`.
    """

    round: int
    rounds: int
    roster: Mapping[int, ClientInfo]
    cohort_size: int
    rngs: Mapping[str, np.random.Generator] = field(repr=False)
    memory: Memory
    client: dict[int, Memory] = field(default_factory=lambda: defaultdict(dict), repr=False)
    graph: UnitGraph
    state: StateDict
    costs: CostModel
    parameters: frozenset[str]
    capability_of: CapabilityOf = "flops"
    trained: bool = False
    tasks: dict[int, Task] = field(default_factory=dict)
    failed: dict[int, float] = field(default_factory=dict)

    def width(self, ratio: float) -> float:
        """Return the share of the units of each group that a ratio of this run allows."""
        return ratio if self.capability_of == "units" else width_of(self.costs, ratio)


def drawn(ids: Sequence[int], count: int, rng: np.random.Generator, p: np.ndarray[Any, Any] | None = None) -> list[int]:
    return [ids[int(place)] for place in rng.choice(len(ids), size=count, replace=False, p=p)]


def offered(server: ServerContext, client_id: int, ratio: float) -> float:
    """Return a ratio for a client, at most half of the ratio that it last failed with; twice as much after each success."""
    return min(ratio, float(server.client[client_id].get("limit", 1.0)))


def learn_limits(server: ServerContext, updates: Sequence[Update]) -> None:
    """Offer less to the clients whose own code failed in this round, and more again to those that did not fail this time.

    A lost message changes nothing.
    """
    for client_id, ratio in server.failed.items():
        server.client[client_id]["limit"] = max(_LEAST_OFFER, ratio / 2)
    for update in updates:
        memory = server.client[update.client_id]
        limit = 2 * memory.pop("limit", 1.0)
        if limit < 1.0:
            memory["limit"] = limit


Weights = Literal["examples", "uniform"]
"""How much a client counts: by its number of training examples, or equally."""

Over = Literal["all", "holders"]
"""The clients that an entry's mean is over; see `mean`."""


def mean(
    server: ServerContext, updates: Sequence[Update], *, weights: Weights | Sequence[float] = "examples", over: Over = "all"
) -> dict[str, Tensor]:
    """Return the global state, moved by the weighted mean of the clients' changes.

    Args:
        server: The server's context.
        updates: The valid updates of the round.
        weights: By the number of examples, or equal, or a number for each update.
        over: "all": all clients; an entry that a client did not train counts as unchanged there. "holders": the clients that
            trained the entry; what nobody trained stays.

    Source: McMahan et al., AISTATS 2017; masked, over all: Xue et al., ICDE 2025 (arXiv 2412.07216), equation 13, and FedMP's
        R2SP (Jiang et al., ICDE 2022); over the holders: Diao, Ding, Tarokh, HeteroFL, ICLR 2021.
    """
    return moved(server.state, mean_change(server.graph, server.state, updates, weights=weights, over=over))


def mean_change(
    graph: UnitGraph,
    state: StateDict,
    updates: Sequence[Update],
    *,
    weights: Weights | Sequence[float] = "examples",
    over: Over = "all",
) -> dict[str, Tensor]:
    """Return the weighted mean of the changes, as for `mean`: state-dict key → float64, dense, zero where nobody trained."""
    if isinstance(weights, str):
        weights = [float(update.examples) if weights == "examples" else 1.0 for update in updates]
    # Divided by the first one, so that equal weights are exactly 1.
    unit = next((weight for weight in weights if weight), 1.0)
    weights = [weight / unit for weight in weights]
    total = reduce(operator.add, weights, 0.0)
    if total == 0:
        return {}
    parts = [(update.delta, Kept(graph, update.mask)) for update in updates]
    sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
    for (deltas, kept), weight in zip(parts, weights, strict=True):
        for name, delta in deltas.items():
            # The product of a 24-bit mantissa and a small number is exact in float64; only the sum rounds.
            kept.add(name, delta.to(torch.float64, copy=True).mul_(weight), sums[name])
    if over == "all":
        return {name: change / total for name, change in sums.items()}
    changes = {}
    for name, change in sums.items():
        part, holders = torch.zeros_like(change), list(zip(parts, weights, strict=True))
        for (_, kept), weight in holders:
            if not kept.is_whole(name):
                kept.add(name, weight, part)
        held = part + reduce(operator.add, (weight for (_, kept), weight in holders if kept.is_whole(name)), 0.0)
        changes[name] = torch.where(held > 0, change / held.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return changes


def moved(state: StateDict, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` plus changes, float64, in its own types; integers are rounded to the nearest, halves to even."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name not in changes:
            result[name] = tensor.clone()
            continue
        value = tensor.to(torch.float64) + changes[name]
        result[name] = (value if tensor.is_floating_point() else value.round()).to(tensor.dtype)
    return result
