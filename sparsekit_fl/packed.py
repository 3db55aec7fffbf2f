"""Tensors and JSON values as bytes, in the safetensors format, and back.

Never a pickled object: what comes from a wire or a disk is parsed by the safetensors library, which checks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from sparsekit.errors import DataError

# The names of dtypes in the safetensors format.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip


def plain_bytes(tensor: Tensor) -> memoryview:
    """Return the raw bytes of a tensor in row-major order; of a view, the bytes of the values that it shows."""
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A tensor of one number counts as contiguous with any stride, and cannot be viewed as bytes with it.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> tuple[bytes, list[str], int]:
    """Return the header of a file, the order of its tensors, and their bytes."""
    # Largest items first keeps every tensor aligned to its item size, as the safetensors library itself does.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"meta": json.dumps(meta, sort_keys=True, separators=(",", ":"))}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise DataError(f"{name!r} has dtype {tensor.dtype}, which cannot be sent; allowed: {', '.join(_NAMES.values())}")
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), order, offset


def packed_bytes(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
    """Return exactly `len(pack(tensors, meta))`, from dtypes and shapes alone: tensors on the device "meta" will do."""
    header, _, size = _header(tensors, meta)
    return 8 + len(header) + size


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Return tensors and metadata, plain JSON values, as one safetensors file; equal input gives equal bytes."""
    header, order, _ = _header(tensors, meta)
    return b"".join([len(header).to_bytes(8, "little"), header, *(plain_bytes(tensors[name]) for name in order)])


def unpack(payload: bytes, *, shapes: Mapping[str, Sequence[int]] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `pack` wrote.

    Args:
        payload: Any bytes; what is read takes no more memory than three times their number.
        shapes: Name → expected shape of each tensor, which are compared before a tensor is made; None reads all shapes.

    Raises:
        DataError: they are other bytes, or tensors of other names or shapes.
    """
    try:
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        meta = json.loads(header.pop("__metadata__")["meta"])
        if shapes is not None and {name: tuple(one["shape"]) for name, one in header.items()} != {
            name: tuple(shape) for name, shape in shapes.items()
        }:
            raise ValueError("tensors of other names or shapes")
        # Copies begin where torch lets tensors begin, on which the last bits of products depend.
        tensors = {name: tensor.clone() for name, tensor in load(payload).items()}
        if not isinstance(meta, dict) or not {tensor.dtype for tensor in tensors.values()} <= _NAMES.keys():
            raise ValueError("metadata or dtypes that `pack` does not write")
    except Exception as error:
        # Whoever wrote them: of what the two parsers and torch raise, no list would be complete.
        raise DataError(f"these {len(payload)} bytes are not a packed message: {error}") from error
    return tensors, meta
