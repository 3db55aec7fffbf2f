"""A cheap fingerprint of the clients' data, so that a resumed run notices other data."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph import plain_bytes
from sparsekit.rng import torch_scope
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.data import TensorData

_LETTERS = 16
# Reading examples may decode files; of so many splits the first and the last example are read.
_MAX_READ = 64


def data_fingerprint(clients: Iterable[Client]) -> str:
    """Return a hash of what tells data sets apart and is cheap to read, 16 hexadecimal digits.

    It covers ids, sizes and positions, all labels of `TensorData`, and the first and the last example of 64 splits. A change
    in other examples goes unnoticed.
    """
    sha = hashlib.sha256()
    known: dict[int, tuple[Tensor, bytes]] = {}  # clients share tensors; each is read once, and none takes the id of another
    read = 0
    for client in sorted(clients, key=lambda client: client.id):
        sha.update(f"{client.id};".encode())
        for split in (client.data.train, client.data.val, client.data.test):
            sha.update(f"{type(split).__qualname__} {len(split)};".encode())
            if isinstance(split, TensorData):
                for tensor in (split.targets, split.index):
                    if tensor is not None and id(tensor) not in known:
                        known[id(tensor)] = tensor, _hash(tensor)
                    sha.update(b"" if tensor is None else known[id(tensor)][1])
            elif isinstance(split, range):
                continue  # of a client elsewhere: its size
            if len(split) and read < _MAX_READ:
                read += 1
                for example in _lasting_examples(split):
                    sha.update(example)
    return sha.hexdigest()[:_LETTERS]


def _lasting_examples(split: Any) -> Iterator[bytes]:
    """Hash the first and the last example, if two reads are equal: a random transform says nothing about the data."""
    for position in (0, len(split) - 1):
        first, second = (_example(split, position, seed) for seed in (0, 1))
        if first == second:
            yield first


def _example(split: Any, position: int, seed: int) -> bytes:
    """Hash what one example holds, read under a seed of torch's global generator."""
    try:
        with torch_scope(np.random.default_rng(seed)):
            item = split.batch([position]) if isinstance(split, TensorData) else split[position]
    except Exception as error:  # noqa: BLE001 - anybody's data set; the client says that it cannot be read
        return type(error).__name__.encode()
    parts = [part for one in item for part in (one if isinstance(one, tuple) else [one])] if isinstance(item, tuple) else [item]
    return b";".join(
        _hash(torch.as_tensor(part)) if isinstance(part, Tensor | np.ndarray) else repr(part)[:200].encode() for part in parts
    )


def _hash(tensor: Tensor) -> bytes:
    sha = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    sha.update(plain_bytes(tensor))
    return sha.digest()
