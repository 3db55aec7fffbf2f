"""Messages of Flower: a header of plain JSON and a few named payloads of bytes, each one array.

One array, because every array costs Flower several requests; bytes of our own packing, because they are the bytes whose
number is reported, and because Flower's arrays know no bfloat16. Nothing is ever unpickled.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from sparsekit.errors import DataError

MAX_HEADER_BYTES = 2**20
"""A longer header is refused unread."""

_STYPE = "sparsekit.raw"


def content(header: Mapping[str, Any], **payloads: bytes) -> RecordDict:
    """Make the content of a message: a header of plain JSON values, and payloads, of which empty ones are left out."""
    arrays = {
        name: Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data) for name, data in payloads.items() if data
    }
    return RecordDict({"header": ConfigRecord({"json": json.dumps(header)}), "payloads": ArrayRecord(arrays)})


def read(message: Message, *, max_bytes: int | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Undo `content`, for a message without an error.

    Raises:
        DataError: the message is not one of this package, or holds more than `max_bytes`.
    """
    try:
        text = message.content["header"]["json"]
        if not isinstance(text, str) or len(text) > MAX_HEADER_BYTES:
            raise DataError("the message's header is no text, or too long")
        header = json.loads(text)
        arrays = message.content["payloads"]
        if not isinstance(header, dict) or not isinstance(arrays, ArrayRecord):
            raise DataError("the message's header must be an object, and its payloads arrays")
        payloads = {}
        for name, array in arrays.items():
            if array.stype != _STYPE:
                raise DataError(f"payload {name!r} is of type {array.stype!r}, expected {_STYPE!r}")
            if not isinstance(array.data, bytes):
                raise DataError(f"payload {name!r} is no bytes")
            payloads[name] = array.data
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise error if isinstance(error, DataError) else DataError(f"not a message of sparsekit_fl: {error!r}") from error
    size = sum(map(len, payloads.values()))
    if max_bytes is not None and size > max_bytes:
        raise DataError(f"the message holds {size:,} bytes, allowed are {max_bytes:,}")
    return header, payloads


def join(parts: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Name the payloads of several tasks by the place of each: "0/body", "0/memory", "1/body", …"""
    return {f"{place}/{name}": data for place, payloads in enumerate(parts) for name, data in payloads.items()}


def part(payloads: Mapping[str, bytes], place: int) -> dict[str, bytes]:
    """Return the payloads of one task out of what `join` made."""
    start = f"{place}/"
    return {name.removeprefix(start): data for name, data in payloads.items() if name.startswith(start)}
