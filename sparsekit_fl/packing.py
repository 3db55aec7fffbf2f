"""Packs states under masks, masks, messages and memories into bytes, and unpacks them.

The format is safetensors, never pickle: bytes from the network or a disk are parsed and checked by the safetensors library.
"""

import cmath
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, UnitMask, WeightMask, cut_axes, gather, narrow_shape, scatter_

_HASH_BYTES = 32


def clone(state: StateDict) -> dict[str, Tensor]:
    """Return a copy that shares no memory with the state and has no autograd graph."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    return torch.complex128 if dtype.is_complex else torch.float64


def change(after: Tensor, before: Tensor) -> Tensor:
    """Return after - before. Integers and booleans are subtracted as int64, so that they do not wrap around."""
    if before.is_floating_point() or before.is_complex():
        return after - before
    return after.to(torch.int64) - before.to(torch.int64)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity. A finite sum proves it, in a twentieth of the time."""
    return cmath.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def digest(state: StateDict) -> str:
    """Return the SHA-256 of names, dtypes, shapes and raw bytes, in the order of sorted names."""
    sha = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        sha.update(plain_bytes(tensor))
    return sha.hexdigest()


Mask = UnitMask | WeightMask
"""A mask over units or over single weights; True means kept."""


class Kept:
    """The entries that a mask keeps, for every key of a model's state.

    A unit mask keeps a narrow tensor (the shape that the compact model has), a weight mask a 1-D tensor of the kept
    entries in row-major order, no mask everything. Keys without dropped entries are kept whole, in their dense shape.
    """

    def __init__(self, graph: UnitGraph, mask: Mask | None) -> None:
        self.graph = graph
        self.mask = mask
        self._axes: dict[str, dict[int, Tensor]] = {}
        self._flat: dict[str, Tensor] = {}
        if isinstance(mask, UnitMask):
            # A full axis needs no index, so a mask that keeps everything is as fast as no mask.
            cut = {name: cut_axes(graph.shapes[name], axes) for name, axes in graph.kept_indices(mask).items()}
            self._axes = {name: axes for name, axes in cut.items() if axes}
        elif mask is not None:
            # Likewise, an entry without dropped positions needs no index.
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
        if self.is_whole(name):
            into += kept
            return
        self.scatter(name, self.gather(name, into) + kept, into)

    def gather_all(self, state: StateDict) -> dict[str, Tensor]:
        return {name: self.gather(name, tensor) for name, tensor in state.items()}

    def scatter_all(self, kept: StateDict, into: StateDict) -> dict[str, Tensor]:
        """Return a new dense state, on the device of `into`: `into` with the kept entries written over it."""
        result: dict[str, Tensor] = {}
        for name, tensor in kept.items():
            if self.is_whole(name):
                result[name] = tensor.detach().to(into[name].device, copy=True)
            else:
                result[name] = into[name].detach().clone()
                self.scatter(name, tensor.to(result[name].device), result[name])
        return result


def mask_state(graph: UnitGraph, mask: Mask | None, state: StateDict) -> dict[str, Tensor]:
    """Return a dense state with zeros for everything that `mask` drops. Keys without dropped entries have the same tensors."""
    kept = Kept(graph, mask)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if kept.is_whole(name):
            result[name] = tensor
        else:
            result[name] = torch.zeros_like(tensor)
            kept.scatter(name, kept.gather(name, tensor), result[name])
    return result


def pack_mask(mask: Mask | None) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return a mask as bytes: the 1-D uint8 tensor to send, and its description.

    A key takes one bit per position, padded to whole bytes, or four bytes per kept position if that is shorter.
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
    """Decode `data` to a mask of `size` positions: one bit each if `few` is None, else the indices of the `few` kept ones."""
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
    """Undo `pack_mask`; raise DataError if bits and description disagree, or do not fit the graph.

    Without a graph, the description is trusted. A few bytes can describe an entry of any size, so pass the graph for messages
    from clients: sizes are then checked before memory is allocated.
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


def _whole(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def plain_bytes(tensor: Tensor) -> memoryview:
    """Return the raw bytes of a tensor in row-major order; for a view, only those of its elements."""
    whole = _whole(tensor)
    # A tensor of one element counts as contiguous with any stride, but viewing it as bytes needs stride 1.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Return tensors and plain JSON values as one safetensors file. Equal inputs give equal bytes.

    Raises DataError if a tensor cannot be stored.
    """
    found, seen = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        whole = _whole(tensor)
        storage = whole.untyped_storage()
        # The library writes only tensors that own all of their memory.
        found[name] = whole.clone() if storage.nbytes() > whole.nbytes or storage.data_ptr() in seen else whole
        seen.add(storage.data_ptr())
    try:
        return save(found, {"meta": json.dumps(meta, sort_keys=True, separators=(",", ":"))})
    except (SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"a tensor cannot be sent: {error!r}; convert it, as with .float()") from error


def unpack(payload: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Undo `pack`, in at most three times the size of the payload; raise DataError if `pack` did not write it."""
    try:
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        meta = dict(json.loads(header["__metadata__"]["meta"]))
        # Copies have torch's memory alignment, on which the last bits of products depend.
        tensors = {name: tensor.clone() for name, tensor in load(payload).items()}
    except Exception as error:
        # The bytes are untrusted, and the exceptions of two parsers and torch cannot be listed completely.
        raise DataError(f"these {len(payload)} bytes are not a packed message: {error}") from error
    return tensors, meta


def dumps(value: Any) -> bytes:
    """Serialize tensors, masks, numbers, strings, None, and lists, tuples and dicts of these: a SHA-256, then safetensors."""
    tensors: dict[str, Tensor] = {}
    try:
        payload = pack(tensors, {"value": _written(value, tensors)})
    except DataError as error:
        raise InvalidValueError(f"a memory holds a tensor that cannot be saved: {error}") from error
    return hashlib.sha256(payload).digest() + payload


def loads(payload: bytes) -> Any:
    """Undo `dumps`; raise DataError if the bytes are damaged or have another format."""
    if hashlib.sha256(payload[_HASH_BYTES:]).digest() != payload[:_HASH_BYTES]:
        raise DataError("it is damaged: its checksum does not match its content")
    tensors, meta = unpack(payload[_HASH_BYTES:])
    try:
        return _read_back(meta["value"], tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"it was not written by this package: {error!r}") from error


def _written(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON. Its tensors are moved to `tensors` and replaced by their names."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, UnitMask | WeightMask):
        bits, description = pack_mask(value)
        return {"mask": [_written(bits, tensors), description]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        items = [_written(item, tensors) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and {type(key) for key in value} <= {str, int}:
        return {"dict": [[key, _written(item, tensors)] for key, item in value.items()]}
    raise InvalidValueError(
        f"a memory holds {value!r:.200}; allowed are tensors, masks, numbers, strings, None, and lists, tuples and dicts of"
        " these, whose keys are strings or integers; convert it, for example with float() or torch.from_numpy()"
    )


def _read_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_read_back(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "mask":
        return unpack_mask(_read_back(held[0], tensors), held[1])
    if kind == "tuple":
        return tuple(_read_back(item, tensors) for item in held)
    return {key: _read_back(item, tensors) for key, item in held}
