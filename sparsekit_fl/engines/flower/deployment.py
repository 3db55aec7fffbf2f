"""Deployment: the engine over SuperNodes that say themselves which clients they have."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from sparsekit.errors import DataError, SparsekitError
from sparsekit_fl.client import Capability, Client, ClientData
from sparsekit_fl.context import Setup, one_thread
from sparsekit_fl.engines.base import ClientPool
from sparsekit_fl.engines.flower.pool import GridPool
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.results import RunResult
from sparsekit_fl.store import ClientStore

__all__ = ["Deployment", "Nodes"]

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
_QUERY_SECONDS = 120.0
_MOST_CLIENTS = 100_000


class Nodes:
    """Which SuperNode has which clients. Ids of nodes change when a SuperNode starts again, so each new one is asked.

    A client that two nodes claim stays with the one that was there first; the other node is not used, and that is logged.

    Args:
        grid: Flower's.
        wanted: How many SuperNodes to wait for.
        wait_seconds: How long.
    """

    def __init__(self, grid: Grid, *, wanted: int, wait_seconds: float) -> None:
        self.grid = grid
        self._wanted = wanted
        self._wait_seconds = wait_seconds
        self._node: dict[int, int] = {}
        self._asked: set[int] = set()

    def introduce(self) -> dict[int, Client]:
        """Wait for the nodes and ask each for its clients.

        Returns:
            Client id → client, with sizes instead of data.

        Raises:
            WorkerDiedError: too few nodes came, or none of them has a client.
        """
        end = time.monotonic() + self._wait_seconds
        while len(found := set(self.grid.get_node_ids())) < self._wanted:
            if time.monotonic() > end:
                raise WorkerDiedError(
                    f"{len(found)} of {self._wanted} SuperNodes came within {self._wait_seconds:g} seconds; start more,"
                    " or run with a smaller `nodes`"
                )
            time.sleep(_POLL_SECONDS)
        clients = self._ask(found)
        if not clients:
            raise WorkerDiedError("no SuperNode answered with a client; see the warnings above")
        return clients

    def refresh(self) -> None:
        """Look who is there now, and ask those who are new."""
        here = set(self.grid.get_node_ids())
        gone = {client_id for client_id, node in self._node.items() if node not in here}
        for client_id in gone:
            del self._node[client_id]
        self._asked &= here
        self._ask(here - self._asked)

    def node_of(self, client_id: int) -> int:
        """The node that has this client.

        Raises:
            ClientError: none has it now.
        """
        if client_id not in self._node:
            raise ClientError(f"no SuperNode has client {client_id} now")
        return self._node[client_id]

    def restart(self, reason: str) -> None:
        """SuperNodes are not ours to start.

        Raises:
            WorkerDiedError: always.
        """
        raise WorkerDiedError(reason)

    def __len__(self) -> int:
        return len(set(self._node.values()))

    def _ask(self, nodes: Iterable[int]) -> dict[int, Client]:
        asked = sorted(nodes)
        if not asked:
            return {}
        messages = [Message(content({"task": "introduce"}), node, "query", ttl=_QUERY_SECONDS) for node in asked]
        open_ids = {id: node for id, node in zip(self.grid.push_messages(messages), asked, strict=True) if id}
        answers: dict[int, Message] = {}
        end = time.monotonic() + _QUERY_SECONDS
        while open_ids and time.monotonic() < end:
            for message in self.grid.pull_messages(list(open_ids)):
                node = open_ids.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    answers[node] = message
            if open_ids:
                time.sleep(0.1)
        clients: dict[int, Client] = {}
        for node in asked:
            if node not in answers:
                _log.warning("SuperNode %d did not say which clients it has within %g seconds", node, _QUERY_SECONDS)
                continue
            self._asked.add(node)
            try:
                found = _clients(answers[node])
            except SparsekitError as error:
                _log.warning("SuperNode %d is not used: %s", node, error)
                continue
            claimed = sorted(id for id in found if id in self._node)
            if claimed:
                _log.warning("SuperNode %d is not used: it claims the clients %s, which another node has", node, claimed)
                continue
            self._node.update(dict.fromkeys(found, node))
            clients.update(found)
        return clients


def _clients(message: Message) -> dict[int, Client]:
    if message.has_error():
        raise DataError(f"{message.error.reason} (Flower's error {message.error.code})")
    header, _ = read(message, max_bytes=0)
    listed = header.get("clients")
    if not isinstance(listed, list) or not 0 < len(listed) <= _MOST_CLIENTS:
        raise DataError("it names no clients")
    clients = {}
    for about in listed:
        try:
            client = _client(about)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"it describes a client badly: {error!r}") from error
        clients[client.id] = client
    if len(clients) != len(listed):
        raise DataError("it names a client twice")
    return clients


def _client(about: Mapping[str, Any]) -> Client:
    train, val, test = about["sizes"]
    if any(isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**40 for size in (train, val, test)):
        raise ValueError(f"sizes {about['sizes']}")
    data = ClientData(train=range(train), val=range(val), test=range(test))
    return Client(id=about["id"], data=data, capability=Capability(*(float(value) for value in about["capability"])))


class Deployment:
    """Clients on SuperNodes.

    Args:
        nodes: That have introduced their clients.
        memory: Who keeps the clients' memories; see `GridPool`.
        timeout_seconds: Replies that take longer are given up; None waits.
    """

    def __init__(
        self, nodes: Nodes, *, memory: Literal["nodes", "server"] = "nodes", timeout_seconds: float | None = None
    ) -> None:
        self._nodes = nodes
        self._memory: Literal["nodes", "server"] = memory
        self._timeout = timeout_seconds

    def run(
        self,
        rounds: Callable[[ClientPool], RunResult],
        *,
        setup: Setup,
        clients: Mapping[int, Client],
        store: ClientStore,
    ) -> RunResult:
        """Run the loop; called by Flower's server app."""
        del clients
        before = one_thread()
        try:
            return rounds(
                GridPool(
                    self._nodes,
                    setup,
                    store,
                    memory=self._memory,
                    workers=len(self._nodes),
                    timeout_seconds=self._timeout,
                    # A personal model stays on the device.
                    export=False,
                    grouped=True,
                )
            )
        finally:
            torch.set_num_threads(before)
