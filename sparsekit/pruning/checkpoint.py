"""write_checkpoint(), read_checkpoint(): what a training needs to go on, in one file that runs no code when it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sparsekit.errors import InvalidValueError


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write state dicts and plain values; an old file is replaced at once or not at all.

    Raises:
        InvalidValueError: an optimiser or scheduler whose state holds more than numbers, strings and tensors.
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(dict(state), temporary)
        if not path.exists():  # what could not be read again is refused after the first epoch, not after the last
            read_checkpoint(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote, tensors bit for bit and on the CPU.

    Raises:
        InvalidValueError: the file is damaged or of another kind.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:  # torch reads a path by its ending
            found = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged files fail in many ways
        raise InvalidValueError(
            f"{path} is damaged, or holds more than the state of a training made of numbers, strings and tensors:"
            f" {type(error).__name__}"
        ) from error
    return dict(found)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader, its sampler and its batch sampler draw from, each once; none for a list."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
