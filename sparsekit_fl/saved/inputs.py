"""read_inputs(): files of a user as the batch that a run's model takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit.errors import DataError, InvalidValueError, MissingDependencyError, install_hint
from sparsekit_fl.datasets.transforms import ImageTransform
from sparsekit_fl.saved.load import example_inputs_of

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_ARRAYS = (".npy", ".npz", ".csv", ".json")


def read_inputs(paths: Sequence[Path | str], recipe: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Read files as one batch.

    A picture is one example. An array is one example or a batch of them; the bytes of images (uint8) are scaled and normalised
    as the run's data were, and numbers of other kinds are taken as they are. A model of several inputs takes an `.npz` with one
    array for each, in order.

    Args:
        paths: Pictures, or `.npy`, `.npz`, `.csv` (a row per example) or `.json` (nested lists); all examples make one batch.
        recipe: From `read_recipe`.

    Returns:
        The model's positional inputs, each `(batch, …)`.

    Raises:
        DataError: a file cannot be read, or does not fit the model.
        InvalidValueError: no file.
        MissingDependencyError: a picture, and Pillow is not installed.
    """
    if not paths:
        raise InvalidValueError("no input; pass at least one file")
    examples = example_inputs_of(recipe)
    found = [_read(Path(path), examples, recipe) for path in paths]
    try:
        return tuple(torch.cat(column) for column in zip(*found, strict=True))
    except RuntimeError as error:
        raise DataError(f"the inputs do not go into one batch: {error}; predict with them one after the other") from error


def _read(path: Path, examples: tuple[Tensor, ...], recipe: Mapping[str, Any]) -> tuple[Tensor, ...]:
    kind = path.suffix.lower()
    if kind not in (*_PICTURES, *_ARRAYS):
        raise DataError(f"{path} is no input: allowed are {', '.join((*_ARRAYS, *_PICTURES))}")
    transform = _transform(recipe)
    try:
        if kind in _PICTURES:
            arrays = [_picture(path, 1 if transform is None else len(transform.mean))]
        else:
            arrays = _arrays(path, kind)
    except MissingDependencyError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} cannot be read: it does not exist") from error
    except Exception as error:
        # Readers of pictures and arrays raise many kinds.
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if len(arrays) != len(examples):
        raise DataError(
            f"{path} holds {len(arrays)} arrays, and the model takes {len(examples)} inputs; save one for each, in order"
        )
    return tuple(_fitted(path, array, example, transform) for array, example in zip(arrays, examples, strict=True))


def _arrays(path: Path, kind: str) -> list[Any]:
    if kind == ".npz":
        with np.load(path) as file:
            return [file[name] for name in file.files]
    if kind == ".npy":
        return [np.load(path)]
    if kind == ".csv":
        return [np.loadtxt(path, delimiter=",", ndmin=2)]
    return [np.asarray(json.loads(path.read_text(encoding="utf-8")))]


def _picture(path: Path, channels: int) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(f"reading {path} needs Pillow; {install_hint('fl')}") from error
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    return pixels[None, None] if channels == 1 else pixels.transpose(2, 0, 1)[None]


def _transform(recipe: Mapping[str, Any]) -> ImageTransform | None:
    about = recipe.get("about", {})
    numbers = about.get("transform") or {}
    if not numbers:
        return None
    channels, height, width = about["takes"]["shape"]
    return ImageTransform(channels, (height, width), tuple(numbers["mean"]), tuple(numbers["std"]))


def _fitted(path: Path, array: Any, example: Tensor, transform: ImageTransform | None) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise DataError(f"{path} holds values of type {array.dtype}; it must hold numbers")
    tensor = torch.from_numpy(np.array(array))
    if tensor.ndim == example.ndim - 1:
        tensor = tensor[None]
    if tensor.dtype == torch.uint8 and tensor.ndim == 4 and example.is_floating_point():
        tensor = tensor.float().div(255) if transform is None else transform(tensor)
    tensor = tensor.to(example.dtype)
    if tensor.ndim != example.ndim or (tensor.shape[1:] != example.shape[1:] and not _is_sequence(tensor, example)):
        raise DataError(
            f"{path} has examples of shape {tuple(tensor.shape[1:])}, the model takes {tuple(example.shape[1:])};"
            " save (batch, …) of that shape"
        )
    return tensor


def _is_sequence(tensor: Tensor, example: Tensor) -> bool:
    """Whether these are token ids of another length, which a recurrent network takes."""
    return not example.is_floating_point() and tensor.ndim == 2
