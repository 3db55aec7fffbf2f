"""The fingerprint of a run: which code and which data made it, so that nothing is taken for what it is not."""

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsekit
from sparsekit.graph import plain_bytes
from sparsekit.rng import torch_scope
from sparsekit.version import __version__
from sparsekit_fl.errors import ResumeError
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.data import TensorData

_log = logging.getLogger(__name__)
_LETTERS = 16
_LETTERS_OF_CODE = 12
# Reading examples of a lazy data set may decode files; of so many splits the first and the last example are looked at.
_MOST_READ = 64


@cache
def code_digest() -> str:
    """Return the SHA-256 of the source of both packages, 12 hexadecimal digits; the same for every way of ending a line."""
    sha = hashlib.sha256()
    core = Path(sparsekit.__file__).parent
    for package in (core, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            sha.update(f"{package.name}/{path.relative_to(package).as_posix()}".encode())
            sha.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return sha.hexdigest()[:_LETTERS_OF_CODE]


def code_version() -> dict[str, str]:
    """Return version and digest of the code, as plain JSON values."""
    return {"sparsekit": __version__, "code": code_digest()}


def data_digest(clients: Iterable[Client]) -> str:
    """Return a digest of the clients' examples, in any order of the clients, 16 hexadecimal digits.

    `TensorData` counts with every byte and its transform. A data set with `digest()`, or with the `_fingerprint` of a
    Hugging Face data set, counts with that. Of any other one, type and length count, and the first and the last example
    where two reads give the same.
    """
    sha = hashlib.sha256()
    # Clients share tensors; each is read once. The tensors are kept, so that no other gets the place of one.
    known: dict[int, tuple[Tensor, bytes]] = {}
    read = 0

    def add(value: object) -> None:
        sha.update(f"{value!r};".encode())

    for client in sorted(clients, key=lambda client: client.id):
        add(client.id)
        for split in (client.data.train, client.data.val, client.data.test):
            if isinstance(split, TensorData):
                for tensor in (*split.inputs, split.targets):
                    if id(tensor) not in known:
                        known[id(tensor)] = tensor, _digest(tensor)
                    sha.update(known[id(tensor)][1])
                if split.index is not None:
                    sha.update(_digest(split.index))
                add(_named(split.transform))
                continue
            add((type(split).__qualname__, len(split)))
            said = split.digest() if callable(getattr(split, "digest", None)) else getattr(split, "_fingerprint", None)
            if said is not None or isinstance(split, range):
                add(split if said is None else said)
            elif len(split) and read < _MOST_READ:
                read += 1
                for found in _lasting_examples(split):
                    add(found)
    return sha.hexdigest()[:_LETTERS]


def _lasting_examples(split: Any) -> Iterator[list[str]]:
    """Describe the first and the last example, where two reads give the same: a random transform says nothing of the data."""
    for place in (0, len(split) - 1):
        first, second = (_example(split, place, seed) for seed in (0, 1))
        if first == second:
            yield first


def _example(split: Any, place: int, seed: int) -> list[str]:
    """Describe what one example holds, read under a seed of torch's global generator."""
    try:
        with torch_scope(np.random.default_rng(seed)):
            item = split[place]
    except Exception as error:  # noqa: BLE001 - anybody's data set; that it cannot be read is said by the client
        return [type(error).__name__]
    found = []
    for part in item if isinstance(item, tuple | list) else [item]:
        if isinstance(part, Tensor | np.ndarray):
            found.append(_digest(torch.as_tensor(part)).hex())
        else:
            found.append(repr(part) if isinstance(part, int | float | str | bytes) else type(part).__qualname__)
    return found


def _digest(tensor: Tensor) -> bytes:
    sha = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    sha.update(plain_bytes(tensor))
    return sha.digest()


def _named(transform: Any) -> str:
    """Return the text of a dataclass, which shows its values, and the name of anything else."""
    if transform is None or dataclasses.is_dataclass(transform):
        return repr(transform)
    return getattr(transform, "__qualname__", type(transform).__qualname__)


def fingerprint_of(clients: Iterable[Client] | None) -> dict[str, Any]:
    """Return version and digest of the code, and the digest of the data, as plain JSON values.

    Args:
        clients: All clients; None leaves the data out, which takes no time.
    """
    return {**code_version(), "data": None if clients is None else data_digest(clients)}


def check_fingerprint(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str, accept_code: bool = False
) -> list[dict[str, Any]]:
    """Refuse a saved run of other data or of other code; `accept_code` takes one of other code all the same, with a warning.

    `where` names the run, for the message.

    Returns:
        The code of earlier rounds, for the result; empty where it is all the same.

    Raises:
        ResumeError: the data differ; or the code does, and `accept_code` is False.
    """
    if saved.get("data") and now.get("data") and saved["data"] != now["data"]:
        raise ResumeError(
            f"{where} was run on other data (digest {saved['data']}, now {now['data']}), and its numbers say nothing of these;"
            " choose another folder, or bring the data back"
        )
    earlier: list[dict[str, Any]] = [dict(one) for one in saved.get("earlier", ())]
    known = {name: saved[name] for name in ("sparsekit", "code")}
    if all(text == now[name] for name, text in known.items()):
        return earlier
    made = f"sparsekit {known['sparsekit']}, code {known['code']}"
    here = f"sparsekit {now['sparsekit']}, code {now['code']}"
    if not accept_code:
        raise ResumeError(
            f"{where} was made by {made}, and this is {here}; install that version, choose another folder, or take it all the"
            " same with accept_code=True (--accept-code)"
        )
    _log.warning("%s was made by %s, and this is %s; taken all the same", where, made, here)
    return [*earlier, known]
