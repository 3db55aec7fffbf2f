"""Masks and narrow states as Flower carries them: one ConfigRecord beside the ArrayRecord of a message."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import DataError, InvalidValueError

KEY = "sparsekit"
"""Name of the record that travels in the content of messages and replies."""

_UNITS = "units:"


def packed(mask: sk.UnitMask) -> dict[str, bytes]:
    """Return one value per group for a ConfigRecord: its units as bits."""
    return {f"{_UNITS}{name}": np.packbits(keep.cpu().numpy()).tobytes() for name, keep in mask.items()}


def unpacked(record: Mapping[str, Any], graph: sk.UnitGraph) -> sk.UnitMask | None:
    """Read what `packed` wrote; None if the record has no mask.

    Raises:
        DataError: it is not a mask of this graph.
    """
    found = {name.removeprefix(_UNITS): value for name, value in record.items() if name.startswith(_UNITS)}
    if not found:
        return None
    if set(found) != set(graph.groups):
        raise DataError(f"the mask has the groups {sorted(found)[:5]}, and the model has {sorted(graph.groups)[:5]}")
    keep: dict[str, Tensor] = {}
    for name, group in graph.groups.items():
        bits = found[name]
        if not isinstance(bits, bytes) or len(bits) != -(-group.size // 8):
            raise DataError(f"the mask of group {name!r} does not have {group.size} units")
        keep[name] = torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), count=group.size).astype(bool))
    mask = sk.UnitMask(keep)
    try:
        mask.check(graph)
    except InvalidValueError as error:
        raise DataError(str(error)) from error
    return mask


def record(ratio: float, mask: sk.UnitMask | None, **more: Any) -> ConfigRecord:
    """Return the record of a message: a ratio, a mask if there is one, and further numbers."""
    return ConfigRecord({"ratio": float(ratio), **({} if mask is None else packed(mask)), **more})


def traced(model: nn.Module, example_inputs: Any) -> sk.UnitGraph:
    """Return the units of a model; `example_inputs` is a tensor or a tuple of positional inputs."""
    return sk.trace_units(model, *(example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)))


def narrow(model: nn.Module, state: Mapping[str, Tensor], graph: sk.UnitGraph, mask: sk.UnitMask | None) -> nn.Module:
    """Return a copy of the model that holds `state`, without the units that the mask removes."""
    whole = copy.deepcopy(model)
    whole.load_state_dict(dict(state))
    return whole if mask is None else sk.compact(whole, graph, mask, inplace=True)
