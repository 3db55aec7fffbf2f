"""Deployment: the engine over SuperNodes, each of which tells which clients it has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from flwr.app import Message
from flwr.serverapp import Grid

from sparsekit.errors import SparsekitError
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.engines.base import ClientPool
from sparsekit_fl.engines.flower.introduction import check_code, read_clients
from sparsekit_fl.engines.flower.pool import GridPool
from sparsekit_fl.engines.flower.post import POLL_SECONDS, Carrier, Post
from sparsekit_fl.engines.flower.wire import content
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.processes import one_thread
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.state.store import ClientStore

__all__ = ["Deployment", "Nodes"]

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
_QUERY_SECONDS = 120.0
# Of a log line or a note; a node may have ten thousand clients.
_MOST_NAMED = 20
# A node that gave no answer is asked again after this time, where nobody waits for its answer.
_AGAIN_SECONDS = 60.0


class Nodes(Carrier):
    """Finds the SuperNode of each client. Ids of nodes change when a SuperNode starts again, so each new one is asked.

    A client that two nodes claim stays with the one that came first. The other node waits, and takes the first one's place
    when that is gone. So does a SuperNode that was killed and is back before Flower notices that it was away, which takes up
    to a minute. All this is logged, and stands in the record of the round.

    Args:
        grid: Flower's grid.
        wanted: Number of SuperNodes to wait for.
        wait_seconds: Seconds to wait.
        identity: What a node must have in common with the server, from `introduction.introduced_by`; a node of other code, or
            with another model, is not used. None takes any.
    """

    def __init__(self, grid: Grid, *, wanted: int, wait_seconds: float, identity: Mapping[str, str] | None = None) -> None:
        self.grid = grid
        self._identity = identity
        self._wanted = wanted
        self._wait_seconds = wait_seconds
        # In order of arrival: the clients that each node claims; none where it gave no usable answer.
        self._said: dict[int, dict[int, Client]] = {}
        self._used: dict[int, int] = {}
        self._news: list[str] = []
        # Starting a process may take a small device minutes.
        self._query_seconds = max(_QUERY_SECONDS, wait_seconds)
        self._asked: Post[int] = Post(grid, ttl=self._query_seconds)
        self._silent: dict[int, float] = {}  # node → when it may be asked again

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
        self._ask(found)
        self._settle(self._hear(wait=True))
        if not self._used:
            raise WorkerDiedError("; ".join(["no SuperNode can be used", *self.news()]))
        return {client_id: self._said[node][client_id] for client_id, node in self._used.items()}

    def refresh(self) -> None:
        """Look which nodes are there now, and ask the new ones."""
        here = self._here()
        self._ask(here - set(self._said))
        self._welcome(wait=True)

    def look(self) -> bool:
        """Look which nodes are there now, and ask the new ones; what they say is heard at a later look."""
        here, now = self._here(), time.monotonic()
        self._ask({node for node in here - set(self._said) if self._silent.get(node, 0.0) <= now})
        return self._welcome(wait=False)

    def _here(self) -> set[int]:
        """Return the nodes that are there, and forget the others."""
        here = set(self.grid.get_node_ids())
        for node in [node for node in self._said if node not in here]:
            lost = [client_id for client_id, used in self._used.items() if used == node]
            del self._said[node]
            if lost:
                self._tell(f"SuperNode {node} is gone, with the clients {_named(lost)}")
        self._used = {client_id: node for client_id, node in self._used.items() if node in here}
        return here

    def _welcome(self, *, wait: bool) -> bool:
        """Use nodes that answered; return whether there is one that was not used before."""
        came = self._settle(self._hear(wait=wait))
        for node, clients in came.items():
            self._tell(f"SuperNode {node} came, with the clients {_named(clients)}")
        return bool(came)

    def news(self) -> list[str]:
        """Return what became of nodes since the last call."""
        told, self._news = self._news, []
        return told

    def node_of(self, client_id: int) -> int:
        """Return the node that has this client.

        Raises:
            ClientError: none has it now.
        """
        if client_id not in self._used:
            raise ClientError(f"no SuperNode has client {client_id} now")
        return self._used[client_id]

    def __len__(self) -> int:
        return len(set(self._used.values()))

    def _tell(self, text: str) -> None:
        _log.warning(text)
        self._news.append(text)

    def _settle(self, new: Iterable[int]) -> dict[int, dict[int, Client]]:
        """Use every node whose clients are all free.

        Args:
            new: Nodes that answered just now.

        Returns:
            Those that were not used before, with their clients.
        """
        taken: dict[int, dict[int, Client]] = {}
        used = set(self._used.values())
        for node, clients in self._said.items():
            if node not in used and clients and not any(client_id in self._used for client_id in clients):
                self._used.update(dict.fromkeys(clients, node))
                taken[node] = clients
        for node in new:
            claimed = [client_id for client_id in self._said[node] if self._used.get(client_id, node) != node]
            if claimed:
                self._tell(
                    f"SuperNode {node} is not used for now: it claims the clients {_named(claimed)}, which another node has"
                )
        return taken

    def _ask(self, nodes: Iterable[int]) -> None:
        """Ask nodes for their clients, unless a question is open."""
        fresh = sorted(set(nodes) - set(self._asked.keys()))
        ttl = self._query_seconds
        questions = {node: Message(content({"task": "introduce"}), node, "query", ttl=ttl) for node in fresh}
        for node in self._asked.send(questions):
            self._unanswered(node, "its node is gone")

    def _unanswered(self, node: int, reason: str) -> None:
        # It is asked again before the next round.
        self._silent[node] = time.monotonic() + _AGAIN_SECONDS
        self._tell(f"SuperNode {node} did not say which clients it has: {reason}")

    def _hear(self, *, wait: bool) -> list[int]:
        """Read the answers of nodes; returns those that answered."""
        replies = dict(self._asked.poll())
        while wait and len(self._asked):
            time.sleep(POLL_SECONDS)
            replies |= self._asked.poll()
        answered = []
        # By their ids, so that which of two nodes was first does not depend on the network.
        for node, reply in sorted(replies.items()):
            if isinstance(reply, str):
                self._unanswered(node, reply)
                continue
            answered.append(node)
            self._said[node] = {}
            try:
                clients = read_clients(reply)
                if self._identity is not None:
                    check_code(reply, self._identity)
                self._said[node] = clients
            except SparsekitError as error:
                self._tell(f"SuperNode {node} is not used: {error}")
        return answered


def _named(ids: Iterable[int]) -> str:
    """The clients as a list; of many, the first."""
    found = sorted(ids)
    if len(found) <= _MOST_NAMED:
        return str(found)
    return f"[{', '.join(map(str, found[:_MOST_NAMED]))}, …], {len(found):,} in all"


@dataclass(frozen=True)
class Deployment:
    """Clients on SuperNodes.

    By the wall clock (`async_clock="wall"`) each node has one task at a time, and gets the next as soon as it has answered.

    Args:
        nodes: The nodes, which have introduced their clients.
        memory: Who keeps the clients' memories; see `GridPool`.
        timeout_seconds: Replies that take longer are given up; None waits.
    """

    nodes: Nodes
    _: KW_ONLY
    memory: Literal["nodes", "server"] = "nodes"
    timeout_seconds: float | None = None

    def run(
        self,
        rounds: Callable[[ClientPool], RunResult],
        *,
        spec: RunSpec,
        clients: Mapping[int, Client],  # noqa: ARG002 - the nodes have them
        store: ClientStore,
    ) -> RunResult:
        """Run the loop; called by Flower's server app."""
        pool = GridPool(
            self.nodes,
            spec,
            store,
            memory=self.memory,
            workers=len(self.nodes),
            timeout_seconds=self.timeout_seconds,
            # A personal model stays on the device.
            export=False,
            grouped=True,
            trusted=False,
        )
        with one_thread():
            return rounds(pool)
