"""Roster: the clients of a round as the server sees them, one by one or as arrays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sparsekit_fl.client.context import stream
from sparsekit_fl.config import RunConfig
from sparsekit_fl.problem.data import Capability, Client

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class ClientInfo:
    """The server's view of a client: its number of training examples, and its capability in this round."""

    examples: int
    capability: Capability


class Table(NamedTuple):
    """Clients in ascending order of their ids, with their numbers of examples and the FLOPs per second of their devices."""

    ids: Ids
    examples: Ids
    speeds: np.ndarray[Any, np.dtype[np.float64]]


class Roster(Mapping[int, ClientInfo]):
    """Client id → `ClientInfo`. Capabilities are drawn when first accessed, since a round needs only a few.

    `ids` and `table` are computed once. The server keeps a roster for later rounds unless its clients change, or the
    configuration redraws capabilities in every round.
    """

    def __init__(self, clients: Mapping[int, Client], config: RunConfig, round: int) -> None:
        self.clients = clients
        self._config = config
        self._round = round
        self._read: dict[int, ClientInfo] = {}

    @cached_property
    def ids(self) -> Ids:
        return np.sort(np.fromiter(self.clients, np.int64, len(self.clients)))

    @cached_property
    def table(self) -> Table:
        return table_of({id: self[id] for id in self.ids.tolist()})

    def __getitem__(self, client_id: int) -> ClientInfo:
        if client_id not in self._read:
            client, config = self.clients[client_id], self._config
            capability = client.capability
            if config.capability_levels is not None:
                rng = stream(config.seed, "capability", self._round if config.redraw_capability else 0, client_id)
                capability = capability.at(config.capability_levels[int(rng.integers(len(config.capability_levels)))])
            self._read[client_id] = ClientInfo(len(client.data.train), capability)
        return self._read[client_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self.clients

    def __len__(self) -> int:
        return len(self.clients)


def ids_of(roster: Mapping[int, ClientInfo]) -> Ids:
    """Return the ids of a roster in ascending order."""
    return roster.ids if isinstance(roster, Roster) else np.sort(np.fromiter(roster, np.int64, len(roster)))


def table_of(roster: Mapping[int, ClientInfo]) -> Table:
    """Return a roster as arrays."""
    if isinstance(roster, Roster):
        return roster.table
    ids = ids_of(roster)
    clients = [roster[id] for id in ids.tolist()]
    speeds = np.array([one.capability.flops_per_second for one in clients], np.float64)
    return Table(ids, np.array([one.examples for one in clients], np.int64), speeds)
