"""Tensors and JSON metadata to bytes and back, in the safetensors format, with the size known before packing.

Never a pickled object: what comes from a wire or a disk is parsed by the safetensors library, which checks it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from sparsekit.errors import DataError

__all__ = ["Spec", "pack", "packed_bytes", "plain_bytes", "spec_of", "unpack"]

Spec = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape: all that the size of a packed tensor depends on."""

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_META = "meta"


def spec_of(tensor: Tensor) -> Spec:
    """Dtype and shape of a tensor."""
    return tensor.dtype, tuple(tensor.shape)


def _header(specs: Mapping[str, Spec], meta: Mapping[str, Any]) -> tuple[bytes, list[str], int]:
    # Largest items first keeps every tensor aligned to its item size, as the safetensors library itself does.
    order = sorted(specs, key=lambda name: (-specs[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {_META: json.dumps(meta, sort_keys=True, separators=(",", ":"))}}
    offset = 0
    for name in order:
        dtype, shape = specs[name]
        if dtype not in _NAMES:
            raise DataError(
                f"{name!r} has dtype {dtype}, which cannot be packed; allowed: {', '.join(sorted(_NAMES.values()))}"
            )
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), order, offset


def packed_bytes(specs: Mapping[str, Spec], meta: Mapping[str, Any]) -> int:
    """Exactly `len(pack(tensors, meta))`, from dtypes and shapes alone."""
    header, _, size = _header(specs, meta)
    return 8 + len(header) + size


def plain_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor, row-major, little-endian."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return np.ascontiguousarray(flat.view(torch.uint8).numpy()).data


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Tensors and metadata as one safetensors file.

    Args:
        tensors: Name → tensor; written on the CPU, row-major.
        meta: Plain JSON values.

    Returns:
        The bytes; equal input gives equal bytes.
    """
    header, order, _ = _header({name: spec_of(tensor) for name, tensor in tensors.items()}, meta)
    parts: Sequence[bytes | memoryview] = [plain_bytes(tensors[name]) for name in order]
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(payload: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `pack` wrote.

    Raises:
        DataError: the bytes are not such a file.
    """
    try:
        tensors = load(payload)
        size = int.from_bytes(payload[:8], "little")
        meta = json.loads(json.loads(payload[8 : 8 + size])["__metadata__"][_META])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"these {len(payload)} bytes are not a packed message: {error}") from error
    if not isinstance(meta, dict):
        raise DataError(f"the metadata of a packed message must be an object, got {type(meta).__name__}")
    return tensors, meta
