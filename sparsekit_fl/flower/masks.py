"""Masks and narrow states as Flower carries them: one ConfigRecord next to the ArrayRecord of a message."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ConfigRecord
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.client.packing import pack_mask, unpack_mask

KEY = "sparsekit"
"""Name of the record that travels in the content of messages and replies."""


def unpacked(record: Mapping[str, Any], graph: sk.UnitGraph) -> sk.UnitMask | None:
    """Read the mask of a record; None if it has none.

    Raises:
        DataError: it is not a mask of this graph.
    """
    if "mask" not in record:
        return None
    try:
        data = torch.frombuffer(bytearray(record["mask"]), dtype=torch.uint8)
        mask = unpack_mask({"mask": data}, json.loads(record["groups"]), graph)
        if not isinstance(mask, sk.UnitMask):
            raise DataError("the mask is not one of units")
        mask.check(graph)
    except (InvalidValueError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"a malformed mask: {error}") from error
    return mask


def record(ratio: float, mask: sk.UnitMask | None, **more: Any) -> ConfigRecord:
    """Return the record of a message: a ratio, a mask if there is one, and further numbers."""
    found: dict[str, Any] = {"ratio": float(ratio), **more}
    if mask is not None:
        bits, groups = pack_mask(mask)
        found |= {"mask": bits["mask"].numpy().tobytes(), "groups": json.dumps(groups)}
    return ConfigRecord(found)


def traced(model: nn.Module, example_inputs: Any) -> sk.UnitGraph:
    """Return the units of a model; `example_inputs` is a tensor or a tuple of positional inputs."""
    return sk.trace_units(model, *(example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)))


def narrow(model: nn.Module, state: Mapping[str, Tensor], graph: sk.UnitGraph, mask: sk.UnitMask | None) -> nn.Module:
    """Return a copy of the model that holds `state`, without the units that the mask removes."""
    whole = copy.deepcopy(model)
    whole.load_state_dict(dict(state))
    return whole if mask is None else sk.compact(whole, graph, mask, inplace=True)
