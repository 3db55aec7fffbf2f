"""GridEngine: an engine whose clients are on the nodes of a Flower grid, in Flower's simulation or on devices."""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from sparsekit.errors import DataError, SparsekitError
from sparsekit.version import __version__
from sparsekit_fl.checkpoint import Memories, write_atomically
from sparsekit_fl.client.messages import MAX_TEXT, Reply, Request, decode_reply, encode_request
from sparsekit_fl.client.packing import pack, unpack
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.flower.wire import content, read
from sparsekit_fl.problem.data import Capability, Client, ClientData
from sparsekit_fl.processes import one_thread
from sparsekit_fl.spec import RunSpec, short_digest

_log = logging.getLogger(__name__)

_POLL_SECONDS, _LOOK_SECONDS, _QUERY_SECONDS = 0.02, 0.5, 120.0
_TTL_SECONDS = 12 * 3600.0  # of messages without a timeout
_EXPIRED = (3, 4)  # Flower's codes for a message, or a reply, that is no longer there
_MAX_CLIENTS, _MAX_NAMED = 1_000_000, 20


class GridEngine:
    """Runs clients on the nodes of a Flower grid; for `run(engine=GridEngine(grid))` in the main function of a ServerApp.

    The results have the same bits as those of `Processes`. A client that does not answer, or whose answer cannot be used, is
    dropped from the round. All clients of a node are asked in one message, since Flower starts a process for each.

    Args:
        grid: Flower's grid.
        nodes: Number of nodes to wait for.
        wait_seconds: How long to wait for nodes: at the start, and before each round for clients that too many of it lack.
        timeout_seconds: Replies that take longer are given up; None waits for twelve hours.
        simulated: Number of processes of Flower's simulation; 0: the nodes are devices. Each node of a simulation has all
            clients and writes their memories into the folder of the run, and a process that fails ends the run. Devices say
            which clients they have, keep their memories and personal models, and cannot stop a run.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        nodes: int = 1,
        wait_seconds: float = 300.0,
        timeout_seconds: float | None = None,
        simulated: int = 0,
    ) -> None:
        self._grid, self._nodes, self._wait_seconds, self._simulated = grid, nodes, wait_seconds, simulated
        self._ttl = timeout_seconds or _TTL_SECONDS
        self._identity = ""
        self._clients: dict[int, dict[int, Client]] = {}  # node → its clients; none if its answer could not be used
        self._node_of: dict[int, int] = {}  # client → node
        self._asked: dict[str, int] = {}  # id of a message → node that was asked for its clients and has not answered
        self._notes: list[str] = []
        self._begun = False  # whether the devices of the start were found

    @property
    def workers(self) -> int:
        """Number of clients that train at once."""
        return self._simulated or max(1, len(set(self._node_of.values())))

    @property
    def keeps_models(self) -> bool:
        """Whether personal models stay on the nodes."""
        return not self._simulated

    def introduce(self, spec: RunSpec) -> dict[int, Client]:
        """Wait for the devices, and ask each which clients it has.

        Args:
            spec: The fixed parts of the run, which devices must share; see `identity_of`.

        Returns:
            Client id → client, with numbers of examples in place of data.

        Raises:
            WorkerDiedError: too few nodes came, or none of them has a client; says why.
        """
        self._await_nodes()
        self._identity = identity_of(spec)
        self._look()
        if not self._node_of:
            raise WorkerDiedError("; ".join(["no SuperNode can be used", *self._notes]))
        self._begun = True
        return {id: self._clients[node][id] for id, node in sorted(self._node_of.items())}

    def _await_nodes(self) -> list[int]:
        end = time.monotonic() + self._wait_seconds
        while len(found := sorted(self._grid.get_node_ids())) < self._nodes:  # nodes are registered after the server begins
            if time.monotonic() > end:
                raise WorkerDiedError(
                    f"{len(found)} of {self._nodes} SuperNodes came within {self._wait_seconds:g} seconds; start more,"
                    " or run with a smaller `nodes`"
                )
            time.sleep(min(_LOOK_SECONDS, self._wait_seconds))
        return found

    @contextmanager
    def open(
        self, spec: RunSpec, clients: Mapping[int, Client], memories: Memories
    ) -> Iterator[Callable[[Sequence[Request]], Iterator[Reply]]]:
        """Run clients on nodes; of devices, those that `introduce` found."""
        del clients
        if self._simulated:
            self._await_nodes()
        run = str(memories.folder.resolve()) if self._simulated else run_id(memories)
        with one_thread():
            yield lambda requests: self._run(spec, memories, run, requests)

    def _run(self, spec: RunSpec, memories: Memories, run: str, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send the requests; yield the replies in their order."""
        if not requests:
            return
        train, state = requests[0].task == "train", requests[0].state
        self._look([request.client_id for request in requests], spec.config.needed_replies(len(requests)) if train else 0)
        shared = b"" if train else pack(dict(state), {"kind": "state"})
        nodes = sorted(self._grid.get_node_ids()) if self._simulated else []
        asked: dict[int, list[int]] = {}  # node → positions of its requests
        replies: dict[int, Reply] = {}
        for place, request in enumerate(requests):
            node = nodes[place % len(nodes)] if nodes else self._node_of.get(request.client_id)
            if node is None:
                replies[place] = _dropped(request, f"no SuperNode has client {request.client_id} now")
            else:
                asked.setdefault(node, []).append(place)
        messages = []
        for node, places in asked.items():
            parts = [encode_request(requests[place], spec.graph, with_state=train) for place in places]
            kind, group = "train" if train else "evaluate", str(requests[0].round)
            messages.append(Message(content(shared, *parts, run=run), node, kind, ttl=self._ttl, group_id=group))
        answers = self._exchange(messages)
        groups = list(asked.values())
        for place in range(len(requests)):
            while place not in replies:
                position, answer = next(answers)
                own = [requests[one] for one in groups[position]]
                replies |= dict(zip(groups[position], self._read(answer, own, spec, memories), strict=True))
            note = "; ".join([*self._notes, *filter(None, [replies[place].note])])
            self._notes.clear()
            yield replace(replies.pop(place), note=note)

    def _read(self, answer: Message | str, requests: Sequence[Request], spec: RunSpec, memories: Memories) -> list[Reply]:
        """Return the replies in an answer to some requests; whatever is wrong with it drops its clients, and no other."""
        if self._simulated and isinstance(answer, Message) and answer.has_error():
            # Flower would put the process back to work, where it fails at once, each time.
            raise WorkerDiedError(f"a process that trains clients failed: {str(answer.error.reason).strip()[-MAX_TEXT:]}")
        try:
            parts = read(answer, len(requests))
        except DataError as error:
            return [_dropped(request, str(error)) for request in requests]
        replies = []
        for request, payload in zip(requests, parts, strict=True):
            try:
                replies.append(decode_reply(payload, request, spec.graph))
            except DataError as error:
                replies.append(_dropped(request, f"its answer cannot be used: {error}"))
            if self._simulated and replies[-1].stored and not memories.path(request.client_id, request.round).exists():
                raise DataError(
                    f"the memory of client {request.client_id} was written on another disk; on a cluster, --out must be a"
                    " folder that all machines share"
                )
        return replies

    def _exchange(self, messages: Sequence[Message]) -> Iterator[tuple[int, Message | str]]:
        """Send messages; yield the position of each with its reply, once, or with the reason why there is none."""
        ids = list(self._grid.push_messages(messages))
        waiting = {id: position for position, id in enumerate(ids) if id}
        yield from ((position, "its node is gone") for position, id in enumerate(ids) if not id)
        late, end = f"no reply within {self._ttl:g} seconds", time.monotonic() + self._ttl
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages(list(waiting)):
                position = waiting.pop(reply.metadata.reply_to_message_id, None)
                if position is not None:
                    yield position, late if reply.has_error() and reply.error.code in _EXPIRED else reply
            time.sleep(_POLL_SECONDS if waiting else 0.0)
        yield from ((position, late) for position in waiting.values())

    def _look(self, ids: Collection[int] = (), needed: int = 0) -> None:
        """Look which devices are there, and wait until enough of some clients are, or for as long as one waits for nodes."""
        if self._simulated:
            return
        end = time.monotonic() + self._wait_seconds
        self._find_clients()
        while sum(id in self._node_of for id in ids) < needed and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            self._find_clients()

    def _find_clients(self) -> None:
        """Forget devices that are gone, and ask new ones for their clients; a silent one is waited for once."""
        here = set(self._grid.get_node_ids())
        for node in self._clients.keys() - here:
            del self._clients[node]
            lost = [id for id, other in self._node_of.items() if other == node]
            self._node_of = {id: other for id, other in self._node_of.items() if other != node}
            if lost:
                self._note(f"SuperNode {node} is gone, with the clients {_named(lost)}")
        new = sorted(here - self._clients.keys() - set(self._asked.values()))
        queries = [Message(content(), node, "query", ttl=_TTL_SECONDS) for node in new]
        self._asked |= {id: node for id, node in zip(self._grid.push_messages(queries), new, strict=True) if id}
        end = time.monotonic() + max(_QUERY_SECONDS, self._wait_seconds)
        heard: dict[int, Message] = {}
        while self._asked:
            for reply in self._grid.pull_messages(list(self._asked)):
                if (node := self._asked.pop(reply.metadata.reply_to_message_id, -1)) != -1:
                    heard[node] = reply
            silent = set(new) & set(self._asked.values())
            if not silent or time.monotonic() >= end:
                for node in sorted(silent):
                    self._note(f"SuperNode {node} has not said which clients it has")
                break
            time.sleep(_POLL_SECONDS)
        for node, reply in sorted(heard.items()):  # which of two nodes has a client does not depend on the network
            self._hear(node, reply)

    def _hear(self, node: int, reply: Message) -> None:
        """Read which clients a device has. A client that another one has is its own now, as after a restart."""
        self._clients[node] = {}
        try:
            clients = read_clients(reply, self._identity)
        except SparsekitError as error:
            self._note(f"SuperNode {node} is not used: {error}")
            return
        taken = [id for id in clients if id in self._node_of]
        self._clients[node] = clients
        self._node_of |= dict.fromkeys(clients, node)
        if taken:
            self._note(f"SuperNode {node} has taken over the clients {_named(taken)} from another")
        elif self._begun:  # as after a restart: the record of the round says so
            self._note(f"SuperNode {node} came, with the clients {_named(clients)}")
        else:
            _log.info("SuperNode %d came, with the clients %s", node, _named(clients))

    def _note(self, text: str) -> None:
        _log.warning(text)
        self._notes.append(text)


