"""Nodes: the engine over SuperNodes, each of which tells which clients it has."""

import json
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

from flwr.app import Message
from flwr.serverapp import Grid
from pydantic import Field, TypeAdapter, ValidationError

from sparsekit.errors import DataError, SparsekitError
from sparsekit.version import __version__
from sparsekit_fl.checkpoint import Memories, write_atomically
from sparsekit_fl.engines.flower.pool import GridPool
from sparsekit_fl.engines.flower.post import POLL_SECONDS, Carrier, Post
from sparsekit_fl.engines.flower.wire import content, read
from sparsekit_fl.errors import ClientError, WorkerDiedError
from sparsekit_fl.problem.clients import Capability, Client, ClientData
from sparsekit_fl.processes import one_thread
from sparsekit_fl.spec import RunSpec, short_digest

_LETTERS = 16
_SAME = {
    "sparsekit": "it has sparsekit {}, the server {}; install the same version",
    "graph": "its model has other units or frozen weights (digest {}) than the server's ({}); use the same model, data set and"
    " torch version",
}
_MOST_CLIENTS = 1_000_000
_MOST_BYTES = 200 * _MOST_CLIENTS

_Id = Annotated[int, Field(ge=0, lt=2**63)]
_Size = Annotated[int, Field(ge=1, lt=2**40)]
_Row = tuple[_Id, _Size, Annotated[int, Field(ge=0, lt=2**40)], _Size, float, float, float, float]
_CLIENTS = TypeAdapter(Annotated[list[_Row], Field(min_length=1, max_length=_MOST_CLIENTS)])
"""Of each client its id, its numbers of examples to train, validate and test with, and its capability."""


def introduced_by(spec: RunSpec) -> dict[str, str]:
    """Return what must be the same on the server and on its nodes: the version, and a digest of units and frozen values."""
    return {"sparsekit": __version__, "graph": short_digest(spec.fingerprint())}


def described(clients: Iterable[Client]) -> dict[str, bytes]:
    """Payloads that say which clients a node has."""
    rows = []
    for client in clients:
        data, can = client.data, client.capability
        rates = [can.ratio, can.flops_per_second, can.uplink_bytes_per_second, can.downlink_bytes_per_second]
        rows.append([client.id, len(data.train), len(data.val), len(data.test), *rates])
    return {"clients": json.dumps(rows).encode()}


def read_clients(message: Message, ours: Mapping[str, str]) -> dict[int, Client]:
    """The inverse of `described`.

    Args:
        message: A node's answer, whatever it is.
        ours: From `introduced_by`, what the node must have in common with the server.

    Returns:
        Client id → client, with sizes instead of data; at least one.

    Raises:
        DataError: it does not say which clients there are, names more than a million, or runs other code or another model;
            with what to do.
    """
    if message.has_error():
        raise DataError(f"{message.error.reason} (Flower's error {message.error.code})")
    header, payloads = read(message, max_bytes=_MOST_BYTES)
    try:
        rows = _CLIENTS.validate_json(payloads.get("clients", b""), strict=True)
        clients = {
            id: Client(id=id, data=ClientData(range(train), range(val), range(test)), capability=Capability(*rates))
            for id, train, val, test, *rates in rows
        }
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise DataError(f"it describes its clients badly: {first['msg']}, in {first['loc']}") from None
    except ValueError as error:
        raise DataError(f"it describes a client badly: {error}") from error
    if len(clients) != len(rows):
        raise DataError("it names a client twice")
    theirs = header.get("identity")
    for name, wanted in ours.items():
        told = str(theirs.get(name) if isinstance(theirs, dict) else None)[:_LETTERS]
        if told != wanted:
            raise DataError(f"{_SAME[name].format(told, wanted)} on both")
    return clients


_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_QUERY_SECONDS = 120.0
# Of a log line or a note; a node may have ten thousand clients.
_MOST_NAMED = 20
# A node that gave no answer is asked again after this time, where nobody waits for its answer.
_AGAIN_SECONDS = 60.0


