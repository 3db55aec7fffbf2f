"""What a SuperNode says of its clients, and what the server makes of it: ids, sizes and capabilities, never data.

It travels as a payload and not in the header, which is short.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
from flwr.app import Message

from sparsekit.errors import DataError
from sparsekit_fl.client.packing import pack, unpack
from sparsekit_fl.engines.flower.wire import read
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.fingerprint import code_version
from sparsekit_fl.problem.clients import Capability, Client, ClientData

_LETTERS = 16
_SAME = {
    "sparsekit": "it has sparsekit {}, the server {}; install the same version",
    "code": "its sparsekit has other code (digest {}) than the server ({}); install the same build",
    "graph": "its model has other units (digest {}) than the server's ({}); use the same model, data set and torch version",
}
_MOST_CLIENTS = 1_000_000
_BYTES, _ROOM = 64, 4096  # of a client, and of what is around them


def introduced_by(spec: RunSpec) -> dict[str, str]:
    """Return what must be the same on the server and on its nodes: version, digest of the code, and of the model's graph.

    Args:
        spec: The run, as it was built here.
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
    header, _ = read(message, max_bytes=_MOST_CLIENTS * _BYTES + _ROOM)
    theirs = header.get("identity")
    if not isinstance(theirs, dict) or "sparsekit" not in theirs:
        raise DataError(
            f"it does not say by which version it was made, so it is an older one; install sparsekit {ours['sparsekit']} there"
        )
    for name, what in _SAME.items():
        told = str(theirs.get(name))[:_LETTERS]
        if told != ours[name]:
            raise DataError(f"{what.format(told, ours[name])} on both")


def described(clients: Iterable[Client]) -> dict[str, bytes]:
    """Payloads that say which clients there are.

    Args:
        clients: The clients of one node.
    """
    found = list(clients)
    data, can = [client.data for client in found], [client.capability for client in found]
    rates = [[one.ratio, one.flops_per_second, one.uplink_bytes_per_second, one.downlink_bytes_per_second] for one in can]
    tensors = {
        "ids": torch.tensor([client.id for client in found]),
        "sizes": torch.tensor([[len(one.train), len(one.val), len(one.test)] for one in data]),
        "capabilities": torch.tensor(rates, dtype=torch.float64),
    }
    return {"clients": pack(tensors, {})}


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
    _, payloads = read(message, max_bytes=_MOST_CLIENTS * _BYTES + _ROOM)
    try:
        tensors, _ = unpack(payloads["clients"])
        ids, sizes, rates = tensors["ids"], tensors["sizes"], tensors["capabilities"]
    except KeyError as error:
        raise DataError(f"it does not say {error} of its clients") from error
    count = ids.numel()
    if ids.shape != (count,) or sizes.shape != (count, 3) or rates.shape != (count, 4):
        raise DataError(f"it describes its clients by tensors of shapes {[tuple(one.shape) for one in (ids, sizes, rates)]}")
    if ids.dtype != torch.int64 or sizes.dtype != torch.int64 or rates.dtype != torch.float64:
        raise DataError("it describes its clients by numbers of other types")
    if not 0 < count <= _MOST_CLIENTS:
        raise DataError(f"it names {count:,} clients, allowed are 1 to {_MOST_CLIENTS:,}")
    if ids.unique().numel() != count or int(ids.min()) < 0:
        raise DataError("it names a client twice, or a negative id")
    if bool((sizes < torch.tensor([1, 0, 1])).any()) or int(sizes.max()) >= 2**40:
        raise DataError("it names sizes of data that no client has")
    try:
        return {
            id: Client(id=id, data=ClientData(*map(range, size)), capability=Capability(*rate))
            for id, size, rate in zip(ids.tolist(), sizes.tolist(), rates.tolist(), strict=True)
        }
    except ValueError as error:
        raise DataError(f"it describes a client badly: {error}") from error
