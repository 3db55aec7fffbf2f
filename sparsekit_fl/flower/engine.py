"""GridEngine: an engine whose clients are on the nodes of a Flower grid, in Flower's simulation or on devices."""

import json
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from itertools import accumulate, pairwise
from typing import Annotated, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from pydantic import Field, TypeAdapter

from sparsekit.errors import DataError, InvalidValueError, SparsekitError
from sparsekit.version import __version__
from sparsekit_fl.checkpoint import Memories, write_atomically
from sparsekit_fl.client.messages import MAX_TEXT, Reply, Request, decode_reply, encode_request, request_bytes
from sparsekit_fl.engines import RunClients, one_thread
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.packing import pack
from sparsekit_fl.problem.data import Capability, Client, ClientData
from sparsekit_fl.spec import RunSpec

_log = logging.getLogger(__name__)

_POLL_SECONDS, _LOOK_SECONDS, _QUERY_SECONDS = 0.02, 0.5, 120.0
_GREET_SECONDS = 20.0  # how long a round waits until new devices describe their clients
_MOST_CLIENTS = 1_000_000  # per device
_TTL_SECONDS = 12 * 3600.0  # for messages without a timeout

_Number = Annotated[int, Field(ge=0, lt=2**40)]
_Positive = Annotated[int, Field(ge=1, lt=2**40)]
_Row = tuple[_Number, _Positive, _Number, _Positive, float, float, float, float]
"""A client: its id, numbers of training, validation and test examples, and the fields of its `Capability`."""
_ROWS = TypeAdapter(list[_Row])


