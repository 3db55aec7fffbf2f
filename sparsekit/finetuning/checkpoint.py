"""save_nested(), load_nested(): nested plain values with tensors, such as an optimiser's state, as one safetensors file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.surgery.compact_file import damage, read_file, write_file

__all__ = ["load_nested", "save_nested"]


def save_nested(path: Path, value: Any) -> None:
    """Write a value; an old file is replaced at once or not at all.

    Args:
        path: The file.
        value: Mappings, lists, tuples, numbers, strings, None and tensors, nested in any way.

    Raises:
        InvalidValueError: something else is inside.
        OSError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    packed = _pack(value, tensors, "value")
    write_file(path, tensors, {"kind": "nested", "value": packed})


def load_nested(path: Path) -> Any:
    """Read what `save_nested` wrote: equal values, tensors bit for bit and on the CPU.

    Raises:
        CompactFileError: the file is damaged or of another kind.
        OSError: it cannot be read.
    """
    tensors, spec = read_file(path)
    with damage(path):
        if spec.get("kind") != "nested":
            raise ValueError("it is no checkpoint")
        return _unpack(spec["value"], tensors)


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """JSON of the value: [1, (2,)] is ["list", [1, ["tuple", [2]]]]; a tensor is ["tensor", its name]."""
    if isinstance(value, Tensor):
        tensors[where] = value.detach()
        return ["tensor", where]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]  # JSON has no infinity
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        items = [
            [_pack(key, tensors, f"{where}/k{i}"), _pack(item, tensors, f"{where}/{i}")]
            for i, (key, item) in enumerate(value.items())
        ]
        return [kind, items]
    if isinstance(value, (list, tuple)):
        return [
            "list" if isinstance(value, list) else "tuple",
            [_pack(v, tensors, f"{where}/{i}") for i, v in enumerate(value)],
        ]
    raise InvalidValueError(
        f"a checkpoint holds numbers, strings and tensors, and not {type(value).__name__} (at {where});"
        " give an optimiser and a scheduler whose state_dict() is made of these"
    )


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, held = value
    if kind == "tensor":
        return tensors[held]
    if kind == "float":
        return float.fromhex(held)
    if kind in ("dict", "counter"):
        pairs = {_unpack(key, tensors): _unpack(item, tensors) for key, item in held}
        return Counter(pairs) if kind == "counter" else pairs
    items = [_unpack(item, tensors) for item in held]
    return items if kind == "list" else tuple(items)
