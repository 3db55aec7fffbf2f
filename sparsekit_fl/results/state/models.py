"""Model files of a run's folder: one format for the global model and those of clients, that of `save_compact`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.surgery import save_compact
from sparsekit_fl.client.packing import pack
from sparsekit_fl.results.state.storage import write_atomically

_log = logging.getLogger(__name__)


def global_file(out: Path) -> Path:
    """Return where a run keeps its global model."""
    return out / "models" / "global.safetensors"


def best_file(out: Path) -> Path:
    """Return where a run keeps the global model of its best evaluation."""
    return out / "models" / "best.safetensors"


def client_file(out: Path, client_id: int) -> Path:
    """Return where a run keeps the personal model of a client, where that differs from the global one."""
    return out / "models" / f"client-{client_id}.safetensors"


def save_whole(path: Path, model: nn.Module) -> None:
    """Write a whole model; one whose state `save_compact` cannot keep as its tensors alone."""
    try:
        save_compact(model, path)
    except InvalidValueError as error:
        _log.warning("%s holds the tensors alone: %s", path, error)
        write_atomically(path, pack(model.state_dict(), {"kind": "state"}))


def write_recipe(out: Path, recipe: Mapping[str, Any]) -> None:
    """Write how the models of a run are made again, as `models/model.json`."""
    write_atomically(out / "models" / "model.json", (json.dumps(recipe, indent=1) + "\n").encode())


def read_recipe(out: Path) -> dict[str, Any]:
    """Return what `write_recipe` wrote; nothing where the run has no such file.

    Raises:
        DataError: the file is damaged.
    """
    path = out / "models" / "model.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; restore it, or pass model= (--model)") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it must hold an object; restore it, or pass model= (--model)")
    return found