class GridEngine:
    """Runs clients on the nodes of a Flower grid; for `run(engine=GridEngine(grid))` in the main function of a ServerApp.

    The results are bit-identical to `Processes`. A client that does not answer, or whose answer cannot be used, is
    dropped from the round. All clients of a node are asked in one message, since Flower starts a process for each message.

    Args:
        grid: Flower's grid.
        nodes: Number of nodes to wait for.
        wait_seconds: Seconds to wait for nodes at the start, and later whenever no node is left. A node that joins later, or
            takes longer to describe its clients, takes part from the next round on.
        timeout_seconds: Seconds to wait for a reply; None: twelve hours.
        simulated: Number of processes of Flower's simulation; 0: the nodes are devices. Each node of a simulation has all
            clients and writes their memories into the folder of the run, and a process that fails ends the run. Devices
            describe their clients, keep their memories and personal models, and cannot stop a run.
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
        self.workers, self.keeps_models = simulated or 1, not simulated
        self._asked: dict[str, int] = {}  # id of a query → its device
        self._met: dict[int, dict[int, Client]] = {}  # device → its clients
        self._refused: dict[int, str] = {}  # device → why it is not used
        self._node_of: dict[int, int] = {}  # client id → the device that has it
        self._there: dict[int, Client] = {}

    def clients(self, spec: RunSpec, clients: Mapping[int, Client]) -> Mapping[int, Client]:
        """Return the clients of the connected devices, with numbers of examples in place of data.

        A new device is asked once which clients it has.
        """
        if self._simulated:
            return clients
        first, began = not self._node_of, time.monotonic()
        if first:
            self._await_nodes()
        slow = set(self._asked)  # queries of an earlier round, which this round does not wait for
        self._meet(identity := identity_of(spec))
        seconds = max(_QUERY_SECONDS, self._wait_seconds) if first else self._wait_seconds if not self._met else _GREET_SECONDS
        while (not self._met or self._asked.keys() - slow) and time.monotonic() - began < seconds:
            if self._refused and not self._asked and set(self._grid.get_node_ids()) <= self._refused.keys():
                break
            time.sleep(_POLL_SECONDS)
            self._meet(identity)
        for id in self._asked.keys() - slow:
            _log.warning("SuperNode %d is not used: no reply within %g seconds", self._asked[id], seconds)
        if not self._met:
            reasons = [f"SuperNode {node} is not used: {reason}" for node, reason in sorted(self._refused.items())]
            raise WorkerDiedError("; ".join(["no SuperNode can be used", *reasons]))
        return self._united(first)

    def _meet(self, identity: str) -> None:
        """Query new devices, read all answers, and forget devices that left."""
        there = set(self._grid.get_node_ids())
        for known in (self._met, self._refused):
            for node in known.keys() - there:
                del known[node]
        fresh = sorted(there - self._met.keys() - self._refused.keys() - set(self._asked.values()))
        queries = [Message(content(), node, "query", ttl=_TTL_SECONDS) for node in fresh]
        self._asked |= {id: node for id, node in zip(self._grid.push_messages(queries), fresh, strict=True) if id}
        for reply in self._grid.pull_messages(list(self._asked)) if self._asked else ():
            if (node := self._asked.pop(reply.metadata.reply_to_message_id, -1)) not in there:
                continue
            try:
                self._met[node] = read_clients(reply, identity)
            except SparsekitError as error:
                self._refused[node] = str(error)
                _log.warning("SuperNode %d is not used: %s", node, error)

    def _united(self, first: bool) -> Mapping[int, Client]:
        """Return the clients of all devices. If two devices claim one client, it stays with the device that had it first."""
        holders = set(self._node_of.values())
        found, node_of = dict[int, Client](), dict[int, int]()
        for node in sorted(self._met, key=lambda node: (node not in holders, node)):
            if twice := sorted(self._met[node].keys() & found.keys()):
                told = (
                    f"SuperNodes {node_of[twice[0]]} and {node} both claim client {twice[0]}; correct option `clients` of one"
                )
                if first:
                    raise InvalidValueError(told)
                _log.warning("SuperNode %d is not used: %s", node, told)
                continue
            found |= self._met[node]
            node_of |= dict.fromkeys(self._met[node], node)
        self.workers, self._node_of = len(set(node_of.values())), node_of
        if found != self._there:  # clients are compared by identity
            self._there = dict(sorted(found.items()))
        return self._there

    def _await_nodes(self) -> None:
        end = time.monotonic() + self._wait_seconds
        while (count := len(list(self._grid.get_node_ids()))) < self._nodes:  # nodes are registered after the server starts
            if time.monotonic() > end:
                raise WorkerDiedError(
                    f"{count} of {self._nodes} SuperNodes came within {self._wait_seconds:g} seconds; start more,"
                    " or run with a smaller `nodes`"
                )
            time.sleep(min(_LOOK_SECONDS, self._wait_seconds))

    @contextmanager
    def open(self, spec: RunSpec, clients: Mapping[int, Client], memories: Memories) -> Iterator[RunClients]:
        """Run clients on the nodes. On devices, these are the clients that the method `clients` found."""
        del clients
        if self._simulated:
            self._await_nodes()
        run = str(memories.folder.resolve()) if self._simulated else run_id(memories)
        with one_thread():
            yield lambda requests: self._run(spec, memories, run, requests)

    def _run(self, spec: RunSpec, memories: Memories, run: str, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send the requests; yield the replies in their order."""
        asked: dict[int, list[Request]] = {}
        nodes = sorted(self._grid.get_node_ids())
        for place, request in enumerate(requests):
            node = nodes[place % len(nodes)] if self._simulated else self._node_of[request.client_id]
            asked.setdefault(node, []).append(request)
        train = requests[0].task == "train"
        # All requests have the same state. If the parts that a node's clients need are larger together, send it once.
        shared, kind = pack(requests[0].state), "train" if train else "evaluate"
        messages = []
        for node, own in asked.items():
            apart = train and sum(request_bytes(one, spec.graph) for one in own) <= len(shared)
            parts = [encode_request(request, spec.graph, with_state=apart) for request in own]
            messages.append(Message(content(b"" if apart else shared, *parts, run=run), node, kind, ttl=self._ttl))
        answers, replies = self._exchange(messages, self._ttl), dict[int, Reply]()
        for request in requests:
            while request.client_id not in replies:
                node, answer = next(answers)
                replies |= {reply.client_id: reply for reply in self._read(answer, asked[node], spec, memories)}
            yield replies.pop(request.client_id)

    def _read(self, answer: Message | str, requests: Sequence[Request], spec: RunSpec, memories: Memories) -> list[Reply]:
        """Return the replies in a node's answer to some requests. An invalid answer or reply drops only its clients."""
        if self._simulated and isinstance(answer, Message) and answer.has_error():
            # Flower would restart the process, which would fail again at once.
            raise WorkerDiedError(f"a process that trains clients failed: {str(answer.error.reason).strip()[-MAX_TEXT:]}")
        try:
            _, parts = read(answer)
            if len(parts) != len(requests):
                raise DataError(f"its answer cannot be used: it has {len(parts)} replies to {len(requests)} requests")
        except DataError as error:
            return [Reply(client_id=request.client_id, error=str(error)) for request in requests]
        replies = []
        for request, payload in zip(requests, parts, strict=True):
            try:
                replies.append(decode_reply(payload, request, spec.graph))
            except DataError as error:
                replies.append(Reply(client_id=request.client_id, error=f"its answer cannot be used: {error}"))
            if self._simulated and replies[-1].stored and not memories.path(request.client_id, request.round).exists():
                raise DataError(
                    f"the memory of client {request.client_id} was written on another disk; on a cluster, --out must be a"
                    " folder that all machines share"
                )
        return replies

    def _exchange(self, messages: Sequence[Message], seconds: float) -> Iterator[tuple[int, Message | str]]:
        """Send messages, one per node. Yield each node once, with its reply or with the reason why there is none."""
        waiting: dict[str, int] = {}
        for message, id in zip(messages, self._grid.push_messages(messages), strict=True):
            if id:
                waiting[id] = message.metadata.dst_node_id
            else:
                yield message.metadata.dst_node_id, "its node is gone"
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages(list(waiting)):
                if (node := waiting.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    yield node, reply
            time.sleep(_POLL_SECONDS if waiting else 0.0)
        yield from ((node, f"no reply within {seconds:g} seconds") for node in waiting.values())


def content(*parts: bytes, run: str = "") -> RecordDict:
    """Return the content of a message: payloads, one after the other in one array, with their lengths, and the id of the run.

    There is one array, because each costs Flower several requests. It holds bytes of our format, because a run reports their
    number, and Flower's arrays do not support bfloat16. Nothing is ever unpickled.
    """
    about = ConfigRecord({"run": run, "sizes": [len(part) for part in parts]})
    body = b"".join(parts)
    array = Array(dtype="uint8", shape=(len(body),), stype="sparsekit.raw", data=body)
    return RecordDict({"about": about, "body": ArrayRecord({"body": array})})


def read(message: Message | str) -> tuple[str, list[bytes]]:
    """Undo `content`: return the id of the run, and the payloads; raise DataError if the message is absent or not of `content`.

    A text in place of a message says why it is absent.
    """
    if isinstance(message, str):
        raise DataError(message)
    if message.has_error():
        raise DataError(f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})")
    try:
        about: Any = message.content["about"]
        array: Any = message.content["body"]["body"]
        data, ends = bytes(array.data), list(accumulate(about["sizes"], initial=0))
        if min(about["sizes"], default=0) < 0 or ends[-1] != len(data):
            raise ValueError(f"{len(data)} bytes, where {ends[-1]} were announced")
        return str(about["run"]), [data[begin:end] for begin, end in pairwise(ends)]
    except Exception as error:
        raise DataError(f"not a message of this package: {error!r}") from error


