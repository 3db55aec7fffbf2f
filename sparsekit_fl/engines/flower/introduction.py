"""What a SuperNode says of its clients, and what the server makes of it: ids, sizes and capabilities, never data.

It travels as a payload and not in the header, which is short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated

from flwr.app import Message
from pydantic import Field, TypeAdapter, ValidationError

from sparsekit.errors import DataError
from sparsekit_fl.engines.flower.wire import read
from sparsekit_fl.engines.spec import RunSpec, short_digest
from sparsekit_fl.fingerprint import code_version
from sparsekit_fl.problem.clients import Capability, Client, ClientData

_LETTERS = 16
_SAME = {
    "sparsekit": "it has sparsekit {}, the server {}; install the same version",
    "code": "its sparsekit has other code (digest {}) than the server ({}); install the same build",
    "graph": "its model has other units (digest {}) than the server's ({}); use the same model, data set and torch version",
}
_MOST_CLIENTS = 1_000_000
_MOST_BYTES = 200 * _MOST_CLIENTS

_Id = Annotated[int, Field(ge=0, lt=2**63)]
_Size = Annotated[int, Field(ge=1, lt=2**40)]
_Row = tuple[_Id, _Size, Annotated[int, Field(ge=0, lt=2**40)], _Size, float, float, float, float]
_CLIENTS = TypeAdapter(Annotated[list[_Row], Field(min_length=1, max_length=_MOST_CLIENTS)])
"""Of each client its id, its numbers of examples to train, validate and test with, and its capability."""


def introduced_by(spec: RunSpec) -> dict[str, str]:
    """Return what must be the same on the server and on its nodes: version, digest of the code, and of the model's graph."""
    return {**code_version(), "graph": short_digest(spec.fingerprint())}


def described(clients: Iterable[Client]) -> dict[str, bytes]:
    """Payloads that say which clients a node has."""
    rows = []
    for client in clients:
        data, can = client.data, client.capability
        rates = [can.ratio, can.flops_per_second, can.uplink_bytes_per_second, can.downlink_bytes_per_second]
        rows.append([client.id, len(data.train), len(data.val), len(data.test), *rates])
    return {"clients": json.dumps(rows).encode()}


def read_clients(message: Message, ours: Mapping[str, str] | None = None) -> dict[int, Client]:
    """The inverse of `described`.

    Args:
        message: A node's answer, whatever it is.
        ours: From `introduced_by`, what the node must have in common with the server; None takes any.

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
    if ours is not None:
        _check_code(header.get("identity"), ours)
    return clients


def _check_code(theirs: object, ours: Mapping[str, str]) -> None:
    if not isinstance(theirs, dict) or "sparsekit" not in theirs:
        raise DataError(
            f"it does not say by which version it was made, so it is an older one; install sparsekit {ours['sparsekit']} there"
        )
    for name, what in _SAME.items():
        told = str(theirs.get(name))[:_LETTERS]
        if told != ours[name]:
            raise DataError(f"{what.format(told, ours[name])} on both")
