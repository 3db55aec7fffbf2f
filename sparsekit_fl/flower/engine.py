"""GridEngine: an engine whose clients are on the nodes of a Flower grid, in Flower's simulation or on devices."""

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from itertools import accumulate, pairwise
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from sparsekit.errors import DataError, SparsekitError
from sparsekit.version import __version__
from sparsekit_fl.checkpoint import Memories, write_atomically
from sparsekit_fl.client.messages import MAX_TEXT, Reply, Request, decode_reply, encode_request
from sparsekit_fl.client.packing import pack
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.problem.data import Capability, Client, ClientData
from sparsekit_fl.processes import one_thread
from sparsekit_fl.spec import RunSpec, short_digest

_log = logging.getLogger(__name__)

_POLL_SECONDS, _LOOK_SECONDS, _QUERY_SECONDS = 0.02, 0.5, 120.0
_TYPE = "sparsekit.raw"  # of the array in a message
_TTL_SECONDS = 12 * 3600.0  # of messages without a timeout
_EXPIRED = (3, 4)  # Flower's codes for a message, or a reply, that is no longer there
_MAX_CLIENTS, _MAX_EXAMPLES, _MAX_NAMED = 1_000_000, 2**40, 20


class GridEngine:
    """Runs clients on the nodes of a Flower grid; for `run(engine=GridEngine(grid))` in the main function of a ServerApp.

    The results have the same bits as those of `Processes`. A client that does not answer, or whose answer cannot be used, is
    dropped from the round. All clients of a node are asked in one message, since Flower starts a process for each.

    Args:
        grid: Flower's grid.
        nodes: Number of nodes to wait for.
        wait_seconds: How long to wait for nodes at the start. A node that needs longer, or two minutes, to say which clients it
            has is not used until it is started again.
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
        self._notes: list[str] = []

    @property
    def workers(self) -> int:
        """Number of clients that train at once."""
        return self._simulated or max(1, sum(map(bool, self._clients.values())))

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
        self._find_clients()
        found = {id: client for own in self._clients.values() for id, client in own.items()}
        if not found:
            raise WorkerDiedError("; ".join(["no SuperNode can be used", *self._notes]))
        return dict(sorted(found.items()))

    def _await_nodes(self) -> None:
        end = time.monotonic() + self._wait_seconds
        while (count := len(list(self._grid.get_node_ids()))) < self._nodes:  # they are registered after the server begins
            if time.monotonic() > end:
                raise WorkerDiedError(
                    f"{count} of {self._nodes} SuperNodes came within {self._wait_seconds:g} seconds; start more,"
                    " or run with a smaller `nodes`"
                )
            time.sleep(min(_LOOK_SECONDS, self._wait_seconds))

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
        train, nodes = requests[0].task == "train", sorted(self._grid.get_node_ids())
        if not self._simulated:
            self._find_clients(note_new=True)
        node_of = {id: node for node, own in self._clients.items() for id in own}
        shared = b"" if train else pack(dict(requests[0].state), {"kind": "state"})
        asked: dict[int, list[int]] = {}  # node → positions of its requests
        replies: dict[int, Reply] = {}
        for place, request in enumerate(requests):
            node = nodes[place % len(nodes)] if self._simulated else node_of.get(request.client_id)
            if node is None:
                replies[place] = _dropped(request, f"no SuperNode has client {request.client_id} now")
            else:
                asked.setdefault(node, []).append(place)
        messages = []
        for node, places in asked.items():
            parts = [encode_request(requests[place], spec.graph, with_state=train) for place in places]
            kind, group = "train" if train else "evaluate", str(requests[0].round)
            messages.append(Message(content(shared, *parts, run=run), node, kind, ttl=self._ttl, group_id=group))
        answers, groups = self._exchange(messages, self._ttl), list(asked.values())
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

    def _exchange(self, messages: Sequence[Message], seconds: float) -> Iterator[tuple[int, Message | str]]:
        """Send messages; yield the position of each with its reply, once, or with the reason why there is none."""
        waiting: dict[str, int] = {}
        for position, id in enumerate(self._grid.push_messages(messages)):
            if id:
                waiting[id] = position
            else:
                yield position, "its node is gone"
        late, end = f"no reply within {seconds:g} seconds", time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages(list(waiting)):
                position = waiting.pop(reply.metadata.reply_to_message_id, -1)
                if position >= 0:
                    yield position, late if reply.has_error() and reply.error.code in _EXPIRED else reply
            time.sleep(_POLL_SECONDS if waiting else 0.0)
        yield from ((position, late) for position in waiting.values())

    def _find_clients(self, *, note_new: bool = False) -> None:
        """Forget devices that are gone, and ask new ones for theirs; `note_new`: note which came."""
        here = set(self._grid.get_node_ids())
        for node in self._clients.keys() - here:
            if lost := self._clients.pop(node):
                self._note(f"SuperNode {node} is gone, with the clients {_named(lost)}")
        new = sorted(here - self._clients.keys())
        seconds = max(_QUERY_SECONDS, self._wait_seconds)
        answers = dict(self._exchange([Message(content(), node, "query", ttl=seconds) for node in new], seconds))
        for position, node in enumerate(new):  # which of two nodes has a client does not depend on the network
            try:
                own, text = read_clients(answers[position], self._identity), ""
            except SparsekitError as error:
                own, text = {}, f"SuperNode {node} is not used: {error}"
            for other in self._clients.values():  # a client that another one has is its own now, as after a restart
                for id in own:
                    other.pop(id, None)
            self._clients[node] = own
            if text or note_new:
                self._note(text or f"SuperNode {node} came, with the clients {_named(own)}")

    def _note(self, text: str) -> None:
        _log.warning(text)
        self._notes.append(text)


def content(*parts: bytes, run: str = "") -> RecordDict:
    """Return the content of a message: payloads, one after the other in one array, with their lengths, and the id of the run.

    In one array, because each costs Flower several requests; as bytes of our own, because their number is what a run reports,
    and because Flower's arrays know no bfloat16. Nothing is ever unpickled.
    """
    body = b"".join(parts)
    array = Array(dtype="uint8", shape=(len(body),), stype=_TYPE, data=body)
    about = ConfigRecord({"run": run, "sizes": [len(part) for part in parts]})
    return RecordDict({"about": about, "body": ArrayRecord({"body": array})})


def run_of(message: Message) -> str:
    """Return the id of the run that a message belongs to."""
    return str(message.content["about"].get("run", ""))


def read(message: Message | str, count: int | None = None) -> list[bytes]:
    """Undo `content`.

    Args:
        message: A message, whoever sent it, or the reason why there is none.
        count: Number of payloads that it must have; None: any.

    Raises:
        DataError: there is no message, it is an error of Flower, or not a message of this package; says which.
    """
    if isinstance(message, str):
        raise DataError(message)
    if message.has_error():
        raise DataError(f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})")
    try:
        sizes: Any = message.content["about"]["sizes"]
        array: Any = message.content["body"]["body"]
        data, ends = bytes(array.data), list(accumulate(sizes, initial=0))
        if array.stype != _TYPE or min(sizes, default=0) < 0 or ends[-1] != len(data) or count not in (None, len(sizes)):
            raise ValueError(f"{len(sizes)} payloads of {len(data)} bytes, expected {'any number' if count is None else count}")
        return [data[begin:end] for begin, end in pairwise(ends)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"not a message of this package: {error!r}") from error


def _dropped(request: Request, reason: str) -> Reply:
    who = f"client {request.client_id} in round {request.round}: " if request.task == "train" else ""
    return Reply(client_id=request.client_id, error=f"{who}{reason}"[:MAX_TEXT])


def _named(ids: Iterable[int]) -> str:
    """Return clients as a list; of many, the first."""
    found = sorted(ids)
    if len(found) <= _MAX_NAMED:
        return str(found)
    return f"[{', '.join(map(str, found[:_MAX_NAMED]))}, …], {len(found):,} in all"


def run_id(memories: Memories) -> str:
    """Return the id of a run, the same for the run that resumes it, so that devices find their memories."""
    path = memories.folder / "run-id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode(), durable=memories.durable)
    return path.read_text()


def identity_of(spec: RunSpec) -> str:
    """Return what server and devices must share: the version, and a digest of units, shapes and frozen values."""
    return f"sparsekit {__version__}, model {short_digest(spec.fingerprint())}"


def describe_clients(clients: Iterable[Client], identity: str) -> bytes:
    """Encode which clients a device has: ids, numbers of examples to train, validate and test with, capabilities."""
    rows = [
        [one.id, *(len(split) for split in (one.data.train, one.data.val, one.data.test)), *astuple(one.capability)]
        for one in clients
    ]
    return json.dumps({"identity": identity, "clients": rows}).encode()


def read_clients(answer: Message | str, identity: str) -> dict[int, Client]:
    """Undo `describe_clients`, for the answer of any device.

    Returns:
        Client id → client, with numbers of examples in place of data; at least one.

    Raises:
        DataError: it names no clients, one twice or more than a million, or has other code or another model; says what to do.
    """
    (payload,) = read(answer, 1)
    try:
        said = json.loads(payload)
        theirs, rows = str(said["identity"])[:100], said["clients"]
        if theirs == identity:
            clients = {
                id: Client(id=id, data=ClientData(range(train), range(val), range(test)), capability=Capability(*can))
                for id, train, val, test, *can in rows[: _MAX_CLIENTS + 1]
            }
            sizes = [size for id, train, val, test, *_ in rows for size in (id, train - 1, val, test - 1)]
            if not 0 < len(clients) == len(rows) <= _MAX_CLIENTS or not 0 <= min(sizes) <= max(sizes) < _MAX_EXAMPLES:
                raise ValueError("it names a client twice, or a number that is not allowed")
            return clients
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"it describes its clients badly: {error}") from error
    raise DataError(
        f"it has {theirs}, and the server has {identity}; install the same versions of sparsekit and torch on both, and use"
        " the same model, with the same frozen weights, and the same data set"
    )
