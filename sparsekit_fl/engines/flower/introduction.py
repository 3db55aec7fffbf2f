"""What a SuperNode says of its clients, and what the server makes of it: ids, sizes and capabilities, never data.

It travels as payloads and not in the header, which is short, and in parts, so that the server need not read ten thousand
clients at once to find that the last is no client.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Message

from sparsekit.errors import DataError
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.engines.flower.wire import read
from sparsekit_fl.identity import code_version
from sparsekit_fl.problem.clients import Capability, Client, ClientData

__all__ = ["check_code", "described", "introduced_by", "read_clients"]

_PART = 5_000
_LETTERS = 16
_MOST_CLIENTS = 1_000_000
# Of one client, with room: it takes about a hundred.
_MOST_BYTES = 256


def introduced_by(spec: RunSpec) -> dict[str, str]:
    """Return what must be the same on the server and on its nodes: version, digest of the code, and of the model's graph.

    Args:
        spec: Of the run, as it was built here.
    """
    shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in spec.initial.items()]
    groups = [list(pair) for pair in spec.graph.fingerprint()]
    graph = hashlib.sha256(json.dumps([shapes, groups]).encode()).hexdigest()[:_LETTERS]
    return {**code_version(), "graph": graph}


def check_code(message: Message, ours: Mapping[str, str]) -> None:
    """Raise unless a node runs the code, and has the model, of the server.

    Args:
        message: The node's answer.
        ours: From `introduced_by`.

    Raises:
        DataError: something differs, or the node does not say; with what to do.
    """
    header, _ = read(message, max_bytes=_MOST_CLIENTS * _MOST_BYTES)
    theirs = header.get("identity")
    if not isinstance(theirs, dict) or "sparsekit" not in theirs:
        raise DataError(
            f"it does not say by which version it was made, so it is an older one; install sparsekit {ours['sparsekit']} there"
        )
    told = {name: str(theirs.get(name))[:_LETTERS] for name in ours}
    if told["sparsekit"] != ours["sparsekit"]:
        raise DataError(
            f"it has sparsekit {told['sparsekit']}, the server {ours['sparsekit']}; install the same version on both"
        )
    if told["code"] != ours["code"]:
        raise DataError(
            f"its sparsekit {told['sparsekit']} has other code (digest {told['code']}) than the server ({ours['code']});"
            " install the same build on both"
        )
    if told["graph"] != ours["graph"]:
        raise DataError(
            f"its model has other units (digest {told['graph']}) than the server's ({ours['graph']}); give both the same model,"
            " data set and torch version"
        )


def described(clients: Iterable[Client]) -> dict[str, bytes]:
    """Payloads that say which clients there are.

    Args:
        clients: Of one node.
    """
    about = [_about(client) for client in clients]
    return {str(start): json.dumps(about[start : start + _PART]).encode() for start in range(0, len(about), _PART)}


def _about(client: Client) -> dict[str, Any]:
    can = client.capability
    return {
        "id": client.id,
        "sizes": [len(client.data.train), len(client.data.val), len(client.data.test)],
        "capability": [
            can.ratio,
            can.flops_per_second,
            can.uplink_bytes_per_second,
            can.downlink_bytes_per_second,
        ],
    }


def read_clients(message: Message) -> dict[int, Client]:
    """The inverse of `described`.

    Args:
        message: A node's answer, whatever it is.

    Returns:
        Client id → client, with sizes instead of data; at least one.

    Raises:
        DataError: it does not say which clients there are, or names more than a million.
    """
    if message.has_error():
        raise DataError(f"{message.error.reason} (Flower's error {message.error.code})")
    _, parts = read(message, max_bytes=_MOST_CLIENTS * _MOST_BYTES)
    clients: dict[int, Client] = {}
    for part in parts.values():
        for client in _read_part(part):
            if client.id in clients:
                raise DataError("it names a client twice")
            if len(clients) == _MOST_CLIENTS:
                raise DataError(f"it names more than {_MOST_CLIENTS:,} clients")
            clients[client.id] = client
    if not clients:
        raise DataError("it names no clients")
    return clients


def _read_part(part: bytes) -> Iterator[Client]:
    try:
        listed = json.loads(part)
        if not isinstance(listed, list) or len(listed) > _PART:
            raise DataError(f"it must list at most {_PART} clients in a part")
        for about in listed:
            yield _client(about)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise error if isinstance(error, DataError) else DataError(f"it describes a client badly: {error!r}") from error


def _client(about: Mapping[str, Any]) -> Client:
    train, val, test = about["sizes"]
    for size, low in ((train, 1), (val, 0), (test, 1)):
        if isinstance(size, bool) or not isinstance(size, int) or not low <= size < 2**40:
            raise ValueError(f"sizes {about['sizes']}")
    if about["id"] >= 2**63:
        raise ValueError(f"an id of {about['id'].bit_length()} bits")
    data = ClientData(train=range(train), val=range(val), test=range(test))
    return Client(id=about["id"], data=data, capability=Capability(*(float(value) for value in about["capability"])))
