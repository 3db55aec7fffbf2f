"""Arithmetic on state dicts. Inputs are read-only, outputs are new dicts, keys are the model's own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

StateDict = Mapping[str, Tensor]
"""A state dict, read-only by convention: state-dict key → tensor."""


def clone(state: StateDict) -> dict[str, Tensor]:
    """A copy that shares no memory with `state` and carries no graph."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def is_finite(tensor: Tensor) -> bool:
    """Whether a float or complex tensor holds neither NaN nor infinity.

    A finite sum has finite terms, and to sum takes a twentieth of the time of looking at each; where finite terms have no
    finite sum, each is looked at.
    """
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def digest(state: StateDict) -> str:
    """SHA-256 over names, dtypes, shapes and raw bytes, in the order of sorted names."""
    sha = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        sha.update(np.ascontiguousarray(tensor.reshape(-1).view(torch.uint8).numpy()).tobytes())
    return sha.hexdigest()
