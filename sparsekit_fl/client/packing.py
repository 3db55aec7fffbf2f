"""Tensors of a state: what of them travels under a mask, and a mask as bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import (
    StateDict,
    UnitGraph,
    UnitMask,
    WeightMask,
    cut_axes,
    gather,
    narrow_shape,
    scatter_,
)
from sparsekit_fl.config import Upload
from sparsekit_fl.packed import plain_bytes


def clone(state: StateDict) -> dict[str, Tensor]:
    """Return a copy that shares no memory with `state` and carries no graph."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def is_finite(tensor: Tensor) -> bool:
    """Tell whether a float or complex tensor holds neither NaN nor infinity.

    If the sum is finite, so are its terms, and a sum takes a twentieth of the time of checking each term.
    """
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
    entries in row-major order, no mask everything; keys of which the mask drops nothing are kept whole, in their own shape.

    Args:
        graph: The units and shapes of the model.
        mask: What is kept; None keeps all.
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
        """Return true where every entry of `name` is kept and its shape is the model's."""
        return name not in self._axes and name not in self._flat

    def shape(self, name: str) -> tuple[int, ...]:
        """Return shape of what is kept of `name`."""
        if name in self._flat:
            return (self._flat[name].numel(),)
        return tuple(narrow_shape(self.graph.shapes[name], self._axes.get(name, {})))

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """Return what is kept of the dense `tensor`; a view where everything is."""
        if name in self._flat:
            return tensor.reshape(-1).index_select(0, self._flat[name].to(tensor.device))
        return gather(tensor, self._axes.get(name, {}))

    def scatter(self, name: str, kept: Tensor, into: Tensor) -> None:
        """Write what is kept into the dense tensor `into`, in place."""
        if name in self._flat:
            into.view(-1)[self._flat[name]] = kept
        else:
            scatter_(kept, into, self._axes.get(name, {}))

    def add(self, name: str, kept: Tensor | float, into: Tensor) -> None:
        """Add to the kept entries of the dense tensor `into`, in place; a number is added to each."""
        self.scatter(name, self.gather(name, into) + kept, into)

    def gather_all(self, state: StateDict) -> dict[str, Tensor]:
        """Return what is kept of each entry of a dense state."""
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
    """Return a dense state in which everything that `mask` drops is zero; untouched keys are the same tensors."""
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
    """Return what a change of this dtype is sent up as: itself, or bfloat16 for a floating-point one where that was asked
    for."""
    return torch.bfloat16 if upload == "bfloat16" and dtype.is_floating_point else dtype


def pack_mask(mask: Mask | None) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return a mask as bytes: the tensor to send (uint8) and its description.

    An entry takes one bit per position, padded to whole bytes. Of a weight mask, an entry that is kept or dropped whole takes
    nothing, and one of which few positions are kept, or few dropped, takes their positions, four bytes each.
    """
    if mask is None:
        return {}, None
    by_unit = isinstance(mask, UnitMask)
    pieces: list[npt.NDArray[np.uint8]] = [np.zeros(0, dtype=np.uint8)]
    shapes: list[list[Any]] = []
    for name, entry in mask.items():
        keep = entry.cpu().reshape(-1).numpy()
        shapes.append([name, list(entry.shape)])
        for form, listed in (("kept", keep), ("dropped", ~keep)):
            count = int(np.count_nonzero(listed))
            if not by_unit and 4 * count < (keep.size + 7) // 8:
                shapes[-1].append(f"{form} {count}")
                pieces.append(np.flatnonzero(listed).astype("<u4").view(np.uint8))
                break
        else:
            pieces.append(np.packbits(keep))
    return {"mask": torch.from_numpy(np.concatenate(pieces))}, {"kind": "unit" if by_unit else "weight", "shapes": shapes}


def _unpack_entry(form: str, count: int, data: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.bool_], int]:
    """Return the entry at the beginning of `data`, and how many bytes it takes."""
    kind, _, number = form.partition(" ")
    size = (count + 7) // 8 if form == "bits" else 4 * int(number)
    if kind not in ("bits", "kept", "dropped") or not 0 <= size <= len(data):
        raise ValueError(f"the form {form!r} with {len(data)} bytes")
    if form == "bits":
        return np.unpackbits(data[:size], count=count).astype(bool), size
    positions = np.frombuffer(data[:size].tobytes(), dtype="<u4").astype(np.int64)
    if len(positions) and (positions[-1] >= count or bool((np.diff(positions) <= 0).any())):
        raise ValueError("positions out of order")
    keep = np.full(count, kind == "dropped")
    keep[positions] = kind == "kept"
    return keep, size


def unpack_mask(
    tensors: Mapping[str, Tensor], description: Mapping[str, Any] | None, graph: UnitGraph | None = None
) -> Mask | None:
    """Return the inverse of `pack_mask`.

    Args:
        tensors: With the bits.
        description: Description of the mask.
        graph: The units and shapes of the model; None believes the description. A few bytes can describe an entry of any size,
            so what strangers send is read with the graph, before room is made for it.

    Raises:
        DataError: bits and description disagree, or the mask is not one of this graph.
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
        for name, shape, *form in description["shapes"]:
            if known is not None and tuple(known.get(name, (None,))) != tuple(shape):
                raise ValueError(f"{name!r} has the shape {known.get(name)}, got {tuple(shape)}")
            keep, size = _unpack_entry(form[0] if form else "bits", math.prod(shape), data)
            entries[name], data = torch.from_numpy(keep).reshape(shape), data[size:]
        if data.size:
            raise ValueError("bits left over")
        return made(entries)
    except (KeyError, TypeError, ValueError, InvalidValueError, AttributeError) as error:
        raise DataError(f"the message holds a malformed mask: {error}") from error


def remember_mask(memory: dict[str, Any], mask: Mask | None) -> None:
    """Save a mask in a memory, as bits."""
    bits, description = pack_mask(mask)
    memory.update(bits=bits, description=description)


def recall_mask(memory: Mapping[str, Any]) -> Mask | None:
    """Return the mask that is saved in a memory; None where there is none."""
    return unpack_mask(memory.get("bits", {}), memory.get("description"))
