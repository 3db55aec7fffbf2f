"""Arithmetic on state dicts. Inputs are read-only, outputs are new dicts, keys are the model's own."""

import hashlib
from collections.abc import Mapping

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


def plain_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor, row-major; of a view, those of the values that it shows."""
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # One number counts as contiguous with any stride, and cannot be read as bytes with it.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def digest(state: StateDict) -> str:
    """SHA-256 over names, dtypes, shapes and raw bytes, in the order of sorted names."""
    sha = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        sha.update(plain_bytes(tensor))
    return sha.hexdigest()
