"""A unit graph as JSON text and back, exact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from sparsekit.errors import InvalidValueError
from sparsekit.graph.groups import FixedUnits, NormSite, SizeAttribute, UnitGroup, UnitSlice
from sparsekit.graph.layers import Layer

_FORMAT = 1


def dump(graph: Mapping[str, Any]) -> str:
    """The fields of a `UnitGraph`, which stands above this file, as JSON text."""
    raw: dict[str, Any] = {
        "format": _FORMAT,
        "shapes": {name: list(shape) for name, shape in graph["shapes"].items()},
        "ties": [list(tied) for tied in graph["ties"]],
        "fixed": [[item.module, item.size, item.reason] for item in graph["fixed"]],
        "sizes": [[item.module, item.name, item.group, item.per_unit] for item in graph["sizes"]],
        "groups": [_group(group) for group in graph["groups"].values()],
        "norms": [_norm(site) for site in graph["norms"]],
        "layers": [[layer.name, *map(list, (layer.entries, layer.reads, layer.frozen))] for layer in graph["layers"]],
    }
    return json.dumps(raw)


def load(text: str) -> dict[str, Any]:
    """Read what `dump` wrote.

    Raises:
        InvalidValueError: the text is not a graph of a known format.
    """
    try:
        raw = json.loads(text)
        if raw["format"] != _FORMAT:
            raise InvalidValueError(f"unit graph of format {raw['format']!r}; this version reads {_FORMAT}")
        groups = [_read_group(g) for g in raw["groups"]]
        return {
            "groups": {group.name: group for group in groups},
            "shapes": {name: torch.Size(shape) for name, shape in raw["shapes"].items()},
            "ties": tuple(tuple(tied) for tied in raw["ties"]),
            "fixed": tuple(FixedUnits(*item) for item in raw["fixed"]),
            "sizes": tuple(SizeAttribute(*item) for item in raw["sizes"]),
            "norms": tuple(_read_norm(n) for n in raw["norms"]),
            "layers": tuple(Layer(name, *map(tuple, entries)) for name, *entries in raw["layers"]),
        }
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise InvalidValueError(f"this text is not a unit graph: {error!r}") from error


def _group(group: UnitGroup) -> dict[str, Any]:
    slices = [{"name": p.name, "dim": p.dim, "side": p.side, "gated": p.gated, "index": p.index.tolist()} for p in group.slices]
    return {"name": group.name, "size": group.size, "kind": group.kind, "slices": slices}


def _read_group(raw: dict[str, Any]) -> UnitGroup:
    slices = tuple(
        UnitSlice(s["name"], s["dim"], torch.tensor(s["index"], dtype=torch.int64), s["side"], s["gated"])
        for s in raw["slices"]
    )
    return UnitGroup(name=raw["name"], size=raw["size"], kind=raw["kind"], slices=slices)


def _norm(site: NormSite) -> dict[str, Any]:
    places = {name: [positions.tolist(), units.tolist()] for name, (positions, units) in site.places.items()}
    return {**vars(site), "places": places}


def _read_norm(raw: dict[str, Any]) -> NormSite:
    places = {
        name: (torch.tensor(positions, dtype=torch.int64), torch.tensor(units, dtype=torch.int64))
        for name, (positions, units) in raw["places"].items()
    }
    return NormSite(**{**raw, "places": places})
