"""The parts of a state that are sent under a mask, and masks as bits."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsekit.errors import DataError
from sparsekit.graph import StateDict, UnitGraph, UnitMask, WeightMask, cut_axes, gather, narrow_shape, scatter_
from sparsekit_fl.config import Upload
from sparsekit_fl.packed import plain_bytes


def clone(state: StateDict) -> dict[str, Tensor]:
    """Return a copy without shared memory or a graph."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def is_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor holds neither NaN nor infinity; a finite sum says so in a twentieth of the time."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def digest(state: StateDict) -> str:
    """Return the SHA-256 of names, dtypes, shapes and raw bytes, in the order of sorted names."""
    sha = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        sha.update(plain_bytes(tensor))
    return sha.hexdigest()


Mask = UnitMask | WeightMask
"""What is kept, by unit or by entry."""


class Kept:
    """The entries that a mask keeps, for every key of a model's state.

    A unit mask keeps a narrow tensor (the shape that the compact model has), a weight mask a 1-D tensor of the kept
    entries in row-major order, no mask everything; keys without dropped entries are kept whole, in their own shape.
    """

    def __init__(self, graph: UnitGraph, mask: Mask | None) -> None:
        self.graph = graph
        self.mask = mask
        self._axes: dict[str, dict[int, Tensor]] = {}
        self._flat: dict[str, Tensor] = {}
        if isinstance(mask, UnitMask):
            # A full axis needs no index, so a mask that keeps everything costs what no mask costs.
            cut = {name: cut_axes(graph.shapes[name], axes) for name, axes in graph.kept_indices(mask).items()}
            self._axes = {name: axes for name, axes in cut.items() if axes}
        elif mask is not None:
            # Likewise an entry of which nothing is dropped.
            partial = {name: keep.cpu().reshape(-1) for name, keep in mask.items() if not bool(keep.all())}
            self._flat = {name: keep.nonzero().reshape(-1) for name, keep in partial.items()}

    def is_whole(self, name: str) -> bool:
        return name not in self._axes and name not in self._flat

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._flat:
            return (self._flat[name].numel(),)
        return tuple(narrow_shape(self.graph.shapes[name], self._axes.get(name, {})))

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """Return the kept part of the dense `tensor`; a view if everything is kept."""
        if name in self._flat:
            return tensor.reshape(-1).index_select(0, self._flat[name].to(tensor.device))
        return gather(tensor, self._axes.get(name, {}))

    def scatter(self, name: str, kept: Tensor, into: Tensor) -> None:
        if name in self._flat:
            into.view(-1)[self._flat[name]] = kept
        else:
            scatter_(kept, into, self._axes.get(name, {}))

    def add(self, name: str, kept: Tensor | float, into: Tensor) -> None:
        """Add to the kept entries of the dense tensor `into`, in place; a number is added to each."""
        self.scatter(name, self.gather(name, into) + kept, into)

    def gather_all(self, state: StateDict) -> dict[str, Tensor]:
        return {name: self.gather(name, tensor) for name, tensor in state.items()}

    def scatter_all(self, kept: StateDict, into: StateDict) -> dict[str, Tensor]:
        """Return a new dense state: `into` with the kept entries written over it."""
        result: dict[str, Tensor] = {}
        for name, tensor in kept.items():
            if self.is_whole(name):
                result[name] = tensor.detach().clone()
            else:
                result[name] = into[name].detach().clone()
                self.scatter(name, tensor, result[name])
        return result


def mask_state(graph: UnitGraph, mask: Mask | None, state: StateDict) -> dict[str, Tensor]:
    """Return a dense state with zeros for everything that `mask` drops; untouched keys are the same tensors."""
    kept = Kept(graph, mask)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if kept.is_whole(name):
            result[name] = tensor
        else:
            result[name] = torch.zeros_like(tensor)
            kept.scatter(name, kept.gather(name, tensor), result[name])
    return result


def upload_dtype(dtype: torch.dtype, upload: Upload) -> torch.dtype:
    return torch.bfloat16 if upload == "bfloat16" and dtype.is_floating_point else dtype


def pack_mask(mask: Mask | None) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return a mask as bytes: the tensor to send (uint8) and its description.

    An entry takes a bit per position, padded to whole bytes; or, if that is shorter, four bytes for each kept position.
    """
    if mask is None:
        return {}, None
    pieces: list[npt.NDArray[np.uint8]] = [np.zeros(0, dtype=np.uint8)]
    shapes: list[list[Any]] = []
    for name, entry in mask.items():
        keep = entry.cpu().reshape(-1).numpy()
        count = int(np.count_nonzero(keep))
        few = 4 * count < (keep.size + 7) // 8
        pieces.append(np.flatnonzero(keep).astype("<u4").view(np.uint8) if few else np.packbits(keep))
        shapes.append([name, list(entry.shape), *([count] if few else [])])
    kind = "unit" if isinstance(mask, UnitMask) else "weight"
    return {"mask": torch.from_numpy(np.concatenate(pieces))}, {"kind": kind, "shapes": shapes}


def _unpack_entry(size: int, few: int | None, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return the entry of `size` positions in `data`: bits, or the positions of `few` kept ones."""
    if few is None:
        return np.unpackbits(data, count=size).astype(bool)
    positions = data.view("<u4").astype(np.int64)
    if len(positions) and (positions[-1] >= size or bool((np.diff(positions) <= 0).any())):
        raise ValueError("positions out of order")
    keep = np.zeros(size, dtype=bool)
    keep[positions] = True
    return keep


def unpack_mask(
    tensors: Mapping[str, Tensor], description: Mapping[str, Any] | None, graph: UnitGraph | None = None
) -> Mask | None:
    """Return the inverse of `pack_mask`; raise DataError if bits and description disagree, or do not fit the graph.

    Without a graph, the description is believed. A few bytes can describe an entry of any size, so what strangers send is read
    with the graph, before room is made for it.
    """
    if description is None:
        return None
    try:
        kinds: dict[str, type[UnitMask] | type[WeightMask]] = {"unit": UnitMask, "weight": WeightMask}
        made = kinds[description["kind"]]
        known: Mapping[str, Any] | None = None if graph is None else graph.shapes
        if graph is not None and made is UnitMask:
            known = {name: (group.size,) for name, group in graph.groups.items()}
        data, entries = tensors["mask"].numpy(), {}
        if data.dtype != np.uint8 or data.ndim != 1:
            raise ValueError(f"bits of dtype {data.dtype} in {data.ndim} dimensions")
        for name, shape, *more in description["shapes"]:
            if known is not None and tuple(known.get(name, (None,))) != tuple(shape):
                raise ValueError(f"{name!r} has the shape {known.get(name)}, got {tuple(shape)}")
            size, few = math.prod(shape), more[0] if more else None
            length = (size + 7) // 8 if few is None else 4 * few
            if not 0 <= length <= len(data):
                raise ValueError(f"{name!r} takes {length} bytes, there are {len(data)}")
            entries[name] = torch.from_numpy(_unpack_entry(size, few, data[:length].copy())).reshape(shape)
            data = data[length:]
        if data.size:
            raise ValueError("bits left over")
        return made(entries)
    except Exception as error:
        raise DataError(f"the message holds a malformed mask: {error}") from error


def remember_mask(memory: dict[str, Any], mask: Mask | None) -> None:
    bits, description = pack_mask(mask)
    memory.update(bits=bits, description=description)


def recall_mask(memory: Mapping[str, Any]) -> Mask | None:
    return unpack_mask(memory.get("bits", {}), memory.get("description"))
