"""loader_state(), restore_loader(): the generators that a loader of batches draws from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["loader_state", "restore_loader"]


def _generators(loader: Any) -> list[torch.Generator]:
    """Those of the loader, its sampler and its batch sampler, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())


def loader_state(loader: Any) -> list[Tensor]:
    """The states of the generators of a loader; none for a list."""
    return [generator.get_state() for generator in _generators(loader)]


def restore_loader(loader: Any, states: Sequence[Tensor]) -> None:
    """Put the generators of a loader where they were."""
    for generator, state in zip(_generators(loader), states):
        generator.set_state(state)
