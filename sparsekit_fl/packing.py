"""Packs states under masks, masks, messages and memories into bytes, and unpacks them.

The format is safetensors, never pickle: bytes from the network or a disk are parsed and checked by the safetensors library.
"""

import cmath
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, UnitMask, WeightMask, cut_axes, gather, narrow_shape, scatter_


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


def bits_of(entries: Mapping[str, Tensor]) -> Tensor:
    """Return boolean tensors as a 1-D uint8 tensor: one bit per position, each entry padded to whole bytes."""
    pieces = [np.packbits(entry.cpu().reshape(-1).numpy()) for entry in entries.values()]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.uint8), *pieces]))


def entries_of(bits: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Undo `bits_of`, given the shapes of the entries; raise DataError if they do not fit."""
    data, entries = bits.numpy(), dict[str, Tensor]()
    for name, shape in shapes.items():
        size = math.prod(shape)
        length = (size + 7) // 8
        if data.dtype != np.uint8 or not 0 <= length <= len(data):
            raise DataError(f"{name!r} takes {length} bytes, there are {len(data)} of {data.dtype}")
        entries[name] = torch.from_numpy(np.unpackbits(data[:length], count=size).astype(bool)).reshape(tuple(shape))
        data = data[length:]
    if data.size:
        raise DataError(f"{data.size} bytes are left over")
    return entries


def _whole(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def plain_bytes(tensor: Tensor) -> memoryview:
    """Return the raw bytes of a tensor in row-major order; for a view, only those of its elements."""
    whole = _whole(tensor)
    # A tensor of one element counts as contiguous with any stride, but viewing it as bytes needs stride 1.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def pack(value: Any) -> bytes:
    """Return a value as one safetensors file. Equal values give equal bytes.

    Allowed are tensors, masks, numbers, strings, None, and lists, tuples and dicts of these. Raises InvalidValueError for
    anything else, and for a tensor that cannot be stored.
    """
    tensors, found, seen = dict[str, Tensor](), dict[str, Tensor](), set[int]()
    text = json.dumps(_written(value, tensors), separators=(",", ":"))
    for name, tensor in tensors.items():
        whole = _whole(tensor)
        storage = whole.untyped_storage()
        # The library writes only tensors that own all of their memory.
        found[name] = whole.clone() if storage.nbytes() > whole.nbytes or storage.data_ptr() in seen else whole
        seen.add(storage.data_ptr())
    try:
        return save(found, {"value": text})
    except (SafetensorError, KeyError, ValueError) as error:
        raise InvalidValueError(f"a tensor cannot be saved or sent: {error!r}; convert it, as with .float()") from error


def unpack(payload: bytes, graph: UnitGraph | None = None) -> Any:
    """Undo `pack`; raise DataError if `pack` did not write it.

    A few bytes can describe a mask of any size. Pass the graph for messages from clients, so that shapes are checked before
    memory is allocated. Then, unpacking takes at most nine times the size of the payload and the masks of one model.
    """
    try:
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        # Copies have torch's memory alignment, on which the last bits of products depend.
        tensors = {name: tensor.clone() for name, tensor in load(payload).items()}
        return _read_back(json.loads(header["__metadata__"]["value"]), tensors, graph)
    except Exception as error:
        # The bytes are untrusted, and the exceptions of two parsers and torch cannot be listed completely.
        raise DataError(f"these {len(payload)} bytes are not a packed value: {error!r:.1000}") from error


def some_kept(mask: Mask) -> dict[str, Tensor]:
    """Return the entries of a mask that keep at least one position; the others take no bytes in a message."""
    return {name: entry for name, entry in mask.items() if bool(entry.any())}


def _mask_of(
    shapes: Sequence[tuple[str, Sequence[int], bool]], bits: Tensor, removed: Mapping[str, Any], graph: UnitGraph | None
) -> Mask:
    if graph is not None:
        known = {name: (group.size,) for name, group in graph.groups.items()} if removed else graph.shapes
        if strange := [name for name, shape, _ in shapes if tuple(known.get(name, ())) != tuple(shape)]:
            raise DataError(f"masks of {strange[:5]} have other shapes than the model")
    found = entries_of(bits, {name: shape for name, shape, some in shapes if some})
    entries = {name: found[name] if some else torch.zeros(tuple(shape), dtype=torch.bool) for name, shape, some in shapes}
    return UnitMask(entries, **removed) if removed else WeightMask(entries)


def _written(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON. Its tensors are moved to `tensors` and replaced by their names."""
    if isinstance(value, torch.Tensor):
        tensors[str(len(tensors))] = value.detach()
        return {"tensor": len(tensors) - 1}
    if isinstance(value, UnitMask | WeightMask):
        some = some_kept(value)
        shapes = [[name, list(entry.shape), name in some] for name, entry in value.items()]
        removed = {"removed": sorted(value.removed)} if isinstance(value, UnitMask) else {}
        return {"mask": [shapes, _written(bits_of(some), tensors), removed]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        items = [_written(item, tensors) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and {type(key) for key in value} <= {str, int}:
        items = [[key, _written(item, tensors)] for key, item in value.items()]
        return {"pairs": items} if any(type(key) is int for key in value) else {"dict": dict(items)}
    raise InvalidValueError(
        f"{value!r:.200} cannot be saved or sent; allowed are tensors, masks, numbers, strings, None, and lists, tuples and"
        " dicts of these, whose keys are strings or integers; convert it, for example with float() or torch.from_numpy()"
    )


def _read_back(value: Any, tensors: Mapping[str, Tensor], graph: UnitGraph | None) -> Any:
    if isinstance(value, list):
        return [_read_back(item, tensors, graph) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[str(held)]
    if kind == "mask":
        return _mask_of(held[0], tensors[str(held[1]["tensor"])], held[2], graph)
    if kind == "tuple":
        return tuple(_read_back(item, tensors, graph) for item in held)
    return {key: _read_back(item, tensors, graph) for key, item in (held if kind == "pairs" else held.items())}
