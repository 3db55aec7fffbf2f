"""The state dict of a learnable mask: the narrow weights under the model's keys, and all else that training continues from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.graph.index import cut_axes, narrow_shape, scatter
from sparsekit.surgery.files import digest
from sparsekit.training.importance import split_units
from sparsekit.training.narrow_model import NarrowModel

OWN = "sparsekit."  # prefix of the keys that are not the model's own


@dataclass(frozen=True)
class Checkpoint:
    """The state of a learnable mask besides its narrow weights; tensors are shared with the mask, not copied."""

    narrow_model: NarrowModel
    units: Tensor  # uint8 (8,), see `fingerprint`
    importance: Tensor  # float (J,)
    mask: Tensor  # bool (J,)
    ratio: float
    budget: str  # as text; empty for a mask without a budget
    rule: Mapping[str, Tensor]  # state of the rule of learning; empty for a fixed mask

    def entries(self) -> dict[str, Tensor]:
        """Return the entries of a state dict under our prefix; their keys depend on the model and the rule alone."""
        own = {f"dropped.{number}": flat for number, flat in enumerate(self.narrow_model.dropped())}
        own |= {"importance": self.importance, "mask": self.mask, "units": self.units}
        own["ratio"] = torch.tensor(self.ratio, dtype=torch.float64)
        own["budget"] = torch.tensor(list(self.budget.encode()), dtype=torch.uint8)
        own |= {f"rule.{name}": value for name, value in self.rule.items()}
        return {OWN + name: value for name, value in own.items()}

    def parse(self, state: Mapping[str, Any], prefix: str) -> tuple[Loaded | None, list[str], list[str], list[str]]:
        """Read the entries under `prefix`, narrow or dense; absent ones are taken from the present state.

        Also return missing and unexpected keys and errors, in the words of torch. With errors, nothing was read.

        Raises:
            InvalidValueError: a state of another budget or of other units, or importance that is NaN or infinite.
        """
        given = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        wanted, names = self.entries(), self.narrow_model.names()
        self._check_same(given)
        known = {name for own in names.values() for name in own} | wanted.keys()
        missing = [prefix + own[0] for own in names.values() if not any(name in given for name in own)]
        unexpected = [prefix + name for name in given if name not in known]
        own = {name: given.get(name, value) for name, value in wanted.items()}
        told = {name: _mismatch(name, value, wanted[name]) for name, value in own.items()}
        graph = self.narrow_model.graph
        if told[f"{OWN}mask"] is None:
            parts = split_units(graph, own[f"{OWN}mask"].cpu())
            if not all(bool(keep.any()) for keep in parts.values()):
                told[f"{OWN}mask"] = "booleans, of which at least one is true in each group"
        if not any(told.values()):
            mask = UnitMask(parts)
            axes = graph.kept_indices(mask)
            entries = {key: next((given[name] for name in own if name in given), None) for key, own in names.items()}
            for key, value in entries.items():
                shapes = [narrow_shape(graph.shapes[key], axes.get(key, {})), graph.shapes[key]]
                if value is not None and not (isinstance(value, Tensor) and value.shape in shapes):
                    shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    told[key] = f"the shape {tuple(shapes[0])}, got {shown}"
        errors = [f"{prefix + name}: expected {expected}" for name, expected in told.items() if expected is not None]
        if errors:
            return None, missing, unexpected, errors
        importance = own[f"{OWN}importance"]
        if not bool(torch.isfinite(importance).all()):
            raise InvalidValueError("importance must be finite")
        dense = self.narrow_model.dense_state()
        if any(name.startswith(f"{OWN}dropped.") for name in given):
            dense |= self.narrow_model.place([own[name] for name in own if name.startswith(f"{OWN}dropped.")], axes)
        for key, value in entries.items():
            if value is not None:
                cut = {} if value.shape == graph.shapes[key] else cut_axes(graph.shapes[key], axes[key])
                dense[key] = scatter(value.detach(), dense[key], cut)
        rule = {name: own[f"{OWN}rule.{name}"] for name in self.rule}
        return Loaded(dense, importance, mask, float(own[f"{OWN}ratio"]), rule), missing, unexpected, []

    def _check_same(self, given: Mapping[str, Any]) -> None:
        """Raise InvalidValueError if a state belongs to another budget or to other units."""
        units, budget = given.get(f"{OWN}units"), given.get(f"{OWN}budget")
        if isinstance(units, Tensor) and units.tolist() != self.units.tolist():
            raise InvalidValueError(
                "this state dict is of a learnable mask over other units, such as a model traced with other options; make it"
                " as it was made then, or load dense weights alone: masked.load(dense_state)"
            )
        if self.budget and isinstance(budget, Tensor) and (text := bytes(budget.tolist()).decode()) != self.budget:
            made = f"a budget of {text}" if text else "a ratio"
            raise InvalidValueError(f"this checkpoint was made with {made}, and the mask has a budget of {self.budget}")


@dataclass(frozen=True)
class Loaded:
    """What was read from a state dict."""

    dense: Mapping[str, Tensor]  # under the model's own keys
    importance: Tensor  # float (J,)
    mask: UnitMask
    ratio: float
    rule: Mapping[str, Tensor]


def fingerprint(graph: UnitGraph) -> Tensor:
    """Return a hash of the units of a graph, uint8 (8,)."""
    return torch.tensor(list(bytes.fromhex(digest(graph))[:8]), dtype=torch.uint8)


def _mismatch(name: str, value: object, wanted: Tensor) -> str | None:
    """Return a description of the entry that was expected for one of our keys; None if it fits."""
    if not isinstance(value, Tensor):
        return f"a tensor, got {type(value).__name__}"
    varies = name == f"{OWN}budget" or name.startswith(f"{OWN}dropped.")
    if value.shape != wanted.shape and not varies:
        return f"the shape {tuple(wanted.shape)}, got {tuple(value.shape)}"
    if name == f"{OWN}mask" and value.dtype != torch.bool:
        return f"booleans, got {value.dtype}"
    if name == f"{OWN}ratio" and not 0.0 < float(value) <= 1.0:
        return f"a ratio in (0, 1], got {float(value)}"
    return None