def run_id(memories: Memories) -> str:
    """Return the id of a run. It stays the same when the run is resumed, so that devices find their memories."""
    path = memories.folder / "run-id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode(), durable=memories.durable)
    return path.read_text()


def identity_of(spec: RunSpec) -> str:
    """Return a text that must be equal on server and devices: the version, and a digest of units, shapes and frozen values."""
    return f"sparsekit {__version__}, model {spec.fingerprint()}"


def describe_clients(clients: Iterable[Client], identity: str) -> bytes:
    """Encode the clients of a device: ids, numbers of training, validation and test examples, and capabilities."""
    rows = [
        [one.id, *(len(split) for split in (one.data.train, one.data.val, one.data.test)), *astuple(one.capability)]
        for one in clients
    ]
    return json.dumps({"identity": identity, "clients": rows}).encode()


def read_clients(answer: Message | str, identity: str) -> dict[int, Client]:
    """Undo `describe_clients` for an untrusted answer: client id → client, with numbers of examples in place of data.

    Raises DataError if there are no clients, more than a million or an id twice, or if the device has another version or model.
    """
    _, parts = read(answer)
    try:
        said = json.loads(b"".join(parts))
        theirs = str(said["identity"])[:100]
        if theirs == identity:
            rows = _ROWS.validate_python(said["clients"])
            clients = {
                id: Client(id=id, data=ClientData(range(train), range(val), range(test)), capability=Capability(*can))
                for id, train, val, test, *can in rows
            }
            if not 0 < len(clients) == len(rows) <= _MOST_CLIENTS:
                raise ValueError("it names a client twice, none or too many")
            return clients
    except Exception as error:
        raise DataError(f"it describes its clients badly: {error}") from error
    raise DataError(
        f"it has {theirs}, and the server has {identity}; install the same versions of sparsekit and torch on both, and use"
        " the same model, with the same frozen weights, and the same data set"
    )
