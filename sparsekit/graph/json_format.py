"""A unit graph as JSON text and back, exact."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph.groups import FixedUnits, NormSite, SizeAttribute, UnitGroup, UnitSlice
from sparsekit.graph.layers import Layer

_FORMAT = 2


def dump(graph: Any) -> str:
    """A `UnitGraph`, which stands above this file, as JSON text: its fields by name, tensors as lists."""
    return json.dumps({"format": _FORMAT, **dataclasses.asdict(graph)}, default=Tensor.tolist)


def load(text: str) -> dict[str, Any]:
    """Read what `dump` wrote.

    Raises:
        InvalidValueError: the text is not a graph of a known format.
    """
    try:
        raw = json.loads(text)
        if raw["format"] != _FORMAT:
            raise InvalidValueError(f"unit graph of format {raw['format']!r}; this version reads {_FORMAT}")
        return {
            "groups": {
                name: UnitGroup(**{**group, "slices": tuple(UnitSlice(**_with_index(piece)) for piece in group["slices"])})
                for name, group in raw["groups"].items()
            },
            "shapes": {name: torch.Size(shape) for name, shape in raw["shapes"].items()},
            "ties": tuple(map(tuple, raw["ties"])),
            "fixed": tuple(FixedUnits(**item) for item in raw["fixed"]),
            "sizes": tuple(SizeAttribute(**item) for item in raw["sizes"]),
            "norms": tuple(NormSite(**_with_places(site)) for site in raw["norms"]),
            "layers": tuple(
                Layer(layer["name"], *(tuple(layer[key]) for key in ("entries", "reads", "frozen"))) for layer in raw["layers"]
            ),
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise InvalidValueError(f"this text is not a unit graph: {error!r}") from error


def _with_index(piece: dict[str, Any]) -> dict[str, Any]:
    return {**piece, "index": torch.tensor(piece["index"], dtype=torch.int64)}


def _with_places(site: dict[str, Any]) -> dict[str, Any]:
    places = {name: tuple(torch.tensor(t, dtype=torch.int64) for t in pair) for name, pair in site["places"].items()}
    return {**site, "places": places}
