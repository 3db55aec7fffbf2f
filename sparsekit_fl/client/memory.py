"""Memory, PolicyKind: the state and the generators of one kind of policy."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

Memory = dict[str, Any]
"""State that lives from round to round: tensors, numbers, strings, None, and lists and string-keyed dicts of these."""

PolicyKind = Literal["sampling", "ratio", "mask", "local", "share", "aggregate", "personal"]


def rngs_by_kind(rng: np.random.Generator) -> dict[str, np.random.Generator]:
    """Return an independent generator for each kind of policy."""
    kinds = get_args(PolicyKind)
    return dict(zip(kinds, rng.spawn(len(kinds)), strict=True))
