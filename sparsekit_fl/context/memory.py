"""Memory, PolicyKind: the state and the generators of one kind of policy."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from sparsekit_fl.state.storage import Memory

__all__ = ["Memory", "PolicyKind", "rngs_by_kind"]


PolicyKind = Literal["sampling", "ratio", "mask", "local", "share", "aggregate", "personal"]


def rngs_by_kind(rng: np.random.Generator) -> dict[str, np.random.Generator]:
    """Return an independent generator for each kind of policy."""
    kinds = get_args(PolicyKind)
    return dict(zip(kinds, rng.spawn(len(kinds)), strict=True))
