"""Tensors and JSON values as bytes, in the safetensors format, and back.

Never a pickled object: what comes from a wire or a disk is parsed by the safetensors library, which checks it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sparsekit.errors import DataError


def plain_bytes(tensor: Tensor) -> memoryview:
    """Return the raw bytes of a tensor in row-major order; of a view, the bytes of the values that it shows."""
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A tensor of one number counts as contiguous with any stride, and cannot be viewed as bytes with it.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Return tensors and plain JSON values as one safetensors file, equal bytes for equal input, or raise DataError."""
    found, seen = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = whole.untyped_storage()
        # The library writes tensors that own their memory.
        found[name] = whole.clone() if storage.nbytes() > whole.nbytes or storage.data_ptr() in seen else whole
        seen.add(storage.data_ptr())
    try:
        return save(found, {"meta": json.dumps(meta, sort_keys=True, separators=(",", ":"))})
    except (SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"a tensor cannot be sent: {error!r}; convert it, as with .float()") from error


def unpack(payload: bytes, *, shapes: Mapping[str, Sequence[int]] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `pack` wrote.

    Args:
        payload: Any bytes; reading takes at most three times their number in memory.
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
        if not isinstance(meta, dict):
            raise ValueError("metadata that `pack` does not write")
    except Exception as error:
        # Whoever wrote them: of what the two parsers and torch raise, no list would be complete.
        raise DataError(f"these {len(payload)} bytes are not a packed message: {error}") from error
    return tensors, meta
