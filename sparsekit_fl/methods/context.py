"""ServerContext: what a method sees on the server, and where it keeps its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit.measure import CostModel
from sparsekit_fl.client.context import Memory
from sparsekit_fl.config import RunConfig
from sparsekit_fl.problem.data import Capability, Client
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.streams import Streams


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
                rng = Streams(config.seed).capability(self._round if config.capability == "dynamic" else 0, client_id)
                capability = capability.at(config.capability_levels[int(rng.integers(len(config.capability_levels)))])
            self._read[client_id] = ClientInfo(len(client.data.train), capability)
        return self._read[client_id]

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._clients

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


@dataclass(frozen=True, eq=False, kw_only=True)
class ServerContext:
    """What a method sees on the server.

    Args:
        round: The round, counted from 1.
        rounds: Number of rounds of the run.
        roster: Client id → examples and capability of this round.
        cohort_size: Number of clients to sample, C.
        rngs: Purpose, such as "sampling", "ratio" and "mask" → its generator in this round; they draw independently.
        memory: State of the method, which lives from round to round.
        graph: The units of the model.
        state: The shared global state at the start of the round.
        costs: FLOPs of the model; None in a context that no run made.
        parameters: State-dict keys of the shared entries that train; the others are buffers.
    """

    round: int
    rounds: int
    roster: Mapping[int, ClientInfo]
    cohort_size: int
    rngs: Mapping[str, np.random.Generator] = field(repr=False)
    memory: Memory
    graph: UnitGraph
    state: StateDict
    costs: CostModel | None = None
    parameters: frozenset[str] = frozenset()


def require_accuracy(problem: Problem, who: str) -> None:
    """Raise InvalidValueError unless the problem has the metric "accuracy"; `who` says who needs it, and for what."""
    if "accuracy" not in problem.metrics:
        raise InvalidValueError(
            f"{who}, and the problem has the metrics {sorted(problem.metrics)};"
            " give it one named 'accuracy', in [0, 1] and larger is better (for regression, the share of predictions within a"
            " tolerance), or choose another method"
        )