def _dropped(request: Request, reason: str) -> Reply:
    who = f"client {request.client_id} in round {request.round}: " if request.task == "train" else ""
    return Reply(client_id=request.client_id, round=request.round, error=f"{who}{reason}"[:MAX_TEXT])


def _named(ids: Iterable[int]) -> str:
    """Return clients as a list; of many, the first."""
    found = sorted(ids)
    if len(found) <= _MAX_NAMED:
        return str(found)
    return f"[{', '.join(map(str, found[:_MAX_NAMED]))}, …], {len(found):,} in all"


def run_id(memories: Memories) -> str:
    """Return the id of a run, the same for the run that resumes or extends it, so that devices find their memories."""
    path = memories.folder / "run-id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode(), durable=memories.durable)
    return path.read_text()


def identity_of(spec: RunSpec) -> str:
    """Return what server and devices must share: the version, and a digest of units, shapes and frozen values."""
    return f"sparsekit {__version__}, model {short_digest(spec.fingerprint())}"


def describe_clients(clients: Iterable[Client], identity: str) -> bytes:
    """Return as bytes which clients a device has: ids, numbers of examples to train, validate and test with, capabilities."""
    found = list(clients)
    sizes = [[one.id, len(one.data.train), len(one.data.val), len(one.data.test)] for one in found]
    can = [one.capability for one in found]
    rates = [[one.ratio, one.flops_per_second, one.uplink_bytes_per_second, one.downlink_bytes_per_second] for one in can]
    tensors = {"sizes": torch.tensor(sizes, dtype=torch.int64), "rates": torch.tensor(rates, dtype=torch.float64)}
    return pack(tensors, {"identity": identity})


