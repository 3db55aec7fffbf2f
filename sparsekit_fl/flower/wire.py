"""Messages of Flower: a few payloads of bytes, one after the other in one array, with their lengths.

In one array, because each costs Flower several requests; as bytes of our own, because their number is what a run reports, and
because Flower's arrays know no bfloat16. Nothing is ever unpickled.
"""

from itertools import accumulate, pairwise
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from sparsekit.errors import DataError

_TYPE = "sparsekit.raw"


def content(*parts: bytes, run: str = "") -> RecordDict:
    """Return the content of a message: payloads, and the id of the run."""
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
