"""Checkpoint: everything from which the training of a learnable mask continues, as entries of a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph.mask import UnitMask

_OWN = "sparsekit."  # prefix of the keys that are not the model's own


@dataclass(frozen=True)
class Checkpoint:
    """The state of a learnable mask."""

    dense: Mapping[str, Tensor]  # under the model's own keys
    importance: Mapping[str, Tensor]  # group name → float (units,)
    mask: UnitMask
    ratio: float
    budget: str  # as text; empty for a mask without a budget
    rule: Mapping[str, Tensor]  # state of the rule of learning; empty for a fixed mask

    def entries(self) -> dict[str, Tensor]:
        """Return the entries of a state dict; their keys depend on the model and the rule alone."""
        own: dict[str, Tensor] = {f"importance.{name}": scores for name, scores in self.importance.items()}
        own |= {f"mask.{name}": keep.clone() for name, keep in self.mask.items()}
        own["ratio"] = torch.tensor(self.ratio, dtype=torch.float64)
        own["budget"] = torch.tensor(list(self.budget.encode()), dtype=torch.uint8)
        own |= {f"rule.{name}": value for name, value in self.rule.items()}
        return {**self.dense, **{_OWN + name: value for name, value in own.items()}}

    @staticmethod
    def parse(state: Mapping[str, Any], prefix: str, present: Checkpoint) -> tuple[Checkpoint, list[str], list[str], list[str]]:
        """Read the entries under `prefix`; absent ones are taken from `present`. Also return missing and unexpected keys and
        errors, in the words of torch.

        Raises:
            InvalidValueError: a checkpoint of another budget, or importance that is NaN or infinite.
        """
        given = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        wanted = present.entries()
        budget = bytes(given.get(f"{_OWN}budget", wanted[f"{_OWN}budget"]).tolist()).decode()
        if present.budget and budget != present.budget:
            made = f"a budget of {budget}" if budget else "a ratio"
            raise InvalidValueError(f"this checkpoint was made with {made}, and the mask has a budget of {present.budget}")
        missing = [prefix + name for name in present.dense if name not in given]
        unexpected = [prefix + name for name in given if name not in wanted]
        read = {name: given.get(name, value) for name, value in wanted.items()}
        told = {name: _mismatch(value, wanted[name], name) for name, value in read.items()}
        errors = [f"{prefix + name}: expected {expected}" for name, expected in told.items() if expected is not None]
        if errors:
            return present, missing, unexpected, errors
        importance = {name: read[f"{_OWN}importance.{name}"] for name in present.importance}
        for name, values in importance.items():
            if not bool(torch.isfinite(values).all()):
                raise InvalidValueError(f"importance of {name!r} must be finite")
        found = replace(
            present,
            dense={name: read[name] for name in present.dense},
            importance=importance,
            mask=UnitMask({name: read[f"{_OWN}mask.{name}"].cpu() for name in present.mask}),
            ratio=float(read[f"{_OWN}ratio"]),
            rule={name: read[f"{_OWN}rule.{name}"] for name in present.rule},
        )
        return found, missing, unexpected, []


def _mismatch(value: object, wanted: Tensor, name: str) -> str | None:
    """Return what was expected in place of an entry; None if it fits."""
    if not isinstance(value, Tensor):
        return f"a tensor, got {type(value).__name__}"
    if value.shape != wanted.shape and name != f"{_OWN}budget":
        return f"the shape {tuple(wanted.shape)}, got {tuple(value.shape)}"
    if name.startswith(f"{_OWN}mask.") and (value.dtype != torch.bool or not bool(value.any())):
        return "booleans, of which at least one is true"
    if name == f"{_OWN}ratio" and not 0.0 < float(value) <= 1.0:
        return f"a ratio in (0, 1], got {float(value)}"
    return None