def read_clients(answer: Message, identity: str) -> dict[int, Client]:
    """Undo `describe_clients`, for the answer of any device.

    Returns:
        Client id → client, with numbers of examples in place of data; at least one.

    Raises:
        DataError: it names no clients, one twice or more than a million, or has other code or another model; says what to do.
    """
    (payload,) = read(answer, 1)
    tensors, meta = unpack(payload)
    theirs = str(meta.get("identity"))[:100]
    if theirs != identity:
        raise DataError(
            f"it has {theirs}, and the server has {identity}; install the same versions of sparsekit and torch on both, and use"
            " the same model, with the same frozen weights, and the same data set"
        )
    sizes, rates = (tensors.get(name, torch.empty(0)) for name in ("sizes", "rates"))
    count = len(sizes)
    alike = (sizes.dtype, rates.dtype, tuple(sizes.shape), tuple(rates.shape)) == (
        torch.int64, torch.float64, (count, 4), (count, 4),
    )  # fmt: skip
    if not alike or not 0 < count <= _MAX_CLIENTS:
        raise DataError("it describes its clients badly")
    try:
        clients = {
            id: Client(id=id, data=ClientData(range(train), range(val), range(test)), capability=Capability(*can))
            for (id, train, val, test), can in zip(sizes.tolist(), rates.tolist(), strict=True)
        }
    except ValueError as error:
        raise DataError(f"it describes a client badly: {error}") from error
    if len(clients) != count or int(sizes.min()) < 0 or int(sizes[:, 1:].max()) >= 2**40 or int(sizes[:, [1, 3]].min()) < 1:
        raise DataError("it names a client twice, or a number of examples that is not allowed")
    return clients
