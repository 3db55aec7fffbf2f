"""data_digest(): what examples the clients have, as a few letters, so that other data under the same names are noticed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit.rng import torch_scope
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.data import TensorData

_LETTERS = 16
# Reading examples of a lazy data set may decode files; of so many splits the first and the last example are looked at.
_MOST_READ = 64


def data_digest(clients: Iterable[Client]) -> str:
    """Return a digest of the clients' examples, 16 hexadecimal digits.

    `TensorData` counts with every byte and its transform. A data set with `digest()`, or with the `_fingerprint` of a
    Hugging Face data set, counts with that. Of any other one, type and length count, and the first and the last example
    where two reads give the same.

    Args:
        clients: In any order.
    """
    maker = _Maker()
    for client in sorted(clients, key=lambda client: client.id):
        maker.add(client.id)
        for split in (client.data.train, client.data.val, client.data.test):
            maker.add_split(split)
    return maker.sha.hexdigest()[:_LETTERS]


class _Maker:
    def __init__(self) -> None:
        self.sha = hashlib.sha256()
        # Clients share tensors; each is read once. The tensors are kept, so that no other gets the place of one.
        self._known: dict[int, tuple[Tensor, bytes]] = {}
        self._read = 0

    def add(self, value: object) -> None:
        self.sha.update(f"{value!r};".encode())

    def add_split(self, split: Any) -> None:
        if isinstance(split, TensorData):
            for tensor in (*split.inputs, split.targets):
                self._add_tensor(tensor)
            if split.index is not None:
                self.sha.update(_digest(split.index))
            self.add(_named(split.transform))
            return
        self.add((type(split).__qualname__, 0 if split is None else len(split)))
        known = split.digest() if callable(getattr(split, "digest", None)) else getattr(split, "_fingerprint", None)
        if known is not None or isinstance(split, range):
            self.add(split if known is None else known)
        elif split is not None and len(split) and self._read < _MOST_READ:
            self._read += 1
            self._add_examples(split)

    def _add_tensor(self, tensor: Tensor) -> None:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, _digest(tensor)
        self.sha.update(self._known[id(tensor)][1])

    def _add_examples(self, split: Any) -> None:
        for place in (0, len(split) - 1):
            # A random transform gives something else each time, and says nothing of the data.
            with torch_scope(np.random.default_rng(0)):
                first = _leaves(split, place)
            with torch_scope(np.random.default_rng(1)):
                second = _leaves(split, place)
            if first == second:
                self.add(first)


def _leaves(split: Any, place: int) -> list[str]:
    try:
        item = split[place]
    except Exception as error:  # noqa: BLE001 - anybody's data set; that it cannot be read is said by the client
        return [type(error).__name__]
    return [_text(part) for part in (item if isinstance(item, tuple | list) else [item])]


def _text(part: Any) -> str:
    if isinstance(part, Tensor):
        return _digest(part).hex()
    if isinstance(part, np.ndarray):
        return _digest(torch.as_tensor(part)).hex()
    return repr(part) if isinstance(part, int | float | str | bytes) else type(part).__qualname__


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous()
    sha = hashlib.blake2b(f"{flat.dtype} {tuple(flat.shape)}".encode(), digest_size=16)
    sha.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return sha.digest()


def _named(transform: Any) -> str:
    """Return the text of a dataclass, which shows its values, and the name of anything else."""
    if transform is None or dataclasses.is_dataclass(transform):
        return repr(transform)
    return getattr(transform, "__qualname__", type(transform).__qualname__)