class Nodes(Carrier):
    """Clients on SuperNodes. Ids of nodes change when a SuperNode starts again, so each new one is asked for its clients.

    A client that two nodes claim stays with the one that came first. The other node waits, and takes the first one's place
    when that is gone. So does a SuperNode that was killed and is back before Flower notices that it was away, which takes up
    to a minute. A node that does not say which clients it has is waited for once; afterwards it is asked now and then, and
    nobody waits. All this is logged, and stands in the record of the round.

    Devices keep the personal models of their clients.

    Args:
        grid: Flower's grid.
        wanted: Number of SuperNodes to wait for.
        wait_seconds: Seconds to wait, for them and for clients that too many of a round lack.
        identity: What a node must have in common with the server, from `introduced_by`; a node of other code, or with another
            model, is not used.
        allowed: Name under which a SuperNode's key was registered → the clients that it may have. Other nodes, and nodes
            that claim more, are not used. None believes what nodes say.
        memory: "nodes" where they keep the memories of their clients; "server" where the server does, and sends them along.
        timeout_seconds: Replies that take longer are given up; None waits for twelve hours.
    """

    keeps_models = True

    def __init__(
        self,
        grid: Grid,
        *,
        wanted: int,
        wait_seconds: float,
        identity: Mapping[str, str],
        allowed: Mapping[str, Collection[int]] | None = None,
        memory: Literal["nodes", "server"] = "nodes",
        timeout_seconds: float | None = None,
    ) -> None:
        self.grid = grid
        self._memory, self._timeout_seconds = memory, timeout_seconds
        self._identity, self._allowed = identity, allowed
        self._wanted, self._wait_seconds = wanted, wait_seconds
        # In order of arrival: the clients that each node claims; none where it gave no usable answer.
        self._said: dict[int, dict[int, Client]] = {}
        self._used: dict[int, int] = {}
        self._news: list[str] = []
        self._introduced = False
        # Starting a process may take a small device minutes.
        ttl = max(_QUERY_SECONDS, wait_seconds)
        self._post: Post[int] = Post(
            self, lambda _, node: Message(content({"task": "introduce"}), node, "query", ttl=ttl), lambda node: node, ttl=ttl
        )
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
            time.sleep(_LOOK_SECONDS)
        self.look(wait=True)
        self._introduced = True
        if not self._used:
            raise WorkerDiedError("; ".join(["no SuperNode can be used", *self.news()]))
        return {client_id: self._said[node][client_id] for client_id, node in self._used.items()}

    @property
    def workers(self) -> int:
        """Number of SuperNodes with clients."""
        return len(set(self._used.values()))

    @contextmanager
    def open(self, spec: RunSpec, clients: Mapping[int, Client], memories: Memories) -> Iterator[GridPool]:
        """Run clients on nodes that have introduced their clients; called in Flower's server app."""
        del clients
        with one_thread():
            yield GridPool(
                self,
                spec,
                workers=self.workers,
                carried=memories if self._memory == "server" else None,
                timeout_seconds=self._timeout_seconds,
                run=_run_id(memories),
            )

    def look(self, *, wait: bool = False) -> bool:
        here, now = set(self.grid.get_node_ids()), time.monotonic()
        for node in [node for node in self._said if node not in here]:
            lost = [client_id for client_id, used in self._used.items() if used == node]
            del self._said[node]
            if lost:
                self._tell(f"SuperNode {node} is gone, with the clients {_named(lost)}")
        self._used = {client_id: node for client_id, node in self._used.items() if node in here}
        asked = {*self._said, *self._post.keys}
        self._post.add(sorted(node for node in here - asked if self._silent.get(node, 0.0) <= now))
        replies = dict(self._post.poll())
        while wait and not set(self._post.keys) <= set(self._silent):
            time.sleep(POLL_SECONDS)
            replies |= self._post.poll()
        # By their ids, so that which of two nodes was first does not depend on the network.
        return self._settle([node for node, reply in sorted(replies.items()) if self._hear(node, reply)])

    def await_clients(self, ids: Collection[int], needed: int) -> None:
        end = time.monotonic() + self._wait_seconds
        self.look()
        while sum(client_id in self._used for client_id in ids) < needed and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            self.look()

    def news(self) -> list[str]:
        told, self._news = self._news, []
        return told

    def node_of(self, client_id: int) -> int:
        if client_id not in self._used:
            raise ClientError(f"no SuperNode has client {client_id} now")
        return self._used[client_id]

    def _tell(self, text: str) -> None:
        _log.warning(text)
        self._news.append(text)

    def _hear(self, node: int, reply: Message | str) -> bool:
        """Read the answer of a node; return whether there is one."""
        if isinstance(reply, str):
            self._silent[node] = time.monotonic() + _AGAIN_SECONDS
            self._tell(f"SuperNode {node} did not say which clients it has: {reply}")
            return False
        self._silent.pop(node, None)
        self._said[node] = {}
        try:
            clients = read_clients(reply, self._identity)
            if self._allowed is not None:
                self._check_allowed(node, clients, self._allowed)
            self._said[node] = clients
        except SparsekitError as error:
            self._tell(f"SuperNode {node} is not used: {error}")
        return True

    def _check_allowed(self, node: int, clients: Collection[int], allowed: Mapping[str, Collection[int]]) -> None:
        """Raise DataError where a node claims clients that are not its own."""
        name = next((one.name for one in self.grid.get_nodes() if one.node_id == node), "")
        if name not in allowed:
            raise DataError(f"its key was registered under the name {name!r}, which is not among those that are allowed")
        strange = set(clients) - set(allowed[name])
        if strange:
            raise DataError(f"it claims the clients {_named(strange)}, which {name!r} is not allowed to have")

    def _settle(self, new: Iterable[int]) -> bool:
        """Use every node whose clients are all free; return whether there is one.

        Args:
            new: Nodes that answered just now.
        """
        taken = False
        used = set(self._used.values())
        for node, clients in self._said.items():
            if node not in used and clients and not any(client_id in self._used for client_id in clients):
                self._used.update(dict.fromkeys(clients, node))
                taken = True
                if self._introduced:
                    self._tell(f"SuperNode {node} came, with the clients {_named(clients)}")
        for node in new:
            claimed = [client_id for client_id in self._said[node] if self._used.get(client_id, node) != node]
            if claimed:
                self._tell(
                    f"SuperNode {node} is not used for now: it claims the clients {_named(claimed)}, which another node has"
                )
        return taken


def _named(ids: Iterable[int]) -> str:
    """The clients as a list; of many, the first."""
    found = sorted(ids)
    if len(found) <= _MOST_NAMED:
        return str(found)
    return f"[{', '.join(map(str, found[:_MOST_NAMED]))}, …], {len(found):,} in all"


def _run_id(memories: Memories) -> str:
    """The id of a run, the same for the run that resumes or extends it, so that nodes find the memories of their clients."""
    path = memories.folder / "run-id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode(), durable=memories.durable)
    return path.read_text()
