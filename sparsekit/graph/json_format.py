"""A unit graph as JSON text and back, exact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from sparsekit.errors import InvalidValueError
from sparsekit.graph.groups import FixedUnits, SizeAttribute, UnitGroup, UnitSlice
from sparsekit.graph.layers import Layer
from sparsekit.graph.norms import NormSite

__all__ = ["GraphFields", "dump", "load"]

_PLAIN, _WITH_NORMS = 1, 2
"""Formats. A version that does not know of kept norms must refuse a graph that has some, or masks would mean another thing."""


class GraphFields(TypedDict):
    """The fields of a `UnitGraph`, which stands above this file."""

    groups: Mapping[str, UnitGroup]
    shapes: Mapping[str, torch.Size]
    ties: tuple[tuple[str, ...], ...]
    fixed: tuple[FixedUnits, ...]
    sizes: tuple[SizeAttribute, ...]
    norms: tuple[NormSite, ...]
    layers: tuple[Layer, ...]


def dump(graph: GraphFields) -> str:
    """The fields of a graph as JSON text."""
    raw: dict[str, Any] = {
        "format": _WITH_NORMS if graph["norms"] else _PLAIN,
        "shapes": {name: list(shape) for name, shape in graph["shapes"].items()},
        "ties": [list(tied) for tied in graph["ties"]],
        "fixed": [[item.module, item.size, item.reason] for item in graph["fixed"]],
        "sizes": [[item.module, item.name, item.group, item.per_unit] for item in graph["sizes"]],
        "groups": [_group(group) for group in graph["groups"].values()],
    }
    if graph["layers"]:
        raw["layers"] = [[layer.name, list(layer.entries), list(layer.reads)] for layer in graph["layers"]]
    if graph["norms"]:
        raw["norms"] = [_norm(site) for site in graph["norms"]]
    return json.dumps(raw)


def load(text: str) -> GraphFields:
    """Read what `dump` wrote.

    Raises:
        InvalidValueError: the text is not a graph of a known format.
    """
    try:
        raw = json.loads(text)
        if raw["format"] not in (_PLAIN, _WITH_NORMS):
            raise InvalidValueError(f"unit graph of format {raw['format']!r}; this version reads {_PLAIN} and {_WITH_NORMS}")
        groups = [_read_group(g) for g in raw["groups"]]
        return GraphFields(
            groups={group.name: group for group in groups},
            shapes={name: torch.Size(shape) for name, shape in raw["shapes"].items()},
            ties=tuple(tuple(tied) for tied in raw["ties"]),
            fixed=tuple(FixedUnits(*item) for item in raw["fixed" if "fixed" in raw else "frozen"]),
            sizes=tuple(SizeAttribute(*item) for item in raw.get("sizes", ())),
            norms=tuple(_read_norm(n) for n in raw.get("norms", ())),
            layers=tuple(Layer(name, tuple(entries), tuple(reads)) for name, entries, reads in raw.get("layers", ())),
        )
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
    return {
        "module": site.module,
        "call": site.call,
        "function": site.function,
        "dim": site.dim,
        "size": site.size,
        "places": places,
    }


def _read_norm(raw: dict[str, Any]) -> NormSite:
    places = {
        name: (torch.tensor(positions, dtype=torch.int64), torch.tensor(units, dtype=torch.int64))
        for name, (positions, units) in raw["places"].items()
    }
    return NormSite(raw["module"], raw["call"], raw["function"], raw["dim"], raw["size"], places)
